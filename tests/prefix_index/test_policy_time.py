"""A policy's time is counted, and the policy the same."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_tier_policies
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.policy_time import Stopwatch, TimedPolicy
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16


def evicted(index: PrefixIndex) -> list[bytes]:
    """What goes of a few hundred prompts."""
    rng = np.random.default_rng(0)
    gone = []
    for i in range(300):
        path = RowPath.from_tokens(rng.integers(0, 3, 12).astype(np.uint32), 1)
        use = Use(float(i), 12, block_tokens=1)
        found = index.match(ROOT, path).ids
        index.touch(found, use)
        n = path.n_rows - len(found)
        index.insert(ROOT, path, len(found), np.zeros(n, np.int64), 1, use)
        gone += [key.tobytes() for key in index.evict(max(index.n_blocks - 200, 0)).keys]
    return gone


@pytest.mark.parametrize("names", [("hazard", ""), ("lru", ""), ("hazard", "lru")])
def test_the_order_is_the_same_and_time_goes_by(names: tuple[str, str]) -> None:
    timed = TimedPolicy(make_tier_policies(*names))
    nvme = bool(names[1])
    begun_s = time.perf_counter()
    gone = evicted(PrefixIndex(timed, nvme=nvme))
    took_s = time.perf_counter() - begun_s
    assert gone
    assert gone == evicted(PrefixIndex(make_tier_policies(*names), nvme=nvme))
    assert 0 < timed.watch.longest_s <= timed.watch.seconds <= took_s
    assert timed.of(NVME if nvme else DRAM).timed() is timed.watch


def test_what_is_inside_of_another_call_counts_once() -> None:
    watch = Stopwatch()
    begun_s = time.perf_counter()
    with watch, watch:
        sum(range(100_000))
    assert 0 < watch.seconds <= time.perf_counter() - begun_s
    assert watch.longest_s == watch.seconds
    with pytest.raises(KeyError), watch:
        raise KeyError
    assert watch.seconds > watch.longest_s
