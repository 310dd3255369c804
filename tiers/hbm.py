"""The HBM tier: slots in memory of a GPU, which its processes share by IPC handles.

The daemon alone writes here. A handle lets its owner write, too, as a GPU has no read-only ones: so a region is one
tenant's, and its clients are trusted with each other's copies. Memory that a client may have opened is not given back
to the device, nor to anybody else, before that client has closed it or its process is gone.
"""

from __future__ import annotations

from typing import Protocol

from kvstore.errors import BadInputError, DeviceError
from kvstore.tiers.any_region import DAEMON_WRITER, AnyRegion
from kvstore.tiers.book import RegionBook
from kvstore.tiers.generations import Generations
from kvstore.tiers.memfd import PAGE_BYTES
from kvstore.tiers.slots import MOST_SLOTS, SlotState, SlotTable
from kvstore.tiers.slotted import SlottedTier
from kvstore.tiers.source import SourceFacts
from kvstore.types import FIRST_HBM_REGION_ID


class DeviceMemory(Protocol):
    """What is asked of the device: see ``kvstore.device.seam``."""

    def malloc(self, size_bytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def ipc_export(self, address: int) -> bytes: ...


class HbmRegion(AnyRegion):
    """Memory of the device. Nobody but the daemon writes it by right."""

    def __init__(self, memory: DeviceMemory, size_bytes: int) -> None:
        """Raises DeviceError when there is no room for it."""
        super().__init__(size_bytes)
        self._memory = memory
        self._address: int | None = memory.malloc(size_bytes)
        self._start = self._address
        self._handle = b""
        self.sealed = True

    @property
    def address(self) -> int:
        return self._start

    @property
    def handle(self) -> bytes:
        """By which another process opens it. Raises DeviceError."""
        if not self._handle:
            self._handle = self._memory.ipc_export(self._start)
        return self._handle

    def gone(self) -> None:
        address, self._address = self._address, None
        if address is not None:
            self._memory.free(address)


class HbmSource:
    """Regions within ``capacity_bytes`` of a device, each of whole ``grain_bytes``. Waits for its allocator."""

    def __init__(self, memory: DeviceMemory, capacity_bytes: int, grain_bytes: int) -> None:
        self.bound_bytes = capacity_bytes
        self._memory = memory
        self._grain_bytes = grain_bytes
        self._out_bytes = 0
        self._failure = ""

    @property
    def available_bytes(self) -> int:
        """What ``obtain`` can still give, if the device has it."""
        return self.bound_bytes - self._out_bytes

    def facts(self) -> SourceFacts:
        """The bytes now. None is ever raw."""
        return SourceFacts(self._out_bytes, 0, 0, self._failure)

    def obtain(self, wanted_bytes: int, unit_bytes: int, exact: bool = False, keep_bytes: int = 0) -> HbmRegion | None:
        """A region of at least one ``unit_bytes``, about ``wanted_bytes`` large, and not less if ``exact``; or None."""
        grain_bytes = self._grain_bytes
        most_bytes = (self.available_bytes - keep_bytes) // grain_bytes * grain_bytes
        size_bytes = min(-(-wanted_bytes // grain_bytes) * grain_bytes, most_bytes)
        if size_bytes < (wanted_bytes if exact else unit_bytes):
            return None
        try:
            region = HbmRegion(self._memory, size_bytes)
        except DeviceError as error:
            self._failure = f"no memory for a region of {size_bytes} bytes: {error}"
            return None
        self._out_bytes += size_bytes
        return region

    def give_back(self, size_bytes: int) -> None:
        """A region from ``obtain`` is gone for everybody: its bytes are free again."""
        self._out_bytes -= size_bytes


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
        retired_bytes = self._book.retired_bytes
        return {
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": used,
            "reserved_bytes": reserved,
            "quarantined_bytes": held,
            "free_bytes": max(self.capacity_bytes - used - reserved - held - retired_bytes, 0),
            "regions": len(self._book.regions),
            "retired_mapped_bytes": retired_bytes,
            "memory_failure": self._source.facts().failure,
        }

    def check(self) -> None:
        """Raises IntegrityError that names the invariant which doesn't hold. For tests: reads everything."""
        self._table.check()
        self._book.check()

    def close(self) -> None:
        """Give all memory back, also what clients have open: it would go with this process. Idempotent."""
        self._book.close_for_all()
        self._generations.close()

    def after_fork(self) -> None:
        """In a forked child, which has no part in the tier, nor in the device."""
        self._generations.close()

    def _new_region(self, writer: int, tenant: str, slot_bytes: int, missing: int) -> HbmRegion | None:  # noqa: ARG002
        whole_bytes = max(self.region_bytes // slot_bytes, 1) * slot_bytes
        return self._book.make(DAEMON_WRITER, tenant, slot_bytes, whole_bytes, exact=False)
