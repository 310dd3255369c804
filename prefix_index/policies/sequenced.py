"""What policies share whose ranks come from one sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.policy import EvictionPolicy


class SequencedPolicy(EvictionPolicy):
    """A policy with a counter of block accesses, exact up to 2**53, and blocks demoted below everything else."""

    demoted_from = -1.0
    """Ranks from it downward are those of demoted blocks; all others are above."""

    def __init__(self) -> None:
        self._next = 1
        self._lowest = self.demoted_from

    def take(self, n: int) -> NDArray[np.float64]:
        """The next ``n`` of the sequence for the blocks of a path, its head the highest; all differ."""
        first = self._next
        self._next = first + n
        return np.arange(self._next - 1, first - 1, -1, dtype=np.float64)

    def take_below(self, n: int) -> NDArray[np.float64]:
        """Ranks below all others, the head's the highest of them."""
        first = self._lowest
        self._lowest = first - n
        return np.arange(first, self._lowest, -1, dtype=np.float64)

    def demoted(self, ids: At) -> None:
        self.set_ranks(ids, self.take_below(len(ids)))

    def fitting(self, column: NDArray[Any]) -> NDArray[Any]:
        """A column by block id, as long as the table: zeros for what is new."""
        n = self.table.capacity_blocks
        if len(column) >= n:
            return column
        longer = np.zeros(n, column.dtype)
        longer[: len(column)] = column
        return longer
