"""Tenants as metrics have them: a bounded number by name, the others together."""

from __future__ import annotations

from dataclasses import replace

from kvstore.http.exports import OTHER_TENANTS, TENANT_LABELS_MAX
from kvstore.http.source import TenantSample
from kvstore.store.store import Store
from kvstore.store.tenancy import tenant_facts


class TenantSamples:
    """Of one store. A tenant that has a place keeps it, so that no counter ever falls."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._named: set[str] = set()

    def take(self) -> list[TenantSample]:
        """One sample for each name and tier."""
        facts = tenant_facts(self._store)
        for each in facts:
            if len(self._named) < TENANT_LABELS_MAX and each.tenant not in ("", OTHER_TENANTS):
                self._named.add(each.tenant)
        samples: dict[tuple[str, str], TenantSample] = {}
        for each in facts:
            name = each.tenant if each.tenant in self._named else OTHER_TENANTS
            for tier in each.tiers:
                sum_ = samples.get((name, tier.tier), TenantSample(name, tier.tier, 0, 0, 0, 0, 0))
                samples[name, tier.tier] = replace(
                    sum_,
                    used_bytes=sum_.used_bytes + tier.used_bytes,
                    share_bytes=sum_.share_bytes + tier.share_bytes,
                    n_evicted=sum_.n_evicted + tier.n_evicted,
                    n_suffered=sum_.n_suffered + tier.n_suffered,
                    n_caused=sum_.n_caused + tier.n_caused,
                )
        return list(samples.values())
