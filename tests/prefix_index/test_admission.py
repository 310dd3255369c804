"""What is not worth a place in a full tier is left out, exactly as if it had come and gone first."""

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
MARGIN = HazardPolicy.margin


def store(index: PrefixIndex, name: int, n: int, priority: int) -> np.ndarray:
    path = RowPath.from_tokens(np.full(n, name, np.uint32), 1)
    use = Use(float(name), n, hints=Hints(priority=priority) if priority else None, block_tokens=1)
    return index.insert(ROOT, path, 0, np.zeros(n, np.int64), 1, use).ids


@pytest.mark.parametrize("seed", range(5))
def test_what_stays_out_is_what_would_have_gone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = PrefixIndex(make_policy("hazard"), nvme=True)
    # One block a prompt: tails and heads are not the matter here.
    for name in range(1, 31):
        index.add_nvme(store(index, name, 1, int(rng.integers(-100, 100))), np.zeros(1, np.int64))
    new = np.concatenate([store(index, name, 1, int(rng.integers(-100, 100))) for name in range(31, 41)])
    for short in (1, 4, 10):
        kept = outlasting(index, new, short, NVME)
        all_ids = index.table.alive()
        ranks = index.rank(all_ids, NVME) + np.where(np.isin(all_ids, new), MARGIN, 0.0)
        lowest = all_ids[np.argsort(ranks, kind="stable")][:short]
        assert kept.tolist() == [block for block in new.tolist() if block not in lowest]


def test_with_room_and_under_other_policies_all_may_come() -> None:
    for name in ("hazard", "lru"):
        index = PrefixIndex(make_policy(name), nvme=True)
        index.add_nvme(store(index, 1, 4, 100), np.zeros(4, np.int64))
        new = store(index, 2, 4, -100)
        assert outlasting(index, new, 0, NVME).tolist() == new.tolist()
        assert outlasting(index, new, 2, NVME).tolist() == (new.tolist() if name == "lru" else new[:2].tolist())


def test_what_is_worth_but_little_less_comes_in() -> None:
    index = PrefixIndex(make_policy("hazard"), nvme=True)
    old = store(index, 1, 4, 0)
    index.add_nvme(old, np.zeros(4, np.int64))
    new = store(index, 2, 4, -75)
    below = float((index.rank(old, NVME)[:1] - index.rank(new, NVME)[:1])[0])
    assert 0 < below < MARGIN
    assert outlasting(index, new, 2, NVME).tolist() == new.tolist()
