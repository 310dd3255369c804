"""Simulation on the real index, against small models that share no code with it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.bench import workload as work
from kvstore.bench.generate import ConversationOptions, TokenTrace, generate_trace
from kvstore.bench.simulate import HitCounts, simulate, sweep
from kvstore.bench.trace import Trace, TraceRequest, load_trace
from kvstore.errors import BadInputError

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"

PUBLISHED = {
    "conversation": {1: 0.0525, 5: 0.1958, 10: 0.2789, 25: 0.3535, 50: 0.3631},
    "synthetic": {1: 0.0381, 5: 0.1566, 10: 0.2623, 25: 0.4441, 50: 0.5888},
}


def random_trace(seed: int, n_requests: int = 150) -> Trace:
    """Requests that walk down a random tree, so that ids are chained; ends at any token."""
    rng = np.random.default_rng(seed)
    children: dict[tuple[int, int], int] = {}
    ids: list[int] = []
    offsets, requests = [0], []
    for index in range(n_requests):
        at, depth = -1, int(rng.integers(1, 12))
        for _ in range(depth):
            at = children.setdefault((at, int(rng.zipf(1.6)) % 4), len(children))
            ids.append(at)
        offsets.append(len(ids))
        requests.append(TraceRequest(float(index), 512 * depth - int(rng.integers(0, 512)), 1))
    return Trace("random", tuple(requests), np.array(offsets), np.array(ids, dtype=np.uint64), 512)


def lru_tail(trace: Trace, capacity: int) -> HitCounts:
    """Plain LRU over ids in an OrderedDict; a request's tail counts as older than its head."""
    present: OrderedDict[int, None] = OrderedDict()
    counts = HitCounts()
    for index, request in enumerate(trace.requests):
        ids = trace.ids(index).tolist()
        hits = 0
        while hits < len(ids) and ids[hits] in present:
            hits += 1
        counts.requests += 1
        counts.block_accesses += len(ids)
        counts.block_hits += hits
        counts.dram_block_hits += hits
        counts.token_accesses += request.input_length
        counts.token_hits += min(hits * trace.block_tokens, request.input_length)
        counts.any_hits += hits > 0
        counts.inserted += len(ids) - sum(i in present for i in ids)
        for block_id in reversed(ids):
            present[block_id] = None
            present.move_to_end(block_id)
        while len(present) > capacity:
            present.popitem(last=False)
            counts.evicted += 1
    counts.prefill, counts.prefill_saved = counts.token_accesses, counts.token_hits  # nobody has told what tokens cost
    return counts


