"""Emptying one region by moving its blocks, so that its memory can serve another writer, class or tenant.

A plan changes nothing but reserving room for the copies; the copying may run in another thread; then the
caller points its index to the copies and finishes, or aborts.

A reader's block never moves to where a client may write that could not write it before: copies go to
regions without a living writer, or to others of the same writer, always of the same tenant and slot size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.native import Mapping, copy_batch
from kvstore.tiers.book import RegionBook
from kvstore.tiers.region import DAEMON_WRITER, Region
from kvstore.tiers.slots import Int64s, SlotState, SlotTable
from kvstore.tiers.source import RegionSource
from kvstore.types import SLOT_BITS

COPY_CHUNK_BYTES = 8 << 20

MOST_SOURCES = 32
"""Regions considered as the source of one reclaim: a bound on the work of a plan."""

Movable = Callable[[Int64s], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies to make. Holds the memory of both sides, so that it may be used from another thread."""

    src_slots: Int64s
    dst_slots: Int64s
    tags: Int64s
    src_addresses: NDArray[np.uint64]
    dst_addresses: NDArray[np.uint64]
    slot_bytes: int
    memory: tuple[Mapping, ...] = field(repr=False, default=())

    def __len__(self) -> int:
        return len(self.src_slots)


@dataclass(frozen=True, slots=True)
class Reclaim:
    """A region being emptied. ``generations`` are those of the source slots when it was planned."""

    source_region_id: int
    moves: Moves
    generations: NDArray[np.uint64] = field(repr=False)
    made_region_id: int | None = None

    @property
    def src_slots(self) -> Int64s:
        """int64 ``[n]``: the live slots of the source."""
        return self.moves.src_slots

    @property
    def dst_slots(self) -> Int64s:
        """int64 ``[n]``: reserved slots that take the copies."""
        return self.moves.dst_slots

    @property
    def tags(self) -> Int64s:
        """int64 ``[n]``: the tags of both."""
        return self.moves.tags


