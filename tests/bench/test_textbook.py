"""Textbook policies on single blocks, against small models that share no code with them and published tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.bench import workload as work
from kvstore.bench.textbook import simulate_textbook
from kvstore.bench.trace import Trace, TraceRequest, load_trace
from kvstore.errors import BadInputError

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
PERCENTS = (1, 5, 10, 25, 50)
PUBLISHED = {
    ("conversation", "fifo"): (0.0513, 0.1759, 0.2485, 0.3266, 0.3556),
    ("conversation", "lfu"): (0.0582, 0.1276, 0.1949, 0.3364, 0.3627),
    ("conversation", "s3fifo"): (0.0750, 0.1874, 0.2448, 0.3445, 0.3619),
    ("synthetic", "fifo"): (0.0396, 0.1524, 0.2476, 0.4194, 0.5502),
    ("synthetic", "lfu"): (0.0121, 0.1061, 0.1769, 0.3902, 0.6030),
    ("synthetic", "s3fifo"): (0.0384, 0.1544, 0.2608, 0.4470, 0.5746),
}
TOLERANCE = {"fifo": 0.0005, "lfu": 0.0005, "s3fifo": 0.01}


class Lru:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.held

    def access(self, block: int) -> None:
        if block in self.held:
            self.used(block)
            return
        if len(self.held) == self.capacity:
            self.evict()
        self.held[block] = 1

    def used(self, block: int) -> None:
        self.held.move_to_end(block)

    def evict(self) -> None:
        self.held.popitem(last=False)


class Fifo(Lru):
    def used(self, block: int) -> None:
        pass


class Lfu(Lru):
    """In the order of their last use, so that the first of the least count is the oldest."""

    def used(self, block: int) -> None:
        self.held[block] += 1
        self.held.move_to_end(block)

    def evict(self) -> None:
        del self.held[min(self.held, key=self.held.__getitem__)]


class S3Fifo(Lru):
    """As published: small queue, main queue, ghosts; everything enters the small queue until there are ghosts."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: OrderedDict[int, int] = OrderedDict()
        self.main: OrderedDict[int, int] = OrderedDict()
        self.ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.small or block in self.main

    def access(self, block: int) -> None:
        for queue in (self.small, self.main):
            if block in queue:
                queue[block] = min(queue[block] + 1, 3)
                return
        n = len(self.small) + len(self.main)
        if n == self.capacity:
            self.evict()
        queue = self.main if block in self.ghosts else self.small
        self.ghosts.pop(block, None)
        queue[block] = 0

    def evict(self) -> None:
        while self.small and len(self.main) <= 0.9 * self.capacity:
            block, uses = self.small.popitem(last=False)
            if uses < 2:
                self.ghosts[block] = None
                while len(self.ghosts) > int(0.9 * self.capacity):
                    self.ghosts.popitem(last=False)
                return
            self.main[block] = 0
        while True:
            block, uses = self.main.popitem(last=False)
            if not uses:
                return
            self.main[block] = uses - 1


MODELS: dict[str, Callable[[int], Lru]] = {"lru": Lru, "fifo": Fifo, "lfu": Lfu, "s3fifo": S3Fifo}


def model_hits(trace: Trace, model: Lru) -> int:
    hits = 0
    for index in range(trace.n_requests):
        ids = work.path_ids(trace, index)
        hits += next((n for n, block in enumerate(ids) if block not in model), len(ids))
        for block in reversed(ids):
            model.access(block)
    return hits


def zipf_trace(seed: int, n_requests: int = 300) -> Trace:
    rng = np.random.default_rng(seed)
    known: dict[tuple[int, ...], int] = {}
    offsets, ids, requests = [0], [], []
    for index in range(n_requests):
        path = tuple(int(step) % 6 for step in rng.zipf(1.7, rng.integers(1, 5)))
        ids += [known.setdefault(path[: end + 1], len(known)) for end in range(len(path))]
        offsets.append(len(ids))
        requests.append(TraceRequest(float(index), 16 * len(path), 1))
    return Trace("zipf", tuple(requests), np.array(offsets), np.array(ids, np.uint64), 16)


@pytest.mark.parametrize("policy", MODELS)
@pytest.mark.parametrize("capacity", [10, 20, 70])
def test_a_policy_equals_its_textbook(policy: str, capacity: int) -> None:
    for seed in range(3):
        trace = zipf_trace(seed)
        counts = simulate_textbook(trace, policy, capacity)
        assert counts.block_hits == model_hits(trace, MODELS[policy](capacity))
        assert counts.block_accesses == trace.block_accesses
        assert counts.inserted - counts.evicted == min(capacity, counts.inserted)


def test_a_cache_needs_room() -> None:
    with pytest.raises(BadInputError, match="capacity is 0 blocks"):
        simulate_textbook(zipf_trace(0, 3), "lru", 0)


def check_published(name: str, policy: str, percent: int) -> None:
    trace = load_trace(SHARED / f"{name}_trace.jsonl")
    blocks = work.capacity_blocks(trace.unique_blocks, percent)
    expected = PUBLISHED[name, policy][PERCENTS.index(percent)]
    assert simulate_textbook(trace, policy, blocks).block_hit_ratio == pytest.approx(expected, abs=TOLERANCE[policy])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize("policy", TOLERANCE)
def test_published_ratios(policy: str) -> None:
    check_published("synthetic", policy, 10)
