"""Greedy-Dual-Size-Frequency: what is cheapest to compute again, for its size and use, goes first."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError
from kvstore.prefix_index.block_table import NO_PARENT, PART, At
from kvstore.prefix_index.policies.sequenced import SequencedPolicy
from kvstore.prefix_index.policy import Use
from kvstore.recompute import mean_cost

_TIE = 2.0**-32
"""Among equals the older goes first: so much a place in the sequence adds to a rank."""
_DEFAULT_BLOCK_TOKENS = 512
_COUNT_MAX = 65535


class GdsfPolicy(SequencedPolicy):
    """Rank = L + count * cost / size, where L is the rank of what the tier gave up last, so that all age alike.

    Cost is the time to compute the block again at its position in the prompt (``kvstore.recompute``);
    ``half_cost_tokens`` stands for the model's ``attention_doubling_tokens`` where that is unknown. Size is relative to
    that of the first block stored. Counts are those while the block is in the table.
    """

    name = "gdsf"

    def __init__(self, half_cost_tokens: float = 32768.0) -> None:
        super().__init__()
        if not 0 < half_cost_tokens < math.inf:
            raise ConfigError(f"gdsf's half_cost_tokens is {half_cost_tokens!r}; it must be above 0", ("policy",))
        self._half_cost_tokens = half_cost_tokens
        self._ends: NDArray[np.int64] = np.zeros(0, np.int64)
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._values: NDArray[np.float64] = np.zeros(0, np.float64)
        self._unit = 0.0
        self._inflation: dict[int, float] = {}

    def accessed(self, ids: At, use: Use) -> float:
        if not use.is_again:
            self._counts[ids] = np.minimum(self._counts[ids] + 1, _COUNT_MAX)
        value = self._counts[ids] * self._values[ids] + self.take(len(ids)) * _TIE
        lowest = math.inf
        for tier in self.tiers:
            ranks = self._inflation.get(tier, 0.0) + value
            self.table.ranks(tier)[ids] = ranks
            lowest = min(lowest, float(ranks.min(initial=math.inf)))
        return lowest

    def inserted(self, ids: At, use: Use) -> None:
        self._ends, self._counts = self.fitting(self._ends), self.fitting(self._counts)
        self._values = self.fitting(self._values)
        if not len(ids):
            return
        block_tokens = use.block_tokens or _DEFAULT_BLOCK_TOKENS
        self._place(ids, block_tokens)
        doubling_tokens = use.attention_doubling_tokens or self._half_cost_tokens
        cost = mean_cost(self._ends[ids] - block_tokens, self._ends[ids], doubling_tokens)
        size = np.maximum(self.table.size_bytes[ids], 1) / block_tokens
        self._unit = self._unit or float(size[0])
        self._values[ids] = cost * self._unit / size
        self._counts[ids] = 0
        self.accessed(ids, use)

    def _place(self, ids: At, block_tokens: int) -> None:
        """Where in their prompts these blocks end; a part of a block ends where the block does."""
        table, ends = self.table, self._ends
        parents = table.parent[ids]
        if (parents[1:] == ids[:-1]).all() and table.state[ids[0]] != PART:
            above = int(parents[0])
            first = 0 if above == NO_PARENT else int(ends[above])
            ends[ids] = first + block_tokens * np.arange(1, len(ids) + 1)
            return
        is_part = (table.state[ids] == PART).tolist()
        # Found on disk: children come first, so that their parents count as used later.
        for block, above, part in zip(ids[::-1].tolist(), parents[::-1].tolist(), is_part[::-1], strict=True):
            ends[block] = (0 if above == NO_PARENT else ends[above]) + (0 if part else block_tokens)

    def left(self, ids: At, tier: int) -> None:
        if len(ids):
            # The least of what went together: of a whole namespace that is cleared the highest says nothing.
            least = float(self.table.ranks(tier)[ids].min())
            self._inflation[tier] = max(self._inflation.get(tier, 0.0), least)
