"""The DRAM tier: slots in memory regions that clients map.

It knows slots, writers and mappers, and no keys: what lies in a slot is the caller's ``tag``. One thread
calls it (the prefault thread is its own business); ``copy_moves`` may run elsewhere. Nothing here waits
for a client: what a client still maps simply counts until the client says that it is unmapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
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
from kvstore.tiers.reclaim import Moves, Reclaim, Reclaimer, addresses, copy_moves
from kvstore.tiers.region import DAEMON_WRITER, Region
from kvstore.tiers.slots import MOST_SLOTS, Described, Int64s, SlotState, SlotTable
from kvstore.tiers.source import RegionSource
from kvstore.types import SLOT_BITS

__all__ = ["DAEMON_WRITER", "DramTier", "Located", "Reclaim", "Region", "SlotState"]

_RUN_REGIONS = 8
"""Regions searched for one run of slots before scattered ones do: a bound on the work of an allocation."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where slots lie, one entry a slot: region, offset in its descriptor in bytes, generation now."""

    region_ids: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    generations: NDArray[np.uint64]


class DramTier:
    """Slots within ``capacity_bytes`` of memory (rounded down to pages). Close it when done."""

    def __init__(
        self,
        capacity_bytes: int,
        region_bytes: int = 64 << 20,
        starter_bytes: int = 4 << 20,
        prefault: bool = True,
        ledger: Ledger | None = None,
        former: Former | None = None,
    ) -> None:
        """Regions are made when needed: ``starter_bytes`` for the first of a class, then ``region_bytes``.

        ``prefault`` fills pages of the whole capacity in the background. With a ``ledger`` the tier can be
        taken over by a later daemon; ``former`` is what an earlier one left, of which it takes what fits:
        see ``former_blocks``. It owns the descriptors of ``former`` from now on. Raises BadInputError for
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
            self.capacity_bytes, region_bytes, self.starter_bytes, prefault, adopted_bytes=plan.out_bytes
        )
        self._book = RegionBook(self._table, self._source, ledger)
        self.former_blocks: FormerBlocks = take_in(plan, self._book, self._table)
        """The blocks that were taken over, live under tags 0, 1, ...: give them their own, or free them."""
        self._settling = bool(plan.kept)
        self._reclaimer = Reclaimer(self._book, self._table, self._source)
        self._huge_pages_note = huge_pages_note()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- slots ----------------------------------------------------------------------------------

    def slot_bytes(self, block_bytes: int) -> int:
        """Bytes of a slot that holds a block: whole pages. Raises BadInputError below 1."""
        if block_bytes < 1:
            raise BadInputError(f"block_bytes is {block_bytes}; it must be at least 1")
        return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES

    def allocate(self, writer: int, tenant: str, slot_bytes: int, n: int) -> Int64s:
        """Up to ``n`` slots that the writer may fill, now reserved; int64, fewer or none when full.

        Uses free slots of the writer's regions (a run of ``n`` where one is near, else the lowest), then
        new regions while the budget lasts; see ``region().sealed`` for those to hand to the writer.
        Mutates; makes no copy and evicts nothing. Raises BadInputError for an impossible size.
        """
        if slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES:
            raise BadInputError(f"slot_bytes is {slot_bytes}; it must be a multiple of {PAGE_BYTES}: see slot_bytes()")
        if n < 0:
            raise BadInputError(f"n is {n}; it must be 0 or more slots")
        slots = self._open_slots(writer, tenant, slot_bytes, n)
        while len(slots) < n:
            region = self._new_region(writer, tenant, slot_bytes, n - len(slots))
            if region is None:
                break
            slots = np.append(slots, self._table.first_run(region.id, min(n - len(slots), region.n_slots)))
        self._table.hand_out(slots)
        return slots

    def free_slots(self, writer: int, tenant: str, slot_bytes: int) -> int:
        """How many slots ``allocate`` would give now: free ones, and those the budget has room for."""
        rows = self._table.rows(self._book.usable_ids(writer, tenant, slot_bytes))
        free = int(self._table.counts[SlotState.FREE, rows].sum())
        return free + self._book.available_bytes // slot_bytes

    def usable_regions(self, writer: int, tenant: str, slot_bytes: int) -> frozenset[int]:
        """Ids of the regions whose free slots the writer may fill."""
        return frozenset(self._book.usable_ids(writer, tenant, slot_bytes).tolist())

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

    def commit(self, slots: Int64s, tags: Int64s) -> None:
        """Reserved slots become live under tags (0 or above). Raises IntegrityError before any change."""
        self._table.commit(slots, tags)

    def free(self, slots: Int64s) -> None:
        """Slots may be handed out again; their generations move on. Raises IntegrityError before any change.

        Only for slots that no client can use any more: see ``quarantine``.
        """
        self._table.free(slots)

    def withdraw(self, slots: Int64s) -> None:
        """A later daemon that takes the memory over does not find what lies in these live slots. Idempotent."""
        self._table.withdraw(slots)

    def quarantine(self, slots: Int64s) -> None:
        """Reserved or live slots stop being anyone's but are not reused before ``free``.

        For slots that a client may still write or read although its right ended. They lose their tags and
        count against capacity. Raises IntegrityError before any change.
        """
        self._table.quarantine(slots)

    def tags(self, slots: Int64s) -> Int64s:
        """The tags of slots, -1 for those not live."""
        return self._table.tags_of(slots)

    def set_tags(self, slots: Int64s, tags: Int64s) -> None:
        """Give live slots other tags. Raises IntegrityError before any change."""
        self._table.set_tags(slots, tags)

    def states(self, slots: Int64s) -> NDArray[np.uint8]:
        """The ``SlotState`` of each slot."""
        return self._table.states[self._table.resolve(slots).places]

    def locate(self, slots: Int64s) -> Located:
        """Where slots lie. Raises IntegrityError for a slot of no region."""
        found = self._table.resolve(slots)
        return Located(
            (slots >> SLOT_BITS).astype(np.uint32),
            (found.indexes * self._table.slot_bytes[found.rows]).astype(np.uint64),
            self._generations.values[found.places],
        )

    def describe(self, slots: Int64s) -> Described:
        """What a client needs to find slots in its own mappings. Raises IntegrityError for an unknown one."""
        return self._table.describe(slots)

    def generation_index(self, slots: Int64s) -> Int64s:
        """The places of slots in the file behind ``generations_fd``, in counters of 8 bytes."""
        return self._table.resolve(slots).places

    def addresses(self, slots: Int64s) -> NDArray[np.uint64]:
        """Where slots lie in the daemon's own writable mappings; valid while their regions are there."""
        return addresses(self._book, self._table, slots)

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a slot in the daemon's own mapping, uint8 ``[slot_bytes]``, writable, no copy.

        Don't keep it longer than the slot: it keeps the memory of the region.
        """
        one = np.array([slot], np.int64)
        index = int(self._table.resolve(one).indexes[0])
        region = self._book.regions[slot >> SLOT_BITS]
        return region.array[index * region.slot_bytes : (index + 1) * region.slot_bytes]

    # -- regions --------------------------------------------------------------------------------

    @property
    def generations_fd(self) -> int:
        """The file of generations (uint64 each); clients can only map it read-only."""
        return self._generations.fd

    @property
    def generations_bytes(self) -> int:
        """Size of that file; sparse."""
        return self._generations.size_bytes

    @property
    def regions(self) -> MappingProxyType[int, Region]:
        """All assigned regions by id; raw and retired ones are not among them."""
        return MappingProxyType(self._book.regions)

    def region(self, region_id: int) -> Region:
        """One region. Raises IntegrityError when it is retired or was never made."""
        return self._book.region(region_id)

    def seal(self, region_id: int) -> None:
        """The writer has mapped it: from now on nobody can map it writable. Idempotent."""
        self._book.region(region_id).seal()

    def add_mapper(self, region_id: int, client: int) -> None:
        """A client is about to get the descriptor; its mapping counts until it is removed.

        Raises IntegrityError when the region isn't sealed and the client isn't its writer.
        """
        self._book.add_mapper(region_id, client)

    def remove_mapper(self, region_id: int, client: int) -> None:
        """A client says that it has unmapped a region. Does nothing for one long gone."""
        self._book.remove_mapper(region_id, client)

    def is_mapped_by(self, client: int) -> bool:
        """Whether a client may have regions mapped, retired ones included."""
        return self._book.is_mapped_by(client)

    def mapped_by(self, client: int) -> dict[int, int]:
        """The regions that a client may have mapped, retired ones included, each with its inode; 0 if not known."""
        return self._book.mapped_by(client)

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

    def pending_unmaps(self) -> dict[int, list[int]]:
        """For each client the retired regions that it still maps: it must be asked to unmap them."""
        return self._book.pending_unmaps()

    @property
    def retired_mapped_bytes(self) -> int:
        """Bytes of regions that are gone but for the clients that still map them."""
        return self._book.retired_bytes

    def retire_empty(self, keep_for: tuple[int, str, int], limit_bytes: int | None = None) -> list[int]:
        """Retire empty regions that an asker (writer, tenant, slot_bytes) can't use; returns their ids.

        Their bytes return to the budget at once, or when the last client has unmapped. Stops when
        ``limit_bytes`` are retired, if given.
        """
        return self._book.retire_empty(keep_for, limit_bytes)

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

    # -- allocation -----------------------------------------------------------------------------

    def _open_slots(self, writer: int, tenant: str, slot_bytes: int, n: int) -> Int64s:
        """Up to ``n`` free slots of the writer's regions: one run where it is near, else the lowest."""
        ids = self._book.usable_ids(writer, tenant, slot_bytes)
        free = self._table.counts[SlotState.FREE, self._table.rows(ids)]
        for region_id in ids[free >= n][:_RUN_REGIONS].tolist() if n > 1 else ():
            run = self._table.first_run(region_id, n)
            if len(run):
                return run
        return self._table.lowest_free(ids[free > 0], n)

    def _new_region(self, writer: int, tenant: str, slot_bytes: int, missing: int) -> Region | None:
        """A first region of a class is small, so that many small writers share the tier."""
        small = not self._book.has_class(writer, tenant, slot_bytes) and missing * slot_bytes <= self.starter_bytes
        size_bytes = self.starter_bytes if small else self.region_bytes
        whole_bytes = max(size_bytes // slot_bytes, 1) * slot_bytes
        return self._book.make(writer, tenant, slot_bytes, whole_bytes, exact=False)
