"""A hybrid namespace in DRAM that outlives the daemon: every part of a block is found again as what it is."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace
from tests.server.warm import Warm

SPEC = KVSpec(
    4,
    (
        KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=5000),
        KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=3000, kind=GroupKind.SLIDING, window_tokens=8),
        KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=9000, kind=GroupKind.STATE),
    ),
)
NAMESPACE = Namespace("warm-hybrid", SPEC)
FULL, SLIDING, STATE = range(3)
N = 6


def prompt(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1000, N * 4, dtype=np.uint32)


def content(seed: int) -> dict[int, NDArray[np.uint8]]:
    rng = np.random.default_rng((seed, 1))
    return {
        group: rng.integers(0, 256, (N, SPEC.groups[group].page_bytes or 0), np.uint8)
        for group in (FULL, SLIDING, STATE)
    }


@pytest.mark.parametrize("n_restarts", [1, 2])
def test_every_group_is_found_again_in_the_same_memory(warm: Warm, client: Client, n_restarts: int) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    cache = client.open_hybrid(NAMESPACE)
    for seed in range(20):
        blocks = content(seed)
        done = cache.put(
            prompt(seed), {FULL: blocks[FULL], SLIDING: (3, blocks[SLIDING][3:]), STATE: (5, blocks[STATE][5:])}
        )
        assert done.n_skipped == 0
    for _ in range(n_restarts):
        warm.kill()
        warm.start()
        assert client.wait_healthy(20.0)
    assert client.stats()["taken_over_blocks"] == 20 * (6 + 3 + 1)
    for seed in range(20):
        blocks = content(seed)
        assert cache.match(prompt(seed)).by_group == (6, 6, 6)
        assert cache.match(prompt(seed)[:20]).by_group == (5, 5, 0)
        with cache.lease(prompt(seed)) as lease:
            assert lease.n_blocks == 6
            assert (lease.group(FULL)[5] == blocks[FULL][5]).all()
            assert [lease.group(SLIDING)[i].tobytes() for i in range(2)] == [b.tobytes() for b in blocks[SLIDING][4:]]
            assert (lease.group(STATE)[0] == blocks[STATE][5]).all()
    assert client.stats()["block_parts"] == 20 * 4
    done = cache.put(prompt(0), {STATE: (4, content(0)[STATE][4:])})
    assert (done.by_group[STATE].n_stored, done.by_group[STATE].n_duplicate) == (1, 1)
