"""Places for copies in HBM: who gives up theirs for whose sake.

Slots lie in regions of one tenant and slot size each. What a tenant gives up serves itself at once, others when a
whole region is empty. As copies are all that is there, a region is emptied by forgetting them: nothing moves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.metrics import Counters
from kvstore.prefix_index.above import Above
from kvstore.prefix_index.block_table import HBM
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.shares import Standing
from kvstore.prefix_index.tenants import Asker
from kvstore.tiers.any_region import DAEMON_WRITER
from kvstore.tiers.hbm import HbmTier
from kvstore.types import SLOT_BITS

PASSED_PER_BLOCK, PASSED_SHARE = 4, 32
"""How far up the order copies are looked for whose slots serve the asker: those passed over for each one wanted, and a
part of all."""


class HbmRoom:
    """Makes places in HBM, at the policy's cost. Called on the store's thread only; waits for nobody."""

    def __init__(self, index: PrefixIndex, above: Above, tier: HbmTier, counters: Counters) -> None:
        self._index = index
        self._above = above
        self._tier = tier
        self._counters = counters

    def make(self, tenant: str, slot_bytes: int, n: int) -> NDArray[np.int64]:
        """Places for up to ``n`` copies of a tenant, reserved, where others may go that are worth less.

        Never those of blocks in use, nor of tenants within their share.
        """
        tenants, tier = self._index.tenants, self._tier
        asker = Asker(tenants.number(tenant), n * slot_bytes)
        tenants.room_for_all[HBM] = tier.capacity_bytes - tier.retired_mapped_bytes - tier.lost_bytes
        whose = (DAEMON_WRITER, tenant, slot_bytes)
        while (short := n - tier.free_slots(*whose)) > 0:
            most_passed = PASSED_PER_BLOCK * short + self._above.n // PASSED_SHARE
            if self._evict(short, asker, whose, most_passed):
                continue
            if tier.retired_mapped_bytes + tier.leaving_bytes >= short * slot_bytes:
                break  # that is room as soon as clients have closed it, and the device has it
            if not self._empty_region(whose) and not self._evict(short, asker, whose, self._above.n, own=True):
                break
        return tier.allocate(*whose, n)

    def _evict(self, n: int, asker: Asker, whose: tuple[int, str, int], most_passed: int, *, own: bool = False) -> bool:
        """Whether copies in regions that serve the asker went; ``own``: its own tenant's, whatever that has."""
        usable = self._tier.usable_regions(*whose)
        if not usable:
            return False
        ids = self._above.evict(
            n,
            asker,
            (asker.tenant,) if own else None,
            worth=lambda slot: int(slot >> SLOT_BITS in usable),
            most_passed=most_passed,
        )
        self._counters.add("hbm_evicted_blocks", len(ids))
        return len(ids) > 0

    def _empty_region(self, whose: tuple[int, str, int]) -> bool:
        """Forget what is in the region whose copies are worth least; False if there is none that may go.

        None that serves the asker, nor of a tenant that has no more than is due to it; nothing in it is in use.
        """
        tier, table = self._tier, self._index.table
        retired = tier.retire_empty(keep_for=whose)
        if retired:
            return True
        at = table.all_resident(HBM)
        region_ids, which = np.unique(table.hbm_slot[at] >> SLOT_BITS, return_inverse=True)
        ranks = np.bincount(which, table.hbm_rank[at]) / np.maximum(np.bincount(which), 1)
        in_use = np.bincount(which, table.refs[at] > 0) > 0
        others = tier.idle_regions() - tier.usable_regions(*whose)
        for i in np.argsort(ranks, kind="stable").tolist():
            region_id = int(region_ids[i])
            if in_use[i] or region_id not in others or not self._gives(tier.region(region_id).tenant, whose[1]):
                continue
            ids = at[which == i]
            self._above.drop(ids)
            self._counters.add("hbm_evicted_blocks", len(ids))
            tier.retire_empty(keep_for=whose)
            return True
        return False

    def _gives(self, tenant: str, asker: str) -> bool:
        """Whether a whole region of this tenant may go for the asker's sake."""
        number = self._index.tenants.number(tenant)
        return tenant == asker or self._above.standing(Asker(number)) is Standing.OVER
