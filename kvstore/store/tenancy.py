"""What each tenant has of a store, what is due to it, and what became of its blocks for whose sake."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvstore.facts import TenantTier
from kvstore.prefix_index.block_table import DRAM, HBM, NVME, TIER_NAMES
from kvstore.prefix_index.shares import nominal_bytes
from kvstore.store.store import Store


class TenantFacts(NamedTuple):
    """A tenant, by name (empty: whoever has what nobody has described yet)."""

    tenant: str
    weight: float
    tiers: tuple[TenantTier, ...]
    pinned_bytes: int
    pin_max_bytes: int
    n_pins: int

    @property
    def used_bytes(self) -> int:
        """In all tiers."""
        return sum(each.used_bytes for each in self.tiers)


def tenant_facts(store: Store) -> list[TenantFacts]:
    """Every tenant that has, or had, blocks; who has most first. Takes time proportional to tenants and pins."""
    tenants = store.index.tenants
    capacities = {DRAM: store.dram.capacity_bytes}
    if store.hierarchy is not None:
        capacities[NVME] = int(store.hierarchy.nvme.stats()["live_capacity_bytes"])
    if store.hbm is not None:
        capacities[HBM] = store.hbm.tier.capacity_bytes
    due = {tier: nominal_bytes(tenants, tier, capacity) for tier, capacity in capacities.items()}
    no_quota = np.iinfo(np.int64).max
    found = []
    for number, name in enumerate(tenants.names):
        counts = (tenants.used_bytes, tenants.n_evicted, tenants.n_suffered, tenants.n_caused)
        if not any(column[:, number].any() for column in counts) and not store.pin_quota.n_pins_of(name):
            continue
        tiers = tuple(
            TenantTier(
                TIER_NAMES[tier],
                int(tenants.used_bytes[tier, number]),
                due[tier].get(number, 0),
                int(tenants.least_bytes[tier, number]),
                None if (most := int(tenants.most_bytes[tier, number])) == no_quota else most,
                *(int(column[tier, number]) for column in counts[1:]),
            )
            for tier in capacities
        )
        quota = store.pin_quota
        found.append(
            TenantFacts(
                name,
                float(tenants.weights[number]),
                tiers,
                quota.held_by(name),
                quota.most_of(name),
                quota.n_pins_of(name),
            )
        )
    return sorted(found, key=lambda each: (-each.used_bytes, each.tenant))
