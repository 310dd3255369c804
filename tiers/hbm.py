"""The HBM tier: slots in memory of a GPU, which its processes share by IPC handles.

The daemon alone writes here. A handle lets its owner write, too, as a GPU has no read-only ones: so a region is one
tenant's, and its clients are trusted with each other's copies. Memory that a client may have opened is not given back
to the device, nor to anybody else, before that client has closed it or its process is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import BadInputError
from kvstore.tiers.any_region import DAEMON_WRITER
from kvstore.tiers.book import RegionBook
from kvstore.tiers.device_memory import DeviceMemory, HbmRegion, HbmSource, Later
from kvstore.tiers.generations import Generations
from kvstore.tiers.memfd import PAGE_BYTES
from kvstore.tiers.slots import MOST_SLOTS, SlotState, SlotTable
from kvstore.tiers.slotted import SlottedTier
from kvstore.types import FIRST_HBM_REGION_ID


class HbmTier(SlottedTier[HbmRegion]):
    """Slots within ``capacity_bytes`` of a device's memory, for ``DAEMON_WRITER`` only. Close it when done."""

    def __init__(
        self,
        memory: DeviceMemory,
        capacity_bytes: int,
        region_bytes: int = 64 << 20,
        grain_bytes: int = PAGE_BYTES,
    ) -> None:
        """Regions are made when needed, ``region_bytes`` each, where slots aren't larger.

        ``grain_bytes``: regions are multiples of it. What is exported of a GPU is whole pages of its own, 2 MiB mostly,
        with whatever else lies on them. Raises BadInputError for sizes that can't be used.
        """
        for name, value in (("region_bytes", region_bytes), ("grain_bytes", grain_bytes)):
            if value < PAGE_BYTES or value % PAGE_BYTES or value > MOST_SLOTS * PAGE_BYTES:
                raise BadInputError(
                    f"{name} is {value}; it must be whole pages of {PAGE_BYTES} bytes, at most {MOST_SLOTS}"
                )
        if capacity_bytes < grain_bytes:
            raise BadInputError(f"capacity_bytes is {capacity_bytes}; it must be at least {grain_bytes}")
        self.capacity_bytes = capacity_bytes // grain_bytes * grain_bytes
        self.region_bytes = region_bytes
        self._generations = Generations(self.capacity_bytes // PAGE_BYTES)
        self._table = SlotTable(self._generations)
        self._source = HbmSource(memory, self.capacity_bytes, grain_bytes)
        self._book = RegionBook(self._table, self._source)
        self._book.start_after(FIRST_HBM_REGION_ID)

    def make_calls(self, later: Later, failed: Callable[[str], None]) -> None:
        """Have the calls that wait for the device made by ``later``, and tell ``failed`` why one failed.

        Without this ``allocate`` and whatever gives regions up wait themselves.
        """
        self._source.later, self._source.failed = later, failed

    @property
    def awaits_memory(self) -> bool:
        """Whether ``allocate`` may give more once calls to the device that were handed out have been made."""
        return self._source.is_waiting

    @property
    def leaving_bytes(self) -> int:
        """Bytes that are on their way back to the device: room again when they are there."""
        return self._source.leaving_bytes

    @property
    def lost_bytes(self) -> int:
        """Bytes that the device failed to take back: they count for good."""
        return self._source.lost_bytes

    @property
    def device_is_full(self) -> bool:
        """Whether the device had no room for a region, though the tier may have more; see ``ask_again``."""
        return self._source.full

    def ask_again(self) -> None:
        """Others may have given memory of the device back."""
        self._source.full = False

    def idle_regions(self) -> frozenset[int]:
        """Ids of regions without a slot that is reserved or held back: they are empty once nothing live is there."""
        counts = self._table.counts
        return frozenset(
            self._table.ids[(counts[SlotState.RESERVED] == 0) & (counts[SlotState.QUARANTINED] == 0)].tolist()
        )

    def drop_client(self, client: int) -> None:
        """A client is gone, with all that it had opened."""
        self._book.drop_client(client)

    def stats(self) -> dict[str, int | str]:
        """Bytes and facts now; ``free_bytes`` is what holds nothing and is not waited for."""
        table = self._table
        used, reserved, held = (
            table.bytes_in(state) for state in (SlotState.LIVE, SlotState.RESERVED, SlotState.QUARANTINED)
        )
        retired_bytes, lost_bytes = self._book.retired_bytes, self._source.lost_bytes
        elsewhere_bytes = used + reserved + held + retired_bytes + lost_bytes + self._source.leaving_bytes
        return {
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": used,
            "reserved_bytes": reserved,
            "quarantined_bytes": held,
            "free_bytes": max(self.capacity_bytes - elsewhere_bytes, 0),
            "regions": len(self._book.regions),
            "retired_mapped_bytes": retired_bytes,
            "lost_bytes": lost_bytes,
            "memory_failure": self._source.facts().failure,
        }

    def check(self) -> None:
        """Raises IntegrityError that names the invariant which doesn't hold. For tests: reads everything."""
        self._table.check()
        self._book.check()

    def close(self) -> None:
        """Give all memory back, also what clients have open: it would go with this process. Idempotent.

        Waits for the device; what that fails to take back is left to the end of the process.
        """
        self._source.close()
        self._book.close_for_all()
        self._generations.close()

    def after_fork(self) -> None:
        """In a forked child, which has no part in the tier, nor in the device."""
        self._generations.close()

    def _new_region(self, writer: int, tenant: str, slot_bytes: int, missing: int) -> HbmRegion | None:  # noqa: ARG002
        whole_bytes = max(self.region_bytes // slot_bytes, 1) * slot_bytes
        return self._book.make(DAEMON_WRITER, tenant, slot_bytes, whole_bytes, exact=False)
