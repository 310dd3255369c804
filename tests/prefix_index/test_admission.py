"""What is clearly worth less than all that is in a full tier is kept out of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.hints import Hints
from kvstore.prefix_index.admission import outlasting
from kvstore.prefix_index.block_table import NVME
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policies.hazard import HazardPolicy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16


def store(index: PrefixIndex, name: int, n: int, priority: int) -> np.ndarray:
    path = RowPath.from_tokens(np.full(n, name, np.uint32), 1)
    use = Use(float(name), n, hints=Hints(priority=priority) if priority else None, block_tokens=1)
    return index.insert(ROOT, path, 0, np.zeros(n, np.int64), 1, use).ids


@pytest.mark.parametrize("seed", range(5))
def test_what_stays_out_is_worth_less_than_the_first_to_go(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = PrefixIndex(make_policy("hazard"), nvme=True)
    old = np.concatenate([store(index, name, 2, int(rng.integers(-10, 100))) for name in range(1, 31)])
    index.add_nvme(old, np.zeros(len(old), np.int64))
    new = np.concatenate([store(index, name, 2, int(rng.integers(-100, 20))) for name in range(31, 51)])
    ranks, least = index.rank(new, NVME), float(index.rank(old, NVME).min())
    worth_it = new[ranks >= least - HazardPolicy.margin]
    assert 0 < len(worth_it) < len(new)
    for short in (1, 30):
        assert outlasting(index, new, short, NVME).tolist() == worth_it.tolist()


def test_what_is_worth_little_less_comes_in() -> None:
    index = PrefixIndex(make_policy("hazard"), nvme=True)
    old = store(index, 1, 4, 0)
    index.add_nvme(old, np.zeros(4, np.int64))
    new = store(index, 2, 4, -75)
    less = index.rank(old, NVME) - index.rank(new, NVME)
    assert (less > 0).all()
    assert (less < HazardPolicy.margin).all()
    assert outlasting(index, new, 2, NVME).tolist() == new.tolist()


@pytest.mark.parametrize("name", ["hazard", "lru"])
def test_with_room_and_under_other_policies_all_may_come(name: str) -> None:
    index = PrefixIndex(make_policy(name), nvme=True)
    index.add_nvme(store(index, 1, 4, 100), np.zeros(4, np.int64))
    new = store(index, 2, 4, -100)
    assert outlasting(index, new, 0, NVME).tolist() == new.tolist()
    assert outlasting(index, new, 2, NVME).tolist() == (new.tolist() if name == "lru" else [])


def test_an_empty_tier_has_nothing_to_lose() -> None:
    index = PrefixIndex(make_policy("hazard"), nvme=True)
    new = store(index, 1, 4, -100)
    assert outlasting(index, new, 2, NVME).tolist() == new.tolist()
