"""The optimum against brute force, and LRU from stack distances against LRU itself."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from kvstore.bench import workload as work
from kvstore.bench.lru_curve import LruCurve
from kvstore.bench.opt import OptimalPolicy
from kvstore.bench.simulate import simulate
from kvstore.bench.trace import Trace, TraceRequest, load_trace
from kvstore.errors import BadInputError

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
PERCENTS = (1, 5, 10, 25, 50)
OPT = {
    "conversation": (0.2464, 0.3664, 0.3664, 0.3664, 0.3664),
    "synthetic": (0.1854, 0.3956, 0.5063, 0.6260, 0.6396),
}
LRU = {
    "conversation": (0.0525, 0.1958, 0.2789, 0.3535, 0.3631),
    "synthetic": (0.0381, 0.1566, 0.2623, 0.4441, 0.5888),
}


def small_trace(seed: int, n_requests: int, width: int, depth: int) -> Trace:
    """Requests that walk down a small random tree; the last block may be short."""
    rng = np.random.default_rng(seed)
    known: dict[tuple[int, ...], int] = {}
    offsets, ids, requests = [0], [], []
    for index in range(n_requests):
        path = tuple(int(step) for step in rng.integers(0, width, rng.integers(1, depth + 1)))
        ids += [known.setdefault(path[: end + 1], len(known)) for end in range(len(path))]
        offsets.append(len(ids))
        requests.append(TraceRequest(float(index), 16 * len(path) - int(rng.integers(0, 16)), 1))
    return Trace("small", tuple(requests), np.array(offsets), np.array(ids, np.uint64), 16)


def best_by_force(trace: Trace, capacity: int) -> int:
    """The most block hits over every choice of what to keep after each request, whatever hangs together."""
    best = {frozenset[int](): 0}
    for index in range(trace.n_requests):
        ids = work.path_ids(trace, index)
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            n = next((n for n, block in enumerate(ids) if block not in kept), len(ids))
            might = kept | set(ids)
            # To keep more is never worse.
            for choice in combinations(sorted(might), min(capacity, len(might))):
                key = frozenset(choice)
                after[key] = max(after.get(key, 0), hits + n)
        best = after
    return max(best.values())


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_nobody_does_better_than_opt(capacity: int) -> None:
    for seed in range(25):
        trace = small_trace(seed, n_requests=7, width=2, depth=3)
        assert OptimalPolicy(trace).hits(capacity).block_hits == best_by_force(trace, capacity), f"seed {seed}"


def test_opt_with_room_for_everything_is_the_ideal() -> None:
    trace = small_trace(3, 200, 3, 8)
    counts = OptimalPolicy(trace).hits(trace.unique_blocks)
    assert counts.block_hit_ratio == pytest.approx(trace.ideal_block_hit_ratio)
    assert counts.token_hit_ratio == pytest.approx(trace.ideal_token_hit_ratio)


def test_opt_needs_room() -> None:
    with pytest.raises(BadInputError, match="capacity is 0 blocks"):
        OptimalPolicy(small_trace(0, 3, 2, 2)).hits(0)


@pytest.mark.parametrize("seed", range(4))
def test_one_pass_gives_what_lru_hits_at_every_capacity(seed: int) -> None:
    trace = small_trace(seed, 120, 3, 6)
    curve = LruCurve(trace)
    for capacity in [1, 2, 3, 5, 8, 13, 40, 100, trace.unique_blocks, 10 * trace.unique_blocks]:
        simulated, found = simulate(trace, "lru", capacity), curve.hits(capacity)
        for name in ("block_hits", "token_hits", "any_hits", "block_accesses", "token_accesses", "requests"):
            assert getattr(found, name) == getattr(simulated, name), f"{name} at {capacity}"
        assert found.prefill_saved == simulated.prefill_saved == simulated.token_hits
    assert np.array_equal(curve.block_hits()[[1, 5]], [curve.hits(n).block_hits for n in (1, 5)])
    assert curve.hits(0).block_hits == 0


def test_one_pass_gives_the_prefill_that_lru_saves() -> None:
    trace, doubling = small_trace(0, 120, 3, 6), 1000.0
    curve, opt = LruCurve(trace, doubling), OptimalPolicy(trace, doubling)
    for capacity in (1, 5, 13, 40, trace.unique_blocks):
        simulated, found = simulate(trace, "lru", capacity, attention_doubling_tokens=doubling), curve.hits(capacity)
        assert found.prefill_saved == pytest.approx(simulated.prefill_saved)
        assert found.prefill == pytest.approx(simulated.prefill)
        assert opt.hits(capacity).prefill == pytest.approx(simulated.prefill)
    assert 0 < simulated.prefill_saved != simulated.token_hits


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize("name", OPT)
def test_published_ratios_of_lru_and_opt(name: str) -> None:
    trace = load_trace(SHARED / f"{name}_trace.jsonl")
    lru, opt = LruCurve(trace), OptimalPolicy(trace)
    for percent, best, least in zip(PERCENTS, OPT[name], LRU[name], strict=True):
        blocks = work.capacity_blocks(trace.unique_blocks, percent)
        assert opt.hits(blocks).block_hit_ratio == pytest.approx(best, abs=0.0005)
        assert lru.hits(blocks).block_hit_ratio == pytest.approx(least, abs=0.0005)
    everything = opt.hits(trace.unique_blocks)
    assert everything.token_hit_ratio == pytest.approx(trace.ideal_token_hit_ratio)
