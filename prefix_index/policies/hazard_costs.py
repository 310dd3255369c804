"""What blocks cost to compute again at their place in the prompt, for the default policy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.policies.hazard_ages import Floats, Ints
from kvstore.prefix_index.policy import Use
from kvstore.recompute import mean_cost


class PlaceCosts:
    """Logarithms of the cost of blocks, by block id; nothing is kept before a request says how its model's cost grows.

    A block stands for all of its run up to itself: what is behind it goes before it, and it is worth keeping only if
    they are together. So it has the mean of their costs, and as a run loses its end, the rest of it is worth less.
    """

    def __init__(self) -> None:
        self._logs: NDArray[np.float32] = np.zeros(0, np.float32)

    @property
    def are_known(self) -> bool:
        """Whether anything was ever noted."""
        return len(self._logs) > 0

    def of(self, ids: At) -> Floats:
        """Logarithms of the costs of these blocks."""
        return self._logs[ids].astype(np.float64)

    def note(self, ids: At, depths: NDArray[np.int32], counts: list[int], use: Use, n_ids: int) -> None:
        """These blocks, at these places of a prompt, are used and are runs of so many each; there are ``n_ids`` ids."""
        if len(self._logs) < n_ids:
            self._logs = np.concatenate((self._logs, np.zeros(n_ids - len(self._logs), np.float32)))
        self._logs[ids] = log_costs(depths.astype(np.int64), counts, use)


def log_costs(depths: Ints, counts: list[int], use: Use) -> Floats:
    """Logarithms of the costs of blocks at these places, which are runs of so many each."""
    starts = np.cumsum([0, *counts[:-1]])
    first = np.repeat(depths[starts], counts) * use.block_tokens
    end = (depths + 1) * use.block_tokens
    logs: Floats = np.log(mean_cost(first, end, use.attention_doubling_tokens))
    return logs
