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

from kvstore.config import format_size
from kvstore.lease import RoomRequest
from kvstore.metrics import Counters
from kvstore.prefix_index.block_table import DRAM
from kvstore.prefix_index.history import Left
from kvstore.prefix_index.index import Evicted, PrefixIndex
from kvstore.prefix_index.rivals import Rivals
from kvstore.prefix_index.shares import Standing
from kvstore.prefix_index.tenants import Asker
from kvstore.tiers.dram import DramTier, Reclaim
from kvstore.types import SLOT_BITS

PASSED_PER_BLOCK, PASSED_SHARE, PASSED_MAX = 4, 32, 16384
"""How far up the policy's order own blocks are looked for: blocks of others passed over per block wanted, and
a part of the tier; and once the others have given up as many."""

IDLE_SHARE = 16
"""Free room that its writers don't use is gathered once it is more than this part of the tier."""


@dataclass(slots=True)
class PendingReclaim:
    """Blocks to be moved. Run ``copy`` on any thread, then hand this back to the store."""

    reclaim: Reclaim
    ids: NDArray[np.uint32]
    dram: DramTier
    copied: bool = False

    def copy(self) -> None:
        """Copy the bytes; changes no table, blocks for as long as the copy takes."""
        self.dram.copy_moves(self.reclaim)
        self.copied = True


