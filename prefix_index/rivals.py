"""Blocks that are about to be stored, as candidates for eviction along with those that would have to go for them.

Room is made before blocks are inserted. A policy that finds newcomers worth less than what is there would rather not
have them at all: they rival for the room, from the tail of their path on, and those that lose are *declined*. What is
held in the end is the same as if they had been inserted first and the least valued had gone then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import DRAM
from kvstore.prefix_index.policy import EvictionPolicy, Newcomers


class Rivals:
    """The newcomers of one request and how they fare."""

    def __init__(self, policy: EvictionPolicy, newcomers: Newcomers) -> None:
        self._policy = policy.of(DRAM)
        self._newcomers = newcomers
        self._ranks: NDArray[np.float64] = self._policy.weigh(newcomers)
        self.n_declined = 0

    @property
    def lowest_rank(self) -> float:
        """That of the last one left; above all others if none is left."""
        n = len(self._ranks) - self.n_declined
        return float(self._ranks[n - 1]) if n else np.inf

    def decline(self) -> None:
        """The last one left gives way."""
        self.n_declined += 1

    def conclude(self) -> NDArray[np.uint8]:
        """Tell the policy who was declined, once and before the others are inserted; their keys, uint8 [n, 16]."""
        n_entering = len(self._ranks) - self.n_declined
        if self.n_declined:
            self._policy.declined(self._newcomers, n_entering)
        return self._newcomers.keys[n_entering:]
