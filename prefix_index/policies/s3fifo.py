"""S3-FIFO: a small queue that most blocks leave unused, a main queue with second chances, a memory of what left."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.policies.ghosts import Ghosts
from kvstore.prefix_index.policies.sequenced import SequencedPolicy
from kvstore.prefix_index.policy import Use

_MAIN_SHARE, _GHOST_SHARE = 0.9, 0.9
_USES_MAX, _USES_TO_STAY = 3, 2
_ABSENT, _SMALL, _MAIN, _CONDEMNED, _DEMOTED = 0, 1, 2, 3, 4
_MAIN_BASE = float(1 << 50)
"""Ranks of the main queue lie above it, so that the small queue comes first."""
_RING_MIN = 1024


class S3FifoPolicy(SequencedPolicy):
    """As published (SOSP 2023): a tenth of the tier is the small queue, as many keys as nine tenths are remembered,
    two accesses in the small queue move a block to the main one.

    Start-up rule: until the tier is full for the first time, everything enters the small queue. Where the main queue
    is over its share, its oldest block without an access left is *condemned*: it goes before all others, as soon as
    nothing follows it. Each tier has queues of its own.
    """

    name = "s3fifo"
    reprieves = True

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[int, _Queues] = {}

    def accessed(self, ids: At, use: Use) -> float:
        lowest = math.inf
        for tier in self.tiers:
            queues = self._of(tier)
            if not use.is_again:
                queues.uses[ids] = np.minimum(queues.uses[ids] + 1, _USES_MAX)
            back = ids[queues.place[ids] >= _CONDEMNED]
            if len(back):
                is_main = queues.place[back] == _CONDEMNED
                self._enter(back, tier, is_main)
                lowest = -math.inf
        return lowest

    def inserted(self, ids: At, use: Use) -> None:  # noqa: ARG002 - where a block enters depends on the tier
        self.set_ranks(ids, 0.0)

    def entered(self, ids: At, tier: int) -> None:
        queues = self._of(tier)
        queues.uses[ids] = 0
        self._enter(ids, tier, queues.ghosts.take(self.table.key[ids]))

    def left(self, ids: At, tier: int) -> None:
        queues = self._of(tier)
        small = ids[queues.place[ids] == _SMALL]
        queues.ghosts.add(self.table.key[small], int(_GHOST_SHARE * queues.n))
        queues.move(ids, _ABSENT)

    def demoted(self, ids: At) -> None:
        super().demoted(ids)
        for tier in self.tiers:
            queues = self._of(tier)
            queues.move(ids[queues.place[ids] != _ABSENT], _DEMOTED)

    def spares(self, ids: At, tier: int) -> NDArray[np.bool_]:
        queues = self._of(tier)
        place, uses = queues.place[ids], queues.uses[ids]
        if queues.n_main > _MAIN_SHARE * (queues.n - len(ids)):
            return np.ones(len(ids), np.bool_)  # the main queue's turn may come before theirs
        spared: NDArray[np.bool_] = ((place == _SMALL) & (uses >= _USES_TO_STAY)) | ((place == _MAIN) & (uses > 0))
        return spared

    def reprieve(self, block: int, tier: int) -> At | None:
        queues = self._of(tier)
        place = queues.place[block]
        if place in (_SMALL, _MAIN) and queues.n_main > _MAIN_SHARE * queues.n and (moved := self._condemn(tier)):
            return np.array([*moved, block], np.intp)
        uses = int(queues.uses[block])
        if not (place == _SMALL and uses >= _USES_TO_STAY) and not (place == _MAIN and uses):
            return None
        queues.uses[block] = uses - 1 if place == _MAIN else 0
        one = np.array([block], np.intp)
        self._enter(one, tier, np.ones(1, np.bool_))
        return one

    def _of(self, tier: int) -> _Queues:
        queues = self._queues.get(tier)
        if queues is None:
            queues = self._queues[tier] = _Queues()
        if len(queues.place) < self.table.capacity_blocks:
            queues.place, queues.uses = self.fitting(queues.place), self.fitting(queues.uses)
            queues.ghosts.fit(self.table.capacity_blocks)
        return queues

    def _enter(self, ids: At, tier: int, is_main: NDArray[np.bool_]) -> None:
        """At the end of the one queue or the other."""
        queues, ranks = self._of(tier), self.take(len(ids))
        ranks[is_main] += _MAIN_BASE
        self.table.ranks(tier)[ids] = ranks
        queues.move(ids[~is_main], _SMALL)
        queues.move(ids[is_main], _MAIN)
        # From the tail of the path on: it is the first to go.
        queues.append(ids[is_main][::-1], ranks[is_main][::-1])

    def _condemn(self, tier: int) -> list[int]:
        """The main queue gives up one block. Returns the ids that have new ranks, none if there was none to give up."""
        queues, ranks, moved = self._of(tier), self.table.ranks(tier), []
        while (block := queues.oldest(ranks)) >= 0:
            moved.append(block)
            if queues.uses[block] == 0:
                queues.move(np.array([block], np.intp), _CONDEMNED)
                ranks[block] = -0.5 + self.take(1)[0] * 2.0**-52
                break
            queues.uses[block] -= 1
            self._enter(np.array([block], np.intp), tier, np.ones(1, np.bool_))
        return moved


class _Queues:
    """Of one tier: where each block stands, how often it was used there, and the main queue's order.

    The main queue is a ring of ids and the ranks they had when they joined it; an entry whose block has another rank
    now is void.
    """

    def __init__(self) -> None:
        self.place: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.uses: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.ghosts = Ghosts()
        self.n = 0
        """Blocks in the tier."""
        self.n_main = 0
        self._ids: NDArray[np.int64] = np.zeros(_RING_MIN, np.int64)
        self._ranks: NDArray[np.float64] = np.zeros(_RING_MIN, np.float64)
        self._first = self._end = 0

    def move(self, ids: At, to: int) -> None:
        """Distinct blocks stand elsewhere now."""
        before = self.place[ids]
        self.n += (len(ids) if to != _ABSENT else 0) - int(np.count_nonzero(before))
        self.n_main += (len(ids) if to == _MAIN else 0) - int(np.count_nonzero(before == _MAIN))
        self.place[ids] = to

    def append(self, ids: At, ranks: NDArray[np.float64]) -> None:
        """At the main queue's end."""
        n = len(ids)
        if self._end + n > len(self._ids):
            live = slice(self._first, self._end)
            kept_ids, kept_ranks = self._ids[live], self._ranks[live]
            room = max(_RING_MIN, 2 * (len(kept_ids) + n))
            self._ids, self._ranks = np.zeros(room, np.int64), np.zeros(room, np.float64)
            self._first, self._end = 0, len(kept_ids)
            self._ids[: self._end], self._ranks[: self._end] = kept_ids, kept_ranks
        self._ids[self._end : self._end + n], self._ranks[self._end : self._end + n] = ids, ranks
        self._end += n

    def oldest(self, ranks: NDArray[np.float64]) -> int:
        """Takes the first block of the main queue; -1 if it is empty."""
        while self._first < self._end:
            block, rank = int(self._ids[self._first]), self._ranks[self._first]
            self._first += 1
            if ranks[block] == rank and self.place[block] == _MAIN:
                return block
        return -1