class Reclaimer:
    """Plans one reclaim at a time over the regions of a tier."""

    def __init__(self, book: RegionBook[Region], table: SlotTable, source: RegionSource) -> None:
        self._book = book
        self._table = table
        self._source = source
        self._current: Reclaim | None = None

    def plan(self, writer: int, tenant: str, slot_bytes: int, movable: Movable) -> Reclaim | None:
        """See ``DramTier.plan_reclaim``."""
        if self._current is not None:
            return None
        for source in self._sources(writer, tenant, slot_bytes):
            live, tags = self._table.live_in(source.id)
            if np.asarray(movable(tags)).all():
                room = self._room_for(source, len(live))
                if room is not None:
                    self._current = self._begin(source, live, tags, *room)
                    return self._current
        return None

    def still_valid(self, reclaim: Reclaim) -> NDArray[np.bool_]:
        """Which moves still concern the same live blocks as when they were planned."""
        self._must_be_current(reclaim)
        places = self._table.resolve(reclaim.src_slots).places
        same: NDArray[np.bool_] = self._table.generations.values[places] == reclaim.generations
        same &= self._table.tags[places] == reclaim.tags  # a slot that isn't live has none
        return same

    def finish(self, reclaim: Reclaim, done: NDArray[np.bool_] | None) -> list[int]:
        """See ``DramTier.finish_reclaim``."""
        valid = self.still_valid(reclaim)
        done = valid if done is None else done
        if (done & ~valid).any():
            slot = int(reclaim.src_slots[done & ~valid][0])
            raise IntegrityError(f"slot {slot} is no longer the block that was planned; leave it out of done")
        self._table.commit(reclaim.dst_slots[done], reclaim.tags[done])
        self._table.free(reclaim.src_slots[done])
        self._table.free(reclaim.dst_slots[~done])
        return self._end(reclaim)

    def abort(self, reclaim: Reclaim) -> None:
        """See ``DramTier.abort_reclaim``."""
        self._must_be_current(reclaim)
        self._table.free(reclaim.dst_slots)
        self._end(reclaim)

    def _must_be_current(self, reclaim: Reclaim) -> None:
        if reclaim is not self._current:
            raise IntegrityError(f"the reclaim of region {reclaim.source_region_id} is not under way (any more)")

    def _sources(self, writer: int, tenant: str, slot_bytes: int) -> list[Region]:
        """Regions that the asker can't use, with live slots and no others in use, least live part first."""
        table = self._table
        in_flux = table.counts[SlotState.RESERVED] + table.counts[SlotState.QUARANTINED]
        live = table.counts[SlotState.LIVE]
        fits = (in_flux == 0) & (live > 0) & ~np.isin(table.ids, self._book.usable_ids(writer, tenant, slot_bytes))
        rows = np.flatnonzero(fits)
        rows = rows[np.argsort(live[rows] / table.n_slots[rows], kind="stable")][:MOST_SOURCES]
        return [self._book.regions[region_id] for region_id in table.ids[rows].tolist()]

    def _room_for(self, source: Region, n: int) -> tuple[Int64s, Region | None] | None:
        """``n`` free slots for copies and the region made for some of them; None when there is no room."""
        slots = self._table.lowest_free(np.array([r.id for r in self._holders(source)], np.int64), n)
        missing = n - len(slots)
        made: Region | None = None
        if missing:
            missing_bytes = missing * source.slot_bytes
            if missing_bytes >= source.size_bytes or missing_bytes > self._source.available_bytes:
                return None
            made = self._book.make(DAEMON_WRITER, source.tenant, source.slot_bytes, missing_bytes, exact=True)
            if made is None:
                return None
            if made.n_slots < missing:
                self._book.retire(made)
                return None
            slots = np.append(slots, self._table.first_run(made.id, missing))
        return slots, made

    def _holders(self, source: Region) -> list[Region]:
        """Regions with free slots where copies of the source's blocks may lie, best first."""
        ids = self._table.ids[(self._table.counts[SlotState.FREE] > 0) & (self._table.slot_bytes == source.slot_bytes)]
        regions = [self._book.regions[region_id] for region_id in ids.tolist()]
        fit = [region for region in regions if _can_hold(region, source)]
        # Room without a living writer first: nobody else can use it. Then the fullest, so that others empty.
        return sorted(fit, key=lambda r: (r.writer not in (None, DAEMON_WRITER), self._free_part(r), r.id))

    def _free_part(self, region: Region) -> float:
        return float(self._table.counts[SlotState.FREE, self._table.row(region.id)]) / region.n_slots

    def _begin(self, source: Region, live: Int64s, tags: Int64s, dst: Int64s, made: Region | None) -> Reclaim:
        self._table.hand_out(dst)
        self._book.drain(source, True)
        used = {source.id, *np.unique(dst >> SLOT_BITS).tolist()}
        moves = Moves(
            live,
            dst,
            tags,
            self._book.addresses(live),
            self._book.addresses(dst),
            source.slot_bytes,
            tuple(self._book.regions[region_id].mapping for region_id in used),
        )
        generations = self._table.generations.values[self._table.resolve(live).places]
        return Reclaim(source.id, moves, generations, made.id if made is not None else None)

    def _end(self, reclaim: Reclaim) -> list[int]:
        self._current = None
        source = self._book.region(reclaim.source_region_id)
        self._book.drain(source, False)
        gone: list[int] = []
        for region_id in (reclaim.source_region_id, reclaim.made_region_id):
            if region_id is not None and self._table.is_empty(region_id):
                self._book.retire(self._book.region(region_id))
                gone.append(region_id)
        return gone


def copy_moves(moves: Moves, threads: int = 1) -> None:
    """Copy all blocks of a plan. Thread-safe, touches no table; blocks without Python's lock."""
    step = max(1, COPY_CHUNK_BYTES // moves.slot_bytes)
    for start in range(0, len(moves), step):
        part = slice(start, start + step)
        copy_batch(moves.dst_addresses[part], moves.src_addresses[part], moves.slot_bytes, threads)


def _can_hold(region: Region, source: Region) -> bool:
    if region is source or region.draining or region.tenant != source.tenant:
        return False
    if not region.sealed or region.read_only:
        return False  # its writer has yet to map it, and readers would have to wait for that; or this daemon can't
    return region.writer in (None, DAEMON_WRITER) or region.writer == source.writer
