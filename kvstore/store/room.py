"""Making room: evict in policy order, retire empty regions, gather scattered blocks.

A region can be written by one client only, so an evicted block's slot helps a writer only if it lies in
one of the writer's own regions. What lies elsewhere helps once its whole region is empty: then the
region is retired and its bytes make a new one. Blocks that stand in the way of that move into regions
without a living writer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.lease import Reservation
from kvstore.metrics import Counters
from kvstore.prefix_index.index import PrefixIndex
from kvstore.tiers.dram import DramTier, Reclaim


@dataclass(slots=True)
class PendingReclaim:
    """Blocks to be moved. Run ``copy`` on any thread, then hand this back to the store."""

    reclaim: Reclaim
    ids: NDArray[np.uint32]
    dram: DramTier

    def copy(self) -> None:
        """Copy the bytes; changes no table, blocks for as long as the copy takes."""
        self.dram.copy_moves(self.reclaim)


class RoomMaker:
    """Makes slots available to a writer, at the policy's cost. One reclaim at a time."""

    def __init__(self, index: PrefixIndex, dram: DramTier, counters: Counters, spare_bytes: int) -> None:
        """``spare_bytes``: how much may be evicted beyond what is to be written, to empty a region."""
        self._index = index
        self._dram = dram
        self._counters = counters
        self._spare_bytes = spare_bytes
        self.pending: PendingReclaim | None = None
        """The move under way."""

    def make(self, reservation: Reservation) -> PendingReclaim | None:
        """Evict until the reservation's slots can be allocated, or nothing more can be done without a move.

        Returns the move to be made next, or None when there is room or nothing helps. All calls for one
        reservation together evict what it wants to write, and ``spare_bytes`` more where that does not
        help its writer directly.
        """
        asker = (reservation.writer, reservation.tenant, reservation.slot_bytes)
        step = short = self._short(reservation)
        if short > 0 and reservation.evict_bytes_left is None:
            self._set_bounds(reservation, short)
        while (
            short > 0 and (reservation.evict_bytes_left or 0) > 0 and not self._is_coming(reservation, short)
        ):
            evicted = self._index.evict(step)
            if not len(evicted.ids):
                break
            self._dram.free(evicted.slots)
            self._counters.add("evicted_blocks", len(evicted.ids))
            reservation.evict_bytes_left -= int(np.sum(evicted.size_bytes))
            self._dram.retire_empty(keep_for=asker)
            before, short = short, self._short(reservation)
            # Nothing gained: the victims lie in regions of others. Take larger steps towards a whole region.
            step = short if short < before else 2 * step
        return None if short <= 0 or self._is_coming(reservation, short) else self._plan(asker)

    def finish(self, pending: PendingReclaim) -> None:
        """The copy is done: index and tier switch to the new slots together.

        A block that was leased meanwhile stays: its reader looks at the old slot.
        """
        moved = self._index.table.refs[pending.ids] == 1
        self._index.relocate(pending.ids[moved], pending.reclaim.moves.dst_slots[moved])
        self._dram.finish_reclaim(pending.reclaim, moved)
        self._index.unpin(pending.ids)
        self._counters.add("moved_blocks", int(moved.sum()))
        self.pending = None

    def cancel(self, pending: PendingReclaim) -> None:
        """Leave every block where it is."""
        self._dram.abort_reclaim(pending.reclaim)
        self._index.unpin(pending.ids)
        self.pending = None

    def _short(self, reservation: Reservation) -> int:
        asker = (reservation.writer, reservation.tenant, reservation.slot_bytes)
        return reservation.n_wanted - self._dram.free_slots(*asker)

    def _set_bounds(self, reservation: Reservation, short: int) -> None:
        # Regions that others were made to leave will be room soon: nobody's blocks go twice for it. But a
        # client may be long in leaving, so that evicting as much as is to be written goes on meanwhile.
        leaving_bytes = self._leaving_bytes()
        reservation.leaving_bytes_before = leaving_bytes
        reservation.evict_bytes_left = short * reservation.slot_bytes + max(
            self._spare_bytes - leaving_bytes, 0
        )

    def _is_coming(self, reservation: Reservation, short: int) -> bool:
        """Whether enough was retired for this reservation; clients that map it have yet to leave."""
        return self._leaving_bytes() - reservation.leaving_bytes_before >= short * reservation.slot_bytes

    def _leaving_bytes(self) -> int:
        return int(self._dram.stats()["retired_mapped_bytes"])

    def _plan(self, asker: tuple[int, str, int]) -> PendingReclaim | None:
        if self.pending is not None:
            return None
        reclaim = self._dram.plan_reclaim(*asker, movable=self._movable)
        if reclaim is None:
            return None
        # Pinned, so that nobody evicts what is being copied; readers may go on reading the old slots only
        # if they hold a lease, and a leased block is not movable.
        ids = reclaim.moves.tags.astype(np.uint32)
        self._index.pin(ids)
        self.pending = PendingReclaim(reclaim, ids, self._dram)
        return self.pending

    def _movable(self, tags: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._index.table.refs[tags] == 0
