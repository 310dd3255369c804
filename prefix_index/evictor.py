"""Finds the evictable leaf of lowest rank, again and again, without a heap entry per block.

A sorted vector snapshot holds the lowest evictable leaves, up to the rank ``bound``; a small heap holds
those that became evictable leaves, or changed rank, since then, as far as they are within the bound. Up
to the bound nothing is missing, so that merging the two gives the policy's exact order. Entries are
checked when they come up: a block that was touched, pinned or extended meanwhile is passed over, it will
be found again behind the bound or was entered anew. A new snapshot looks at the whole table and is paid
for by the entries used up since the last one.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import At, BlockTable, Ids
from kvstore.prefix_index.policy import EvictionPolicy

_SNAPSHOT_MIN = 4096
_SNAPSHOT_SHARE = 32
_HEAP_SLACK = 1024
_CHUNK = 256


class Evictor:
    """The order of eviction. Tell it about every block whose state or rank changes."""

    def __init__(self, table: BlockTable, policy: EvictionPolicy) -> None:
        self._table = table
        self._policy = policy
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
        within = self._table.rank[at] <= self._bound
        if not within.any():
            return
        ids = self._table.evictable(at[within])
        for entry in zip(self._table.rank[ids].tolist(), ids.tolist(), strict=True):
            heappush(self._heap, entry)
        if len(self._heap) > _HEAP_SLACK + 2 * len(self._ids):
            self.forget()

    def became_leaf(self, block: int) -> None:
        """``changed`` for the parent of an evicted block."""
        table = self._table
        if table.refs[block] == 0:
            rank = float(table.rank[block])
            if rank <= self._bound:
                heappush(self._heap, (rank, block))

    def pop(self) -> int:
        """The evictable leaf to go first, or -1. The caller must evict it before asking again."""
        if self._version != self._policy.version:
            self.forget()
        while True:
            entry = self._next()
            if entry is None:
                if self._complete or not self._look():
                    return -1
                continue
            rank, block = entry
            table = self._table
            if (
                table.n_children[block] == 0
                and table.refs[block] == 0
                and table.residency[block] != 0
                and table.rank[block] == rank
            ):
                return block

    def run(self, ids: Ids) -> int:
        """How many of ``ids`` go next, one after the other: ``ids[0]`` came from ``pop``, each is the parent
        of the one before it and has no other child."""
        table = self._table
        if not self._chunk:
            self._load()
        least = min(self._heap[0][0] if self._heap else math.inf, self._chunk[-1][0] if self._chunk else math.inf)
        ranks = table.rank[ids]
        stays = (ranks >= least) | (ranks > self._bound) | (table.refs[ids] != 0)
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
        self.forget()
        ids = self._table.all_evictable()
        if not len(ids):
            # From here on every leaf that appears is entered: asking again in vain costs no look.
            self._bound = math.inf
            self._complete = True
            return False
        ranks = self._table.rank[ids] = self._policy.rank(ids)
        keep = max(_SNAPSHOT_MIN, len(ids) // _SNAPSHOT_SHARE)
        if len(ids) > keep:
            lowest = np.argpartition(ranks, keep - 1)[:keep]
            ids, ranks = ids[lowest], ranks[lowest]
            self._bound = float(ranks.max())
        else:
            # All leaves are in: parents that become leaves belong to the order up to the highest rank given.
            self._bound = float(self._table.rank[self._table.alive()].max())
        order = np.argsort(ranks, kind="stable")
        self._ids, self._ranks = ids[order], ranks[order]
        return True
