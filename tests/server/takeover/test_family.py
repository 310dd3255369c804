"""Shard families over a daemon that is killed: the lease ends in every shard, the blocks and what is held stay."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.errors import EndedError
from kvstore.types import KVSpec, Namespace, Shard
from tests.server.warm import Warm

SPACES = [Namespace("tp", KVSpec.opaque(16, size), shard=Shard(i, 2)) for i, size in enumerate((8192, 4096))]
TOKENS = np.arange(16 * 6)


def blocks(rank: int) -> NDArray[np.uint8]:
    return np.random.default_rng(rank).integers(0, 256, (6, SPACES[rank].spec.block_bytes), np.uint8)


def test_a_lease_over_a_family_ends_with_its_daemon_and_the_blocks_are_found_by_the_next(
    warm: Warm, client: Client, wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    family = client.open_family(SPACES)
    family.shards[0].put(TOKENS, blocks(0))
    family.shards[1].put(TOKENS[:64], blocks(1)[:4])
    lease = family.lease(TOKENS)
    assert lease.n_blocks == 4
    parts = [lease.shard(rank) for rank in range(2)]
    kept = [part[3] for part in parts]
    warm.kill()
    warm.start()
    wait_until(lambda: not lease.valid, "the lease has ended with the daemon that gave it")
    assert [part.valid for part in parts] == [False, False]
    with pytest.raises(EndedError):
        lease.shard(0)
    assert client.wait_healthy(20.0)
    for rank in range(2):
        np.testing.assert_array_equal(kept[rank], blocks(rank)[3])
    with family.lease(TOKENS) as again:
        assert again.n_blocks == 4
        for rank in range(2):
            np.testing.assert_array_equal(again.shard(rank)[3], blocks(rank)[3])
    assert family.shards[1].put(TOKENS, blocks(1)).n_stored == 2
    assert family.match(TOKENS).n_blocks == 6
    lease.release()
    kept.clear()
    parts.clear()
    gc.collect()
    assert client.stats()["leases"] == 0
