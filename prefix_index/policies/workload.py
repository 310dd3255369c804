"""Workload-aware eviction: how soon blocks of this kind of request are used again, as published in KVCacheInTheWild."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import NO_PARENT, At
from kvstore.prefix_index.policies.sequenced import SequencedPolicy
from kvstore.prefix_index.policy import Use

CATEGORIES_MAX = 1024
"""Kinds of request told apart; further ones count as the first."""
_TURNS_MAX = 15
"""Later turns count as this one."""
_WINDOW_S = 3600.0
"""What was seen counts less by a factor e after so long."""
_DECAY_STEP_S = 60.0
_PRIOR_REUSES = 1.0
_PRIOR_WAIT_S = 600.0
"""Before anything was seen of a kind: a reuse after so long."""
_FIRST_LIFE_S = 600.0
_LIFE_SHARE = 0.05
_EVICTIONS_MIN, _EVICTIONS_SHARE = 64, 64
_TIE = 2.0**-36


class WorkloadPolicy(SequencedPolicy):
    """Evicts what is least likely to be used within the life of a block, by the kind of the request that used it last.

    A kind is a request type and a turn, from the hints; where they say nothing the turn is inferred: a request that
    finds all that another one used, but for a block, continues it. Per kind w the times to the next use are fitted by
    F(x) = 1 - exp(-lambda x), over about the last hour. The rank of a block that was used t ago is the logarithm of
    exp(-lambda t) (1 - exp(-lambda life)), so that nothing underflows; life is the mean time from the last use of
    what the tier gave up to its eviction. ``reuse_share`` multiplies by the share of the kind's accesses that were
    followed by another. Blocks of one kind stand in the order of their use, as in a queue; kinds move against each
    other with time, which comes into force every 64 evictions (or a 64th of the blocks). Without hints or turns there
    is one kind, and this is LRU.
    """

    name = "workload"
    moves = True
    demoted_from = -1e12

    def __init__(self, *, reuse_share: bool = False) -> None:
        super().__init__()
        if reuse_share:
            self.name = "workload_pw"
        self._reuse_share = reuse_share
        self._now_s = 0.0
        self._kinds: dict[tuple[str, int], int] = {}
        self._used_s: NDArray[np.float64] = np.zeros(0)
        self._sequence: NDArray[np.float64] = np.zeros(0)
        self._kind: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self._turn: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._length: NDArray[np.int32] = np.zeros(0, np.int32)
        self._n_accesses = np.zeros(CATEGORIES_MAX)
        self._n_reuses = np.zeros(CATEGORIES_MAX)
        self._waits_s = np.zeros(CATEGORIES_MAX)
        self._decayed_s = -math.inf
        self._life_s: dict[int, float] = {}
        self._evictions = 0

    # Uses ----------------------------------------------------------------------------------------

    def accessed(self, ids: At, use: Use) -> float:
        if not len(ids):
            return math.inf
        self._advance(use.now_s)
        if not use.is_again:
            self._learn(ids)
            self._turn[ids] = self._turn_of(ids, use)
        self._note(ids, use)
        return self._put(ids)

    def inserted(self, ids: At, use: Use) -> None:
        self._used_s, self._sequence = self.fitting(self._used_s), self.fitting(self._sequence)
        self._kind, self._turn = self.fitting(self._kind), self.fitting(self._turn)
        self._length = self.fitting(self._length)
        if not len(ids):
            return
        self._advance(use.now_s)
        above = int(self.table.parent[ids[0]])
        # The request that stores the rest of a prompt has used what was found of it just before.
        turn = 1 if above == NO_PARENT else max(1, int(self._turn[above]))
        self._turn[ids] = min(use.hints.turn, _TURNS_MAX) if use.hints is not None and use.hints.turn else turn
        self._note(ids, use)
        self._put(ids)

    def demoted(self, ids: At) -> None:
        self._sequence[ids] = self.take_below(len(ids))
        self.set_ranks(ids, self._sequence[ids])

    def left(self, ids: At, tier: int) -> None:
        if not len(ids):
            return
        ages_s = self._now_s - self._used_s[ids]
        life_s = self._life_s.get(tier, _FIRST_LIFE_S)
        share = 1 - (1 - _LIFE_SHARE) ** len(ids)
        self._life_s[tier] = life_s + share * (float(ages_s.mean()) - life_s)
        self._evictions += len(ids)
        if self._evictions >= max(_EVICTIONS_MIN, self.table.n_blocks // _EVICTIONS_SHARE):
            self._evictions = 0
            self.version += 1

    # Ranks ---------------------------------------------------------------------------------------

    def rank(self, ids: At, tier: int) -> NDArray[np.float64]:
        kinds, sequence = self._kind[ids], self._sequence[ids]
        known = slice(max(len(self._kinds), 1))
        n_reuses = self._n_reuses[known]
        rates = (n_reuses + _PRIOR_REUSES) / (self._waits_s[known] + _PRIOR_REUSES * _PRIOR_WAIT_S)
        life_s = max(self._life_s.get(tier, _FIRST_LIFE_S), 1e-3)
        constants = np.log(-np.expm1(-rates * life_s))
        if self._reuse_share:
            constants += np.log((n_reuses + 1) / (self._n_accesses[known] + 2))
        ranks = constants[kinds] - rates[kinds] * (self._now_s - self._used_s[ids]) + sequence * _TIE
        return np.where(sequence <= self.demoted_from, sequence, ranks)

    # Own -----------------------------------------------------------------------------------------

    def _put(self, ids: At) -> float:
        lowest = math.inf
        for tier in self.tiers:
            ranks = self.rank(ids, tier)
            self.table.ranks(tier)[ids] = ranks
            lowest = min(lowest, float(ranks.min()))
        return lowest

    def _note(self, ids: At, use: Use) -> None:
        """What the request makes of blocks whose turn is set."""
        request_type = use.hints.request_type if use.hints is not None else ""
        turn = int(self._turn[ids[-1]])
        kind = self._kinds.get((request_type, turn))
        if kind is None:
            kind = len(self._kinds) if len(self._kinds) < CATEGORIES_MAX else 0
            if kind or not self._kinds:
                self._kinds[(request_type, turn)] = kind
        self._kind[ids], self._used_s[ids] = kind, self._now_s
        self._sequence[ids] = self.take(len(ids))
        if not use.is_again:
            self._n_accesses[kind] += len(ids)
        if use.block_tokens:
            self._length[ids] = -(-use.n_tokens // use.block_tokens)

    def _turn_of(self, ids: At, use: Use) -> int:
        """The turn of a request that has found these blocks of its prompt."""
        if use.hints is not None and use.hints.turn:
            return min(use.hints.turn, _TURNS_MAX)
        before = int(ids[-1])
        if len(ids) > 1 and len(ids) >= int(self._length[before]) - 1:
            return min(int(self._turn[before]) + 1, _TURNS_MAX)
        return 1

    def _learn(self, ids: At) -> None:
        """These blocks are used again: how long that took, by the kind of their last use."""
        kinds = self._kind[ids]
        self._n_reuses += np.bincount(kinds, minlength=CATEGORIES_MAX)
        self._waits_s += np.bincount(kinds, self._now_s - self._used_s[ids], CATEGORIES_MAX)

    def _advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        passed_s = self._now_s - self._decayed_s
        if passed_s >= _DECAY_STEP_S:
            self._decayed_s = self._now_s
            share = math.exp(-passed_s / _WINDOW_S)
            for each in (self._n_accesses, self._n_reuses, self._waits_s):
                each *= share
