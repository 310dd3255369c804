"""What an order of eviction for several tenants keeps of the past, and how exactly a guaranteed minimum is kept."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.config.tenants import TenantOptions
from kvstore.prefix_index.block_table import DRAM, At
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies.lru import LruPolicy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.prefix_index.tenants import Asker

PAGE = 4096


class TurningPolicy(LruPolicy):
    """Least recently used first; once it is told so, what was stored before that in the opposite order, before all
    else. Like every policy whose ranks change with time it says so when a snapshot is taken."""

    name = "turning"
    moves = True

    def __init__(self) -> None:
        super().__init__()
        self.turned_at_s = -1.0

    def rank(self, ids: At, tier: int) -> NDArray[np.float64]:
        used_s = self.table.last_use_s[ids]
        return np.where(used_s <= self.turned_at_s, -used_s, super().rank(ids, tier))


class Tenants:
    """An index of two tenants whose prompts have a block each."""

    def __init__(self, policy: LruPolicy, options: TenantOptions | None = None) -> None:
        self.index = PrefixIndex(policy, reserve_blocks=64, tenants=options or TenantOptions())
        self.a, self.b = (self.index.tenants.number(name) for name in "ab")
        for tenant in (self.a, self.b):
            self.index.tenants.owns(tenant, tenant)
        self._n = 0

    def store(self, tenant: int, n_pages: int = 1) -> int:
        """One block; returns its id."""
        self._n += 1
        path = RowPath.from_tokens(np.array([self._n, 0], np.uint32), 2)
        root, slots = bytes([tenant]) * 16, np.array([self._n], np.int64)
        self.index.insert(root, path, 0, slots, n_pages * PAGE, Use(float(self._n), namespace=tenant))
        return int(self.index.match(root, path).ids[0])


def test_an_order_of_all_is_forgotten_when_that_of_each_takes_its_place() -> None:
    policy = TurningPolicy()
    tenants = Tenants(policy)
    index, a, b = tenants.index, tenants.a, tenants.b
    first = [tenants.store(a) for _ in range(8)]
    assert index.evict(1).ids.tolist() == first[:1]  # alone: there is an order of all now
    guest = tenants.store(b)
    policy.turned_at_s = 8.0
    assert index.evict(1, Asker(b, PAGE)).ids.tolist() == first[-1:]  # the order of a's has other ranks
    assert index.evict(1, of=[b]).ids.tolist() == [guest]
    newest = tenants.store(a)
    assert index.evict(7).ids.tolist() == [*first[-2:0:-1], newest]
    index.check()


@pytest.mark.parametrize("n_pages", [1, 2, 3, 4, 7])
def test_a_minimum_is_undershot_by_less_than_a_block(n_pages: int) -> None:
    """As blocks go whole: what is left is more than the minimum less one block; and it may be a page more than that."""
    left = set()
    for least in range(8, 8 + n_pages):
        tenants = Tenants(LruPolicy(), TenantOptions(weights="b=1000", dram_min=f"a={least * PAGE}"))
        for _ in range(20):
            tenants.store(tenants.a, n_pages)
        for _ in range(100):
            tenants.store(tenants.b)
            tenants.index.evict(1, Asker(tenants.b, PAGE))
        pages = int(tenants.index.tenants.used_bytes[DRAM, tenants.a]) // PAGE
        assert least - n_pages < pages <= least
        left.add(pages - least)
    assert left == set(range(1 - n_pages, 1))
