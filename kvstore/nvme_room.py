"""Places for frames on NVMe: who gives up copies there for whose blocks, and how many a tenant may have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.metrics import Counters
from kvstore.prefix_index.block_table import NVME
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.tenants import Asker
from kvstore.tiers.nvme.tier import NvmeTier


class NvmeRoom:
    """Makes places on NVMe, at the policy's cost. Called on the store's thread only."""

    def __init__(self, index: PrefixIndex, nvme: NvmeTier, counters: Counters) -> None:
        self._index = index
        self._nvme = nvme
        self._counters = counters

    def make(self, namespace: int, frame_bytes: int, n: int) -> NDArray[np.int64]:
        """Places for up to ``n`` frames of a namespace (its number), where copies may go that are worth less."""
        tenant = self._index.tenants.owner(namespace)
        asker = Asker(tenant, n * frame_bytes)
        while (over := min(n, self._most(tenant, frame_bytes)) - self._n_allowed(tenant, frame_bytes, n)) > 0:
            if not self._evict(over, asker, (tenant,)):
                break
        n = self._n_allowed(tenant, frame_bytes, n)
        while (short := self._nvme.short_of(frame_bytes, n)) > 0:
            if not self._evict(short, asker):
                break
        slots = self._nvme.allocate(frame_bytes, n)
        self._index.tenants.hold(tenant, NVME, len(slots) * frame_bytes)
        return slots

    def settled(self, namespace: int, frame_bytes: int, n: int) -> None:
        """So many frames of those that ``make`` has found a place for are written, or never will be."""
        self._index.tenants.hold(self._index.tenants.owner(namespace), NVME, -n * frame_bytes)

    def may_come(self, namespace: int, frame_bytes: int) -> bool:
        """Whether there is a place for a frame of the namespace as soon as the tier has gathered it."""
        tenant = self._index.tenants.owner(namespace)
        return self._n_allowed(tenant, frame_bytes, 1) > 0 and self._nvme.short_of(frame_bytes, 1) == 0

    def _most(self, tenant: int, frame_bytes: int) -> int:
        return int(self._index.tenants.most_bytes[NVME, tenant]) // frame_bytes

    def _n_allowed(self, tenant: int, frame_bytes: int, n: int) -> int:
        """How many of ``n`` frames the tenant's quota has room for."""
        return max(min(n, self._index.tenants.room_bytes(tenant, NVME) // frame_bytes), 0)

    def _evict(self, n: int, asker: Asker, of: tuple[int, ...] | None = None) -> bool:
        evicted = self._index.evict_nvme(n, asker, of)
        self._nvme.free(evicted.slots)
        self._counters.add("nvme_evicted_blocks", len(evicted.ids))
        self._counters.add("nvme_dropped_blocks", int(evicted.gone.sum()))
        return len(evicted.ids) > 0
