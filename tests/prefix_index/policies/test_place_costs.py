"""What is dear to compute again stays longer, where a model's cost is told, and only then."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies.gdsf import GdsfPolicy
from kvstore.prefix_index.policies.hazard import HazardPolicy
from kvstore.prefix_index.policy import EvictionPolicy, Newcomers, Use
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16
DOUBLING = 30.0
LONG, SHORT = 64, 4


def use(now_s: float, n_tokens: int, doubling: float) -> Use:
    return Use(now_s, n_tokens, block_tokens=1, attention_doubling_tokens=doubling)


def path(name: int, n: int) -> RowPath:
    return RowPath.from_tokens(np.arange(n, dtype=np.uint32) + np.uint32(1000 * name), 1)


def store(index: PrefixIndex, name: int, n: int, now_s: float, doubling: float) -> np.ndarray:
    return index.insert(ROOT, path(name, n), 0, np.zeros(n, np.int64), 1, use(now_s, n, doubling)).ids


def learnt(doubling: float, *, nvme: bool = False) -> tuple[HazardPolicy, PrefixIndex]:
    """A policy that has its first model, for which short and long prompts are alike but for what they cost."""
    policy = HazardPolicy()
    index = PrefixIndex(policy, nvme=nvme)
    for i in range(80):
        store(index, 100 + i, LONG if i % 2 else SHORT, float(i), doubling)
        if i % 8 == 7:
            again = use(i + 0.5, SHORT, doubling)
            index.touch(index.match(ROOT, path(100 + i - 1, SHORT)).ids, again)
    index.evict(index.n_blocks)
    return policy, index


def test_a_run_is_worth_its_mean_cost_up_to_its_last_block() -> None:
    _, plain = learnt(0.0)
    _, told = learnt(DOUBLING)
    ids = store(plain, 1, LONG, 90.0, 0.0)
    assert np.ptp(plain.rank(ids)) == 0
    ids = store(told, 1, LONG, 90.0, DOUBLING)
    ranks = told.rank(ids)
    assert np.exp(ranks - ranks[0]) == pytest.approx(
        (1 + np.arange(1, LONG + 1) / 2 / DOUBLING) / (1 + 0.5 / DOUBLING), rel=1e-5
    )
    assert told.table.ranks(DRAM)[ids] == pytest.approx(ranks, abs=1e-4)


def test_newcomers_are_weighed_as_they_will_rank() -> None:
    policy, index = learnt(DOUBLING)
    keys = path(1, LONG).chain(ROOT, 0, LONG)
    weighed = policy.weigh(Newcomers(keys, 0xFFFFFFFF, use(90.0, LONG, DOUBLING)))
    ids = store(index, 1, LONG, 90.0, DOUBLING)
    assert index.table.ranks(DRAM)[ids] == pytest.approx(weighed, abs=1e-4)


def test_of_two_tiers_only_the_last_one_counts_what_computing_costs() -> None:
    _, index = learnt(DOUBLING, nvme=True)
    ids = store(index, 1, LONG, 90.0, DOUBLING)
    assert np.ptp(index.rank(ids, DRAM)) == 0
    assert np.ptp(index.rank(ids, NVME)) > 0.5


def test_under_lru_nothing_costs_more() -> None:
    index = PrefixIndex(HazardPolicy())
    assert np.ptp(index.rank(store(index, 1, LONG, 1.0, DOUBLING))) == 0


@pytest.mark.parametrize(("doubling", "like"), [(0.0, 32768.0), (500.0, 500.0)])
def test_gdsf_takes_what_is_told_before_its_own_guess(doubling: float, like: float) -> None:
    def ranks(policy: EvictionPolicy, told: float) -> list[float]:
        index = PrefixIndex(policy)
        found: list[float] = index.rank(store(index, 1, LONG, 1.0, told)).tolist()
        return found

    assert ranks(GdsfPolicy(), doubling) == ranks(GdsfPolicy(like), 0.0)
