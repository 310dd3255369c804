"""A policy of its own for tiers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import DRAM, HBM, NVME, At, BlockTable
from kvstore.prefix_index.policy import EvictionPolicy, Newcomers, Use


class TieredPolicy(EvictionPolicy):
    """DRAM in one policy's order, NVMe or HBM in another's. All are told of everything that happens to blocks.

    A tier without a policy of its own is in that of DRAM.
    """

    def __init__(self, dram: EvictionPolicy, nvme: EvictionPolicy | None = None, hbm: EvictionPolicy | None = None):
        self._by_tier = {DRAM: dram, NVME: nvme or dram, HBM: hbm or dram}
        self._all = tuple(dict.fromkeys(self._by_tier.values()))
        self.weighs = dram.weighs
        others = ((nvme, "on NVMe"), (hbm, "in HBM"))
        self.name = ", ".join((dram.name, *(f"{each.name} {where}" for each, where in others if each is not None)))

    def attach(self, table: BlockTable, tiers: Sequence[int] = (DRAM,)) -> None:
        super().attach(table, tiers)
        whose = {policy: [tier for tier in tiers if self._by_tier[tier] is policy] for policy in self._all}
        self._all = tuple(policy for policy in self._all if whose[policy])
        for policy in self._all:
            policy.attach(table, whose[policy])

    def of(self, tier: int) -> EvictionPolicy:
        return self._by_tier[tier]

    def accessed(self, ids: At, use: Use) -> float:
        return min(policy.accessed(ids, use) for policy in self._all)

    def inserted(self, ids: At, use: Use) -> None:
        for policy in self._all:
            policy.inserted(ids, use)

    def weigh(self, newcomers: Newcomers) -> NDArray[np.float64]:
        return self._by_tier[DRAM].weigh(newcomers)

    def declined(self, newcomers: Newcomers, n_entering: int) -> None:
        for policy in self._all:
            policy.declined(newcomers, n_entering)

    def demoted(self, ids: At) -> None:
        for policy in self._all:
            policy.demoted(ids)

    def entered(self, ids: At, tier: int) -> None:
        self._by_tier[tier].entered(ids, tier)

    def left(self, ids: At, tier: int) -> None:
        self._by_tier[tier].left(ids, tier)

    def ended(self, ids: At, use: Use) -> None:
        for policy in self._all:
            policy.ended(ids, use)

    def evicted(self, ids: At) -> None:
        for policy in self._all:
            policy.evicted(ids)

    def close(self) -> None:
        for policy in self._by_tier.values():
            policy.close()

    def rank(self, ids: At, tier: int) -> NDArray[np.float64]:
        return self._by_tier[tier].rank(ids, tier)

    def admits(self, ids: At, use: Use, tier: int) -> NDArray[np.bool_]:
        return self._by_tier[tier].admits(ids, use, tier)
