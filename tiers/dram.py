"""The DRAM tier: slots in memory regions that clients map.

It knows slots, writers and mappers, and no keys: what lies in a slot is the caller's ``tag``. One thread
calls it (the prefault thread is its own business); ``copy_moves`` may run elsewhere. Nothing here waits
for a client: what a client still maps simply counts until the client says that it is unmapped.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError, IntegrityError
from kvstore.native import backend, huge_pages_note
from kvstore.tiers.adopted import Former, FormerBlocks, Plan, plan_adoption, take_in
from kvstore.tiers.book import RegionBook
from kvstore.tiers.directory import SlotDirectory
from kvstore.tiers.generations import Generations
from kvstore.tiers.labelling import Labelling
from kvstore.tiers.ledger import Ledger
from kvstore.tiers.memfd import PAGE_BYTES
from kvstore.tiers.reclaim import Moves, Reclaim, Reclaimer, copy_moves
from kvstore.tiers.region import DAEMON_WRITER, Region
from kvstore.tiers.slots import MOST_SLOTS, Int64s, SlotState, SlotTable
from kvstore.tiers.slotted import Located, SlottedTier
from kvstore.tiers.source import RegionSource
from kvstore.types import SLOT_BITS

__all__ = ["DAEMON_WRITER", "DramTier", "Located", "Reclaim", "Region", "SlotState"]


class DramTier(SlottedTier[Region]):
    """Slots within ``capacity_bytes`` of memory (rounded down to pages). Close it when done."""

    def __init__(
        self,
        capacity_bytes: int,
        region_bytes: int = 64 << 20,
        starter_bytes: int = 4 << 20,
        prefault: bool = True,
        ledger: Ledger | None = None,
        former: Former | None = None,
        numa_node: int | None = None,
        unsealed: bool = False,
    ) -> None:
        """Regions are made when needed: ``starter_bytes`` for the first of a class, then ``region_bytes``.

        ``prefault`` fills pages of the whole capacity in the background. With a ``ledger`` the tier can be
        taken over by a later daemon; ``former`` is what an earlier one left, of which it takes what fits:
        see ``former_blocks``. It owns the descriptors of ``former`` from now on. New memory comes from ``numa_node``
        where that is given and has some. With ``unsealed`` clients of a tenant may map each other's regions
        writable, as some GPUs need it. Raises BadInputError for
        sizes that can't be used, OSError when the system gives no memory file at all.
        """
        for name, value in (("region_bytes", region_bytes), ("starter_bytes", starter_bytes)):
            if value < PAGE_BYTES or value % PAGE_BYTES or value > MOST_SLOTS * PAGE_BYTES:
                raise BadInputError(
                    f"{name} is {value}; it must be whole pages of {PAGE_BYTES} bytes, at most {MOST_SLOTS}"
                )
        if capacity_bytes < PAGE_BYTES:
            raise BadInputError(f"capacity_bytes is {capacity_bytes}; it must be at least {PAGE_BYTES}")
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.region_bytes = region_bytes
        self.starter_bytes = min(starter_bytes, region_bytes)
        self._generations = Generations(self.capacity_bytes // PAGE_BYTES)
        directory = SlotDirectory(self._generations.ranges.limit) if ledger is not None else None
        self._table = SlotTable(self._generations, directory)
        self.labelling = Labelling(self._table, directory) if directory is not None else None
        """What later daemons are told of the blocks; None without a ledger."""
        plan = plan_adoption(former, self.capacity_bytes) if former is not None else Plan()
        self._source = RegionSource(
            self.capacity_bytes, region_bytes, self.starter_bytes, prefault, plan.out_bytes, numa_node, unsealed
        )
        made = ledger.region_made if ledger is not None else None
        self._book = RegionBook(self._table, self._source, ledger, made)
        self.former_blocks: FormerBlocks = take_in(plan, self._book, self._table)
        """The blocks that were taken over, live under tags 0, 1, ...: give them their own, or free them."""
        self._settling = bool(plan.kept)
        self._reclaimer = Reclaimer(self._book, self._table, self._source)
        self._unsealed = unsealed
        self._huge_pages_note = huge_pages_note()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- slots ----------------------------------------------------------------------------------

    def other_regions(self, writer: int, slot_bytes: int) -> frozenset[int]:
        """Ids of the regions of a writer that have slots of another size."""
        return self._book.other_ids(writer, slot_bytes)

    def orphan_regions(self) -> frozenset[int]:
        """Ids of the regions without a living writer, the daemon's own included."""
        return self._book.orphan_ids()

    def free_elsewhere_bytes(self, writer: int, tenant: str, slot_bytes: int) -> int:
        """Bytes of free slots that the writer can't fill, because they lie in regions of others."""
        table = self._table
        free_bytes = table.counts[SlotState.FREE] * table.slot_bytes
        own = table.rows(self._book.usable_ids(writer, tenant, slot_bytes))
        return int(free_bytes.sum() - free_bytes[own].sum())

    def withdraw(self, slots: Int64s) -> None:
        """A later daemon that takes the memory over does not find what lies in these live slots. Idempotent."""
        self._table.withdraw(slots)

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a slot in the daemon's own mapping, uint8 ``[slot_bytes]``, writable, no copy.

        Don't keep it longer than the slot: it keeps the memory of the region.
        """
        one = np.array([slot], np.int64)
        index = int(self._table.resolve(one).indexes[0])
        region = self._book.regions[slot >> SLOT_BITS]
        return region.array[index * region.slot_bytes : (index + 1) * region.slot_bytes]

    # -- regions --------------------------------------------------------------------------------

    def seal(self, region_id: int) -> None:
        """The writer has mapped it: from now on nobody can map it writable. Idempotent."""
        self._book.region(region_id).seal()

    def drop_client(self, client: int) -> None:
        """A client is gone with all its mappings; the regions that it wrote become orphans."""
        self.writer_gone(client)
        self._book.drop_client(client)

    def writer_gone(self, writer: int) -> None:
        """Nobody writes in this writer's regions any more: they become orphans, sealed.

        Reserved slots stay reserved until they are freed. The daemon (0) never goes: IntegrityError.
        """
        if writer == DAEMON_WRITER:
            raise IntegrityError("writer 0 is the daemon; its regions can't become orphans")
        self._book.writer_gone(writer)

    def settle(self, client: int) -> bool:
        """A client uses nothing any more that it was lent by an earlier daemon. Whether that was waited for."""
        return self._book.settle(client)

    @property
    def settling(self) -> bool:
        """Whether slots of adopted regions wait for clients that are expected to settle any moment."""
        self._settling = self._settling and self._book.unsettled_bytes() > 0
        return self._settling

    def end_settling(self) -> None:
        """Who has not settled by now is not waited for: its regions serve as they are."""
        self._settling = False

    # -- reclaim --------------------------------------------------------------------------------

    def plan_reclaim(
        self, writer: int, tenant: str, slot_bytes: int, movable: Callable[[Int64s], NDArray[np.bool_]]
    ) -> Reclaim | None:
        """Choose a region that the asker can't use and room for its blocks; None when nothing can move.

        The source has the smallest live part, no reserved or quarantined slot, and ``movable(tags)`` holds
        for all its live ones. Its blocks go to free slots of the same tenant and size in regions without a
        living writer or of the same writer; for what is missing a region of the daemon's own is made, if
        the budget has room. Those slots are now reserved and the source takes no new blocks until
        ``finish_reclaim`` or ``abort_reclaim``. One at a time: None while another is under way.
        """
        return self._reclaimer.plan(writer, tenant, slot_bytes, movable)

    @staticmethod
    def copy_moves(moves: Moves | Reclaim, threads: int = 1) -> None:
        """Copy the blocks of a plan. Thread-safe, changes no table; blocks without Python's lock."""
        copy_moves(moves.moves if isinstance(moves, Reclaim) else moves, threads)

    def still_valid(self, reclaim: Reclaim) -> NDArray[np.bool_]:
        """Which moves of a plan still concern the same live blocks as when it was made; bool ``[n]``."""
        return self._reclaimer.still_valid(reclaim)

    def finish_reclaim(self, reclaim: Reclaim, done: NDArray[np.bool_] | None = None) -> list[int]:
        """The copies become the blocks: commits them, frees their sources and retires the source region.

        ``done`` says which moves count (default, and at most: those ``still_valid``); the room of others
        is freed and their source stays. Returns the ids of retired regions: none when blocks stayed.
        Raises IntegrityError for a plan that isn't under way, or a move done that isn't valid.
        """
        return self._reclaimer.finish(reclaim, done)

    def abort_reclaim(self, reclaim: Reclaim) -> None:
        """Undo a plan: nothing has moved, the room for the copies is free again."""
        self._reclaimer.abort(reclaim)

    # -- facts ----------------------------------------------------------------------------------

    def wait_prefaulted(self, timeout_s: float) -> bool:
        """Block until the whole capacity is prefaulted; False when it takes longer or never will be."""
        return self._source.wait_prefaulted(timeout_s)

    def stats(self) -> dict[str, int | bool | str]:
        """Bytes and facts now; ``free_bytes`` is what holds nothing and is not waited for."""
        table, facts, regions = self._table, self._source.facts(), self._book.regions.values()
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
            "regions": len(regions),
            "adopted_bytes": sum(region.size_bytes for region in regions if region.read_only),
            "unsettled_bytes": self._book.unsettled_bytes(),
            "orphan_regions": sum(region.writer is None for region in regions),
            "retired_mapped_bytes": retired_bytes,
            "raw_bytes": facts.raw_bytes,
            "prefaulted_bytes": facts.raw_prefaulted_bytes + sum(region.populated_bytes for region in regions),
            "isolation": "tenant" if self._unsealed else "client",
            "huge_pages": not self._huge_pages_note,
            "huge_pages_note": self._huge_pages_note,
            "memory_failure": facts.failure,
            "copy_backend": backend(),
        }

    def check(self) -> None:
        """Raises IntegrityError that names the invariant which doesn't hold. For tests: reads everything."""
        self._table.check()
        self._book.check()

    def close(self) -> None:
        """Stop the thread, close all descriptors, unmap. Idempotent. Views that are kept stay readable."""
        self._source.close()
        self._book.close()
        self._generations.close()
        if self.labelling is not None:
            self.labelling.close()

    def after_fork(self) -> None:
        """In a forked child, which has no part in the tier: its memory does not live on in the child."""
        self._source.after_fork()
        self._book.close()
        self._generations.close()

    def _new_region(self, writer: int, tenant: str, slot_bytes: int, missing: int) -> Region | None:
        """A first region of a class is small, so that many small writers share the tier."""
        small = not self._book.has_class(writer, tenant, slot_bytes) and missing * slot_bytes <= self.starter_bytes
        size_bytes = self.starter_bytes if small else self.region_bytes
        whole_bytes = max(size_bytes // slot_bytes, 1) * slot_bytes
        return self._book.make(writer, tenant, slot_bytes, whole_bytes, exact=False)
