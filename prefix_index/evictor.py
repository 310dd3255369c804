"""Finds the evictable leaf of a tier that has the lowest rank, again and again, without a heap entry per block.

A sorted vector snapshot holds the lowest evictable leaves, up to the rank ``bound``; a small heap holds
those that became evictable leaves, or changed rank, since then, as far as they are within the bound. Up
to the bound nothing is missing, so that merging the two gives the policy's exact order. Entries are
checked when they come up: a block that was touched, pinned or extended meanwhile is passed over, it will
be found again behind the bound or was entered anew. A new snapshot looks at the whole table and is paid
for by the entries used up since the last one.

Ranks that move with time are those of the last look. Of many blocks only the leaves are ranked then; NaN stands for the
rank of the others, which is worked out, as of that moment, when it is first asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.prefix_index.block_table import DRAM, At, BlockTable, Ids
from kvstore.prefix_index.policy import EvictionPolicy

_SNAPSHOT_MIN = 4096
_SNAPSHOT_SHARE = 32
_HEAP_SLACK = 1024
_CHUNK = 256
_RANKED_LATER_MIN = 1 << 15
"""From so many copies on, not all of them are ranked by a look at them."""

IdT = TypeVar("IdT", bound=np.integer[Any])


class Evictor:
    """The order of eviction from one tier. Tell it about every block whose state or rank changes.

    A leaf is a block that ``BlockTable.is_evictable`` lets go from the tier.
    """

    def __init__(
        self,
        table: BlockTable,
        policy: EvictionPolicy,
        tier: int = DRAM,
        among: Callable[[At], NDArray[np.bool_]] | None = None,
    ) -> None:
        """``among`` says which blocks there are for it, where that is not all; it is told of changes of no other."""
        self._table = table
        self._policy = policy
        self._tier = tier
        self._among = among
        self._aside: set[int] = set()
        self._frozen: Callable[[At], NDArray[np.float64]] | None = None
        self._heap: list[tuple[float, int]] = []
        self.forget()

    def forget(self) -> None:
        """Drop the snapshot; the next question takes a new one."""
        self._heap.clear()
        self._ids: Ids = np.empty(0, np.uint32)
        self._ranks: NDArray[np.float64] = np.empty(0, np.float64)
        self._at = 0
        self._chunk: list[tuple[float, int]] = []
        self._bound = -math.inf
        self._complete = False
        self._version = self._policy.version

    def changed(self, at: At, lowest_rank: float = -math.inf) -> None:
        """These blocks got another rank, lost a pin or their last child, or are new.

        ``lowest_rank``, if known, is at most the lowest of their ranks: then nothing need be looked at when
        all lie behind what the snapshot holds, as they do after an access under LRU.
        """
        if self._bound < lowest_rank or self._bound == -math.inf:
            return
        within = self._ranks_of(at) <= self._bound
        if not within.any():
            return
        ids = self._table.evictable(at[within], self._tier)
        for entry in zip(self._table.ranks(self._tier)[ids].tolist(), ids.tolist(), strict=True):
            heappush(self._heap, entry)
        if len(self._heap) > _HEAP_SLACK + 2 * len(self._ids):
            self.forget()

    def became_leaf(self, block: int) -> None:
        """``changed`` for a block that lost its last child."""
        table = self._table
        if table.refs[block] == 0:
            rank = table.ranks(self._tier).item(block)
            if rank != rank:
                rank = self._ranks_of(np.array((block,))).item(0)
            if rank <= self._bound:
                heappush(self._heap, (rank, block))

    def pop(self) -> int:
        """The evictable leaf to go first, or -1. Before asking again the caller evicts it or passes it over."""
        if self._version != self._policy.version:
            self.forget()
        while True:
            entry = self._next()
            if entry is None:
                if self._complete or not self._look():
                    return -1
                continue
            rank, block = entry
            if block in self._aside:
                continue
            if self._table.ranks(self._tier)[block] != rank or not self._table.is_evictable(block, self._tier):
                continue
            if self._policy.reprieves and (moved := self._policy.reprieve(block, self._tier)) is not None:
                self.changed(moved)
                continue
            return block

    def first(self) -> tuple[float, int] | None:
        """The rank and id of what ``pop`` would give, None for -1."""
        block = self.pop()
        if block < 0:
            return None
        entry = (float(self._table.ranks(self._tier)[block]), block)
        heappush(self._heap, entry)
        return entry

    def pass_over(self, block: int) -> None:
        """A block that came from ``pop`` stays where it is, and is not given again until ``take_back``."""
        self._aside.add(block)

    def take_back(self) -> None:
        """The blocks passed over have their place in the order again."""
        aside = np.fromiter(self._aside, np.intp, len(self._aside))
        self._aside.clear()
        self.changed(aside)

    def run(self, ids: Ids) -> int:
        """How many of ``ids`` go next, one after the other: ``ids[0]`` came from ``pop``, each is the parent
        of the one before it. All of a run have the same copies, and none but the first another child: where
        that ends, the next ``pop`` goes on."""
        table = self._table
        if not self._chunk:
            self._load()
        least = min(self._heap[0][0] if self._heap else math.inf, self._chunk[-1][0] if self._chunk else math.inf)
        ranks = self._ranks_of(ids)
        stays = (ranks >= least if least <= self._bound else ranks > self._bound) | (table.refs[ids] != 0)
        if table.nvme:
            residency = table.residency[ids]
            stays |= residency != residency[0]
        if table.nvme or table.n_cold or table.n_parts:
            stays |= table.n_children[ids] > 1
        if self._policy.reprieves:
            stays |= self._policy.spares(ids.astype(np.intp), self._tier)
        stays[0] = False
        first = int(stays.argmax())
        return first if stays[first] else len(ids)

    def _next(self) -> tuple[float, int] | None:
        if not self._chunk:
            self._load()
        if self._heap and (not self._chunk or self._heap[0] < self._chunk[-1]):
            return heappop(self._heap)
        return self._chunk.pop() if self._chunk else None

    def _load(self) -> None:
        if self._at < len(self._ids):
            part = slice(self._at, self._at + _CHUNK)
            self._chunk = list(zip(self._ranks[part].tolist(), self._ids[part].tolist(), strict=True))
            self._chunk.reverse()
            self._at += _CHUNK

    def _look(self) -> bool:
        """Take a new snapshot; False if nothing is evictable."""
        with self._policy.timed():
            return self._look_at_all()

    def _look_at_all(self) -> bool:
        self.forget()
        ids = self._mine(self._table.all_evictable(self._tier))
        if self._aside:
            ids = ids[~np.isin(ids, np.fromiter(self._aside, np.uint32, len(self._aside)))]
        if not len(ids):
            # From here on every leaf that appears is entered: asking again in vain costs no look.
            self._bound = math.inf
            self._complete = True
            return False
        if self._policy.moves:
            self._rank_all()
            ranks = self._ranks_of(ids)
        else:
            ranks = self._table.ranks(self._tier)[ids] = self._policy.rank(ids, self._tier)
        keep = max(_SNAPSHOT_MIN, len(ids) // _SNAPSHOT_SHARE)
        if len(ids) > keep:
            lowest = np.argpartition(ranks, keep - 1)[:keep]
            ids, ranks = ids[lowest], ranks[lowest]
            self._bound = float(ranks.max())
        elif self._among is not None or self._policy.moves:
            self._bound = math.inf  # few leaves, and a look is at more than those: none of them is to be missed
        else:
            # All leaves are in: parents that become leaves belong to the order up to the highest rank given.
            self._bound = float(self._table.ranks(self._tier)[self._table.alive()].max())
        order = np.argsort(ranks, kind="stable")
        self._ids, self._ranks = ids[order], ranks[order]
        return True

    def _rank_all(self) -> None:
        """Give all copies of the tier ranks of this moment: many of them when they are first asked for."""
        table, in_force = self._table, self._table.ranks(self._tier)
        are_all_held = self._among is None and self._tier == DRAM and not table.nvme
        if are_all_held and table.n_blocks >= _RANKED_LATER_MIN:
            held: NDArray[np.intp] | slice = slice(table.n_used)
            self._frozen = self._policy.frozen(self._tier)
        else:
            held = self._mine(table.all_resident(self._tier))
            self._frozen = self._policy.frozen(self._tier) if len(held) >= _RANKED_LATER_MIN else None
        if self._frozen is not None:
            in_force[held] = math.nan
        else:
            held = table.all_resident(self._tier) if isinstance(held, slice) else held
            in_force[held] = self._policy.rank(held, self._tier)

    def _ranks_of(self, at: At) -> NDArray[np.float64]:
        """Ranks in force."""
        in_force = self._table.ranks(self._tier)
        ranks: NDArray[np.float64] = in_force[at]
        if self._frozen is not None and (later := np.isnan(ranks)).any():
            blocks = at[later].astype(np.intp, copy=False)
            ranks[later] = in_force[blocks] = self._frozen(blocks)
        return ranks

    def _mine(self, ids: NDArray[IdT]) -> NDArray[IdT]:
        return ids if self._among is None else ids[self._among(ids)]

    def check(self) -> None:
        """Raises IntegrityError if an evictable block below the bound is neither in snapshot nor heap. Slow."""
        if self._version != self._policy.version:
            return
        table = self._table
        waiting = set(self._heap) | set(self._chunk)
        waiting |= set(zip(self._ranks[self._at :].tolist(), self._ids[self._at :].tolist(), strict=True))
        for block in self._mine(table.all_evictable(self._tier)).tolist():
            entry = (float(table.ranks(self._tier)[block]), block)
            if entry[0] < self._bound and entry not in waiting:
                raise IntegrityError(f"block {block} is evictable from tier {self._tier}, but its evictor forgot it")
