"""Least frequently used first."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.policies.sequenced import SequencedPolicy
from kvstore.prefix_index.policy import Use

_COUNT_MAX = 4095
_STEP = float(1 << 41)
"""What one more access adds to a rank: more than the sequence ever reaches, 2**53 / 2**12 exactly kept."""


class LfuPolicy(SequencedPolicy):
    """Least frequently used first, counted while the block is in the table; among equals the least recent.

    A rank is the count and, below it, the place in the sequence of accesses. Counts end at 4095.
    """

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)

    def accessed(self, ids: At, use: Use) -> float:
        if use.is_again:
            return math.inf
        self._counts[ids] = np.minimum(self._counts[ids] + 1, _COUNT_MAX)
        ranks = self._counts[ids] * _STEP + self.take(len(ids))
        self.set_ranks(ids, ranks)
        return float(ranks.min(initial=math.inf))

    def inserted(self, ids: At, use: Use) -> None:
        self._counts = self.fitting(self._counts)
        self._counts[ids] = 0
        self.accessed(ids, use)