@pytest.mark.parametrize("capacity", [1, 3, 8, 20, 60, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_lru_equals_an_ordered_dict(seed: int, capacity: int) -> None:
    trace = random_trace(seed)
    assert simulate(trace, "lru", capacity) == lru_tail(trace, capacity)


def test_unlimited_room_is_the_ideal() -> None:
    trace = random_trace(9)
    counts = simulate(trace)
    assert counts.block_hit_ratio == pytest.approx(trace.ideal_block_hit_ratio)
    assert counts.token_hit_ratio == pytest.approx(trace.ideal_token_hit_ratio)
    assert counts.evicted == 0
    assert counts.inserted == trace.unique_blocks


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_trace_in_part_equals_the_model(name: str) -> None:
    trace = load_trace(SHARED / f"{name}_trace.jsonl", limit=1200)
    capacity = work.capacity_blocks(trace.unique_blocks, 5)
    assert simulate(trace, "lru", capacity) == lru_tail(trace, capacity)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_hit_ratios_are_reproduced(name: str) -> None:
    trace = load_trace(SHARED / f"{name}_trace.jsonl")
    for point in sweep(trace, "lru", PUBLISHED[name]):
        published = PUBLISHED[name][int(point.capacity_percent)]
        assert point.counts.block_hit_ratio == pytest.approx(published, abs=0.0005)


class TwoLevels:
    """Blocks by id in two LRU levels, each id below a fixed one. Shares no code with the index."""

    def __init__(self, dram: int, nvme: int, write_policy: str, selective_hits: int) -> None:
        self.capacity = {"dram": dram, "nvme": nvme}
        self.level: dict[str, set[int]] = {"dram": set(), "nvme": set()}
        self.write_policy = write_policy
        self.selective_hits = selective_hits
        self.above: dict[int, int | None] = {}
        self.used: dict[int, int] = {}
        self.accesses: dict[int, int] = {}
        self.clock = 0
        self.counts = HitCounts()

    def stored(self) -> set[int]:
        return self.level["dram"] | self.level["nvme"]

    def use(self, ids: list[int]) -> None:
        for block in reversed(ids):
            self.clock += 1
            self.used[block] = self.clock
            self.accesses[block] = self.accesses.get(block, 0) + 1

    def write(self, block: int) -> None:
        at: int | None = block
        while at is not None:
            self.counts.nvme_written += at not in self.level["nvme"]
            self.level["nvme"].add(at)
            at = self.above[at]

    def request(self, ids: list[int]) -> None:
        counts, dram = self.counts, self.level["dram"]
        hits = 0
        while hits < len(ids) and ids[hits] in self.stored():
            hits += 1
        counts.requests += 1
        counts.block_accesses += len(ids)
        counts.block_hits += hits
        counts.dram_block_hits += len(dram & set(ids[:hits]))
        counts.nvme_block_hits += hits - len(dram & set(ids[:hits]))
        counts.any_hits += hits > 0
        for before, block in zip([None, *ids[:-1]], ids, strict=True):
            self.above[block] = before
        found, new = ids[:hits], ids[hits:]
        self.use(found)
        dram.update(found)
        if self.write_policy == "selective":
            for block in found:
                if self.accesses[block] >= self.selective_hits:
                    self.write(block)
        self.use(new)
        dram.update(new)
        counts.inserted += len(new)
        if self.write_policy == "through":
            for block in new:
                self.write(block)
        for name in ("dram", "nvme"):
            while len(self.level[name]) > self.capacity[name]:
                self.give_up(name)

    def give_up(self, name: str) -> None:
        level, other = self.level[name], self.level["nvme" if name == "dram" else "dram"]
        followed = {self.above[block] for block in level}
        all_followed = {self.above[block] for block in self.stored()}
        may_go = [b for b in level if b not in followed and (name == "dram" or b in other or b not in all_followed)]
        block = min(may_go, key=self.used.__getitem__)
        if name == "dram" and self.write_policy == "back":
            self.write(block)
        level.remove(block)
        if block not in self.stored():
            self.counts.evicted += 1
            del self.accesses[block]


@pytest.mark.parametrize("write_policy", ["through", "back", "selective"])
@pytest.mark.parametrize(("dram", "nvme"), [(1, 1), (3, 5), (8, 20), (20, 8), (20, 60), (60, 10_000), (10_000, 30)])
@pytest.mark.parametrize("seed", range(3))
def test_a_hierarchy_equals_two_plain_levels(seed: int, dram: int, nvme: int, write_policy: str) -> None:
    trace = random_trace(seed)
    model = TwoLevels(dram, nvme, write_policy, 3 if seed == 2 else 2)
    for index in range(trace.n_requests):
        model.request(trace.ids(index).tolist())
    counts = simulate(trace, "lru", dram, nvme, write_policy, selective_hits=model.selective_hits)
    model.counts.token_hits, model.counts.token_accesses = counts.token_hits, counts.token_accesses
    model.counts.prefill_saved, model.counts.prefill = counts.prefill_saved, counts.prefill
    assert counts == model.counts
    assert counts.dram_block_hits + counts.nvme_block_hits == counts.block_hits


@pytest.mark.parametrize("seed", range(3))
def test_below_dram_the_disk_of_a_write_through_hierarchy_is_a_plain_lru(seed: int) -> None:
    trace = random_trace(seed)
    both, small, large = simulate(trace, "lru", 10, 40), simulate(trace, "lru", 10), simulate(trace, "lru", 40)
    assert (both.block_hits, both.dram_block_hits) == (large.block_hits, small.block_hits)
    assert both.nvme_block_hits > 0


@pytest.mark.parametrize("partial", [True, False])
def test_tokens_are_found_on_disk_as_in_dram(partial: bool) -> None:
    trace = conversations(16, 5)
    both, large = simulate(trace, "lru", 60, 400, partial=partial), simulate(trace, "lru", 400, partial=partial)
    assert (both.token_hits, both.block_hits) == (large.token_hits, large.block_hits)
    assert both.dram_block_hits + both.nvme_block_hits == both.block_hits
    assert both.nvme_block_hits > 0


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traces are not here")
def test_a_hierarchy_reproduces_both_published_ratios() -> None:
    trace = load_trace(SHARED / "conversation_trace.jsonl")
    dram, nvme = (work.capacity_blocks(trace.unique_blocks, percent) for percent in (5, 25))
    counts = simulate(trace, "lru", dram, nvme)
    assert counts.block_hit_ratio == pytest.approx(PUBLISHED["conversation"][25], abs=0.0005)
    assert counts.dram_block_hits / counts.block_accesses == pytest.approx(PUBLISHED["conversation"][5], abs=0.0005)


def longest_common_prefix(left: NDArray[np.uint32], right: NDArray[np.uint32]) -> int:
    n = min(len(left), len(right))
    differ = np.flatnonzero(left[:n] != right[:n])
    return int(differ[0]) if len(differ) else n


def conversations(block_tokens: int, seed: int) -> TokenTrace:
    return generate_trace(
        ConversationOptions(
            sessions=25,
            block_tokens=block_tokens,
            mean_question_tokens=150,
            mean_answer_tokens=100,
            seed=seed,
        )
    )


@pytest.mark.parametrize("block_tokens", [16, 512])
@pytest.mark.parametrize("seed", [0, 1])
def test_partial_matches_equal_the_longest_common_prefix(block_tokens: int, seed: int) -> None:
    trace = conversations(block_tokens, seed)
    expected = 0
    for index, request in enumerate(trace.requests):
        earlier = (longest_common_prefix(request.tokens, r.tokens) for r in trace.requests[:index])
        expected += max(earlier, default=0)
    counts = simulate(trace)
    assert counts.token_hits == expected
    assert counts.token_accesses == sum(r.input_length for r in trace.requests)
    assert counts.requests - 1 == counts.any_hits


@pytest.mark.parametrize("capacity", [10, 40, None])
def test_partial_matches_beat_whole_blocks(capacity: int | None) -> None:
    trace = conversations(512, 3)
    partial = simulate(trace, "lru", capacity)
    whole = simulate(trace, "lru", capacity, partial=False)
    assert partial.token_hit_ratio > whole.token_hit_ratio
    assert whole.token_hits % 512 == 0
    # The shared system prompt alone: 512 of its 880 tokens are found by whole blocks.
    if capacity is None:
        assert partial.token_hits - whole.token_hits >= (880 - 512) * trace.requests[-1].turn


def test_whole_blocks_only_equals_the_model_without_short_blocks() -> None:
    trace = conversations(16, 4)
    whole = to_whole_blocks(trace)
    counts = simulate(trace, "lru", 100, partial=False)
    model = lru_tail(whole, 100)
    assert (counts.token_hits, counts.inserted, counts.evicted) == (
        model.block_hits * 16,
        model.inserted,
        model.evicted,
    )


def to_whole_blocks(trace: TokenTrace) -> Trace:
    known: dict[bytes, int] = {}
    ids: list[int] = []
    offsets = [0]
    for request in trace.requests:
        ends = range(16, request.input_length + 1, 16)
        ids.extend(known.setdefault(request.tokens[:end].tobytes(), len(known)) for end in ends)
        offsets.append(len(ids))
    plain = trace.block_view.requests
    return Trace("whole", plain, np.array(offsets), np.array(ids, dtype=np.uint64), 16)


def test_a_sweep_takes_percent_of_the_unique_blocks() -> None:
    trace = random_trace(2)
    done: list[int] = []
    points = sweep(trace, "lru", (10, 100), progress=done.append)
    assert [p.capacity_blocks for p in points] == [int(trace.unique_blocks * 0.1), trace.unique_blocks]
    assert points[0].counts == lru_tail(trace, points[0].capacity_blocks)
    assert points[1].counts.evicted == 0
    assert sum(done) == 2 * trace.n_requests


def test_ratios_of_nothing_are_zero() -> None:
    empty = HitCounts()
    assert (empty.block_hit_ratio, empty.token_hit_ratio, empty.any_hit_ratio) == (0, 0, 0)


def test_impossible_capacities_are_refused() -> None:
    trace = random_trace(0, 3)
    for capacities in ((0,), (5, 0)):
        with pytest.raises(BadInputError, match="capacity is 0 blocks"):
            simulate(trace, "lru", *capacities)
    with pytest.raises(BadInputError, match="write_policy is 'around'"):
        simulate(trace, "lru", 5, 5, "around")
    for percent in (0.0, -1.0, 101.0, float("nan")):
        with pytest.raises(BadInputError, match="capacity percent is"):
            work.capacity_blocks(100, percent)
