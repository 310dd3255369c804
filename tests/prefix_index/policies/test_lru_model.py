"""LRU in the index against an independent model."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16
TRACES = Path(__file__).parents[3].parent / "shared" / "traces"


def model_hits(requests: list[list[int]], capacity: int) -> int:
    """LRU over single ids, each request used from its tail to its head: the tail is always older."""
    recent: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in requests:
        run = 0
        while run < len(ids) and ids[run] in recent:
            run += 1
        hits += run
        for block in reversed(ids):
            recent[block] = None
            recent.move_to_end(block)
        while len(recent) > capacity:
            recent.popitem(last=False)
    return hits


def index_hits(requests: list[list[int]], capacity: int) -> int:
    index = PrefixIndex(make_policy("lru"))
    hits = 0
    for ids in requests:
        path = RowPath.from_hashes(np.array(ids, "<u8").view(np.uint8).reshape(-1, 8), 8)
        found = index.match(ROOT, path).ids
        hits += len(found)
        index.touch(found, Use())
        index.pin(found)
        short = path.n_rows - len(found) - (capacity - index.n_blocks)
        if short > 0:
            index.evict(short)
        room = min(path.n_rows - len(found), capacity - index.n_blocks)
        index.insert(ROOT, path, len(found), np.zeros(room, np.int64), 1, Use())
        index.unpin(found)
        assert index.n_blocks <= capacity
    index.check()
    return hits


@pytest.mark.parametrize("name", ["conversation_trace.jsonl", "synthetic_trace.jsonl"])
@pytest.mark.parametrize("percent", [1, 5, 25])
def test_lru_follows_the_model_on_a_real_trace(name: str, percent: int) -> None:
    file = TRACES / name
    if not file.exists():
        pytest.skip(f"needs the shared trace {name}")
    with file.open() as lines:
        requests = [json.loads(line)["hash_ids"] for line, _ in zip(lines, range(1500), strict=False)]
    n_accesses = sum(map(len, requests))
    capacity = len({block for ids in requests for block in ids}) * percent // 100
    assert abs(index_hits(requests, capacity) - model_hits(requests, capacity)) <= 0.0005 * n_accesses


@given(seed=st.integers(0, 1 << 30), capacity=st.integers(8, 60))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_lru_equals_the_model_on_small_traces(seed: int, capacity: int) -> None:
    dice = random.Random(seed)
    names: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(60):
        tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 9))]
        requests.append([names.setdefault(tuple(tokens[: i + 1]), len(names)) for i in range(len(tokens))])
    assert index_hits(requests, capacity) == model_hits(requests, capacity)