class RoomMaker:
    """Makes slots available to a writer, at the policy's cost. One reclaim at a time."""

    def __init__(self, index: PrefixIndex, dram: DramTier, counters: Counters, spare_bytes: int) -> None:
        """``spare_bytes``: how much may be evicted beyond what is to be written, to empty a region."""
        self._index = index
        self._dram = dram
        self._counters = counters
        self._spare_bytes = spare_bytes
        self._idle_bytes_max = dram.capacity_bytes // IDLE_SHARE
        self._waited_for_bytes = 0
        self.pending: PendingReclaim | None = None
        """The move under way."""

    def make(self, request: RoomRequest) -> PendingReclaim | None:
        """Evict until the request's slots can be allocated, or nothing more can be done without a move.

        First goes what lies in the writer's own regions, near the end of the policy's order. Where others'
        blocks should go long before, as many of those go too, so that an idle writer's room shrinks; its
        regions are emptied and retired in time. A writer that has nothing of its own to give up, or whose tenant
        has far less than its share of the tier, evicts in the index's order, and ``spare_bytes`` more than it needs,
        until a region is empty. What a tenant has beyond its quota goes in any case.

        Returns the move to be made next, or None when there is room or nothing helps.
        """
        asker = (request.writer, request.tenant, request.slot_bytes)
        whose = self._whose(request)
        self._index.tenants.room_for_all[DRAM] = self._dram.capacity_bytes - self._dram.retired_mapped_bytes
        self._keep_quota(request, whose)
        short = self._short(request)
        if short > 0 and self._dram.settling:
            return None  # what is evicted now would be nobody's room: clients have yet to say what they still use
        if short > 0 and request.evict_bytes_left < 0:
            leaving_bytes = self._dram.retired_mapped_bytes
            standing = self._index.standing(whose)
            request.spares_own = standing is Standing.BELOW
            if not request.spares_own:
                short = self._evict_own(request, asker, whose, short, standing)
            self._set_bounds(request, short, leaving_bytes)
        if short <= 0:
            return self._gather_idle(request, asker)
        short = self._evict_others(request, asker, whose._replace(gives_own=not request.spares_own), short)
        if short > 0:
            if self.is_coming(request):
                return None
            pending = self._plan(asker)
            if (
                pending is not None
                or self.pending is not None
                or not request.spares_own
                or self._leaves(request, short)
            ):
                return pending
            request.spares_own = False  # nobody has more than is due to it, and there is nothing to be gathered
            if self._evict_own(request, asker, whose, short, Standing.BELOW) > 0:
                return None
        return self._gather_idle(request, asker)

    def allocate(self, request: RoomRequest) -> NDArray[np.int64]:
        """Slots for it, as many as there are and as its tenant may have; reserved from now on."""
        n = self._n_allowed(request)
        return self._dram.allocate(request.writer, request.tenant, request.slot_bytes, n)

    def why_short(self, request: RoomRequest, n_lacking: int) -> tuple[Left, str]:
        """Why it has not got so many of its slots, also in words."""
        tenants = self._index.tenants
        tenant = tenants.number(request.tenant)
        if tenants.room_bytes(tenant, DRAM) < n_lacking * request.slot_bytes:
            most = format_size(int(tenants.most_bytes[DRAM, tenant]))
            return Left.QUOTA, f"tenant {request.tenant!r} may have {most} of DRAM (--tenant-dram-max), no more is free"
        others = " or of tenants within their share" if tenants.is_fair and tenants.n_present[DRAM] > 1 else ""
        return Left.NO_ROOM, f"the DRAM tier is full of blocks in use{others}"

    def is_coming(self, request: RoomRequest) -> bool:
        """Whether it lacks room, and enough was retired for it that clients have yet to unmap, or is unsettled."""
        short = self._short(request)
        return short > 0 and (self._dram.settling or self._is_coming(request, short))

    def _gather_idle(self, request: RoomRequest, asker: tuple[int, str, int]) -> PendingReclaim | None:
        if request.moved or self._dram.free_elsewhere_bytes(*asker) <= self._idle_bytes_max:
            return None
        request.moved = True
        return self._plan(asker)

    def _whose(self, request: RoomRequest) -> Asker:
        return Asker(self._index.tenants.number(request.tenant), request.n_wanted * request.slot_bytes)

    def _n_allowed(self, request: RoomRequest) -> int:
        """Of the slots it wants, those that its tenant's quota has room for."""
        room_bytes = self._index.tenants.room_bytes(self._index.tenants.number(request.tenant), DRAM)
        return max(min(request.n_wanted, room_bytes // request.slot_bytes), 0)

    def _keep_quota(self, request: RoomRequest, whose: Asker) -> None:
        """Blocks of the tenant go until what it wants is within its quota, or none may."""
        most = int(self._index.tenants.most_bytes[DRAM, whose.tenant]) // request.slot_bytes
        while (over := min(request.n_wanted, most) - self._n_allowed(request)) > 0:
            evicted = self._index.evict(over, whose, (whose.tenant,))
            if not len(evicted.ids):
                return
            self._free(evicted, (request.writer, request.tenant, request.slot_bytes))

    def _evict_own(
        self, request: RoomRequest, asker: tuple[int, str, int], whose: Asker, short: int, standing: Standing
    ) -> int:
        """See ``make``; returns how many slots the asker still lacks.

        Of a tenant that has no more than is due to it, its own go though others come first in the order.
        """
        n, of = self._n_allowed(request), None if standing is Standing.OVER else (whose.tenant,)
        own = self._dram.usable_regions(*asker)
        if not own:
            return short
        if len(own) == len(self._dram.regions):  # everything is the asker's: the order is all there is
            rivals = request.rivals() if request.rivals is not None and n == request.n_wanted else None
            self._free(self._index.evict(short, whose, rivals=rivals), asker)
            if rivals is not None:
                self._decline(request, rivals)
            return max(self._short(request), 0)
        orphans, others = self._dram.orphan_regions(), self._dram.other_regions(asker[0], asker[2])
        left_bytes = short * asker[2] + self._spare_bytes
        others_bytes = short * asker[2]

        def worth(slot: int) -> int:
            nonlocal left_bytes, others_bytes
            region_id = slot >> SLOT_BITS
            if region_id in own:
                return 1
            # So do the writer's own of other sizes, as much as is to be written: else each size would keep the share
            # of the tier that it once got, whatever the policy says.
            if region_id in others and others_bytes > 0:
                others_bytes -= self._dram.region(region_id).slot_bytes
                return 0
            # Blocks of a writer that is gone go when it is their turn, as much as may make a region empty.
            if region_id not in orphans or left_bytes <= 0:
                return -1
            left_bytes -= self._dram.region(region_id).slot_bytes
            return 0

        most_passed = PASSED_PER_BLOCK * short + self._index.n_blocks // PASSED_SHARE
        self._free(self._index.evict_among(short, worth, most_passed, whose, of), asker)
        short = n - self._dram.free_slots(*asker)
        if short > 0:
            self._free(self._index.evict(short, whose), asker)
            self._free(self._index.evict_among(short, worth, PASSED_MAX, whose, of), asker)
            short = n - self._dram.free_slots(*asker)
        return max(short, 0)

    def _decline(self, request: RoomRequest, rivals: Rivals) -> None:
        keys = rivals.conclude()
        if len(keys):
            request.n_wanted -= len(keys)
            request.n_declined += len(keys)
            self._counters.add("declined_blocks", len(keys))
            self._index.history.not_stored(keys, Left.DECLINED)

    def _evict_others(self, request: RoomRequest, asker: tuple[int, str, int], whose: Asker, short: int) -> int:
        step = short
        while short > 0 and request.evict_bytes_left > 0 and not self._is_coming(request, short):
            evicted = self._index.evict(step, whose)
            if not len(evicted.ids):
                break
            request.evict_bytes_left = max(request.evict_bytes_left - self._free(evicted, asker), 0)
            before, short = short, self._short(request)
            # Nothing gained: the victims lie in regions of others. Take larger steps towards a whole region.
            step = short if short < before else 2 * step
        return short

    def _free(self, evicted: Evicted, asker: tuple[int, str, int]) -> int:
        """Free the slots of evicted blocks and retire what is empty then; returns the bytes of those slots.

        What is worth nothing without them goes too, whoever has it: it is room that its writer need not make, or
        that is gathered for others.
        """
        self._drop(evicted)
        while (useless := self._index.evict_useless()) is not None:
            self._drop(useless)
        self._dram.retire_empty(keep_for=asker)
        return sum(map(self._dram.slot_bytes, evicted.size_bytes.tolist()))

    def _drop(self, evicted: Evicted) -> None:
        self._dram.free(evicted.slots)
        self._counters.add("evicted_blocks", len(evicted.ids))
        self._counters.add("dropped_blocks", int(evicted.gone.sum()))

    def finish(self, pending: PendingReclaim) -> None:
        """The copy is done: index and tier switch to the new slots together.

        A block that was leased meanwhile stays: its reader looks at the old slot. So does every one if the copy
        was not made.
        """
        if not pending.copied:
            self.cancel(pending)
            return
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

    def _short(self, request: RoomRequest) -> int:
        asker = (request.writer, request.tenant, request.slot_bytes)
        return self._n_allowed(request) - self._dram.free_slots(*asker)

    def _set_bounds(self, request: RoomRequest, short: int, leaving_bytes: int) -> None:
        # Regions that others were made to leave will be room soon: nobody's blocks go twice for it. But a
        # client may be long in leaving, so that evicting as much as is to be written goes on meanwhile.
        request.leaving_bytes_before = leaving_bytes
        request.evict_bytes_left = short * request.slot_bytes + max(self._spare_bytes - leaving_bytes, 0)

    def _is_coming(self, request: RoomRequest, short: int) -> bool:
        """Whether enough was retired for this reservation; clients that map it have yet to leave."""
        leaving_bytes = self._dram.retired_mapped_bytes - request.leaving_bytes_before
        return leaving_bytes >= short * request.slot_bytes

    def _leaves(self, request: RoomRequest, short: int) -> bool:
        """Whether it is to wait for what was retired for others before its tenant's own blocks go.

        Not for what has been waited for, of which nothing has come.
        """
        leaving_bytes, self._waited_for_bytes = self._waited_for_bytes, self._dram.retired_mapped_bytes
        if self._waited_for_bytes == leaving_bytes or self._waited_for_bytes < short * request.slot_bytes:
            return False
        request.leaving_bytes_before = 0
        return True

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
        unpinned: NDArray[np.bool_] = self._index.table.refs[tags] == 0
        return unpinned
