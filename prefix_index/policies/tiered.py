"""A policy of its own for each tier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import DRAM, NVME, At, BlockTable
from kvstore.prefix_index.policy import EvictionPolicy, Use


class TieredPolicy(EvictionPolicy):
    """DRAM in one policy's order, NVMe in another's. Both are told of everything that happens to blocks."""

    def __init__(self, dram: EvictionPolicy, nvme: EvictionPolicy) -> None:
        self._by_tier = {DRAM: dram, NVME: nvme}
        self.name = f"{dram.name}, {nvme.name} on NVMe"

    def attach(self, table: BlockTable, tiers: Sequence[int] = (DRAM,)) -> None:
        super().attach(table, tiers)
        for tier in tiers:
            self._by_tier[tier].attach(table, (tier,))

    def of(self, tier: int) -> EvictionPolicy:
        return self._by_tier[tier]

    def accessed(self, ids: At, use: Use) -> float:
        return min(self._by_tier[tier].accessed(ids, use) for tier in self.tiers)

    def inserted(self, ids: At, use: Use) -> None:
        for tier in self.tiers:
            self._by_tier[tier].inserted(ids, use)

    def demoted(self, ids: At) -> None:
        for tier in self.tiers:
            self._by_tier[tier].demoted(ids)

    def entered(self, ids: At, tier: int) -> None:
        self._by_tier[tier].entered(ids, tier)

    def left(self, ids: At, tier: int) -> None:
        self._by_tier[tier].left(ids, tier)

    def ended(self, ids: At, use: Use) -> None:
        for tier in self.tiers:
            self._by_tier[tier].ended(ids, use)

    def evicted(self, ids: At) -> None:
        for tier in self.tiers:
            self._by_tier[tier].evicted(ids)

    def close(self) -> None:
        for policy in self._by_tier.values():
            policy.close()

    def rank(self, ids: At, tier: int) -> NDArray[np.float64]:
        return self._by_tier[tier].rank(ids, tier)

    def admits(self, ids: At, use: Use, tier: int) -> NDArray[np.bool_]:
        return self._by_tier[tier].admits(ids, use, tier)
