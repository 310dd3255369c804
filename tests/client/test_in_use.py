"""A right that is let go of on one thread while another copies: the daemon hears of it when the copy has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import native
from kvstore.client import Client
from kvstore.errors import EndedError
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace, Shard
from tests.client.conftest import Connect
from tests.client.stopped import WAIT_S, Stopped, Thread

BLOCK_TOKENS, BLOCK_BYTES, N = 16, 8192, 4
NAMESPACE = Namespace("model", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
HYBRID = Namespace(
    "hybrid",
    KVSpec(
        BLOCK_TOKENS,
        (
            KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=BLOCK_BYTES),
            KVGroup(layers=1, kv_heads=2, head_dim=16),
            KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=BLOCK_BYTES, kind=GroupKind.STATE),
        ),
    ),
)
FULL, ALSO_FULL, STATE = range(3)
WaitUntil = Callable[[Callable[[], bool], str], None]


def prompt(seed: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 50_000, N * BLOCK_TOKENS, dtype=np.uint32)


def content(value: int, n: int = N) -> NDArray[np.uint8]:
    return np.full((n, BLOCK_BYTES), value, np.uint8)


def gauge(client: Client, name: str) -> float:
    value = client.stats()[name]
    assert isinstance(value, float | int)
    return value


def settled(client: Client, wait_until: WaitUntil) -> None:
    """The daemon has heard what this client had told it."""
    cache = client.open(NAMESPACE)
    before = gauge(client, "dram_reserved_bytes")
    later = cache.reserve(prompt(77), n_blocks=N)
    assert gauge(client, "dram_reserved_bytes") > before
    later.abort()
    wait_until(lambda: gauge(client, "dram_reserved_bytes") <= before, "it hears of a later abort")


def test_an_abort_is_told_when_the_fill_has_ended(
    client: Client, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    slots = client.open(NAMESPACE).reserve(prompt(), n_blocks=N)
    stopped = Stopped(monkeypatch, native, "copy_batch")
    filling = Thread(lambda: slots.fill(content(0xEE)))
    assert stopped.reached.wait(WAIT_S)
    slots.abort()
    with pytest.raises(EndedError, match="aborted"):
        slots.view(0)
    settled(client, wait_until)
    assert gauge(client, "dram_reserved_bytes") > 0
    stopped.let_go()
    assert filling.outcome() is None
    wait_until(lambda: gauge(client, "dram_reserved_bytes") == 0, "the abort is told")


def test_a_commit_waits_for_the_fill(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = client.open(NAMESPACE)
    slots = cache.reserve(prompt(), n_blocks=N)
    stopped = Stopped(monkeypatch, native, "copy_batch")
    filling = Thread(lambda: slots.fill(content(5)))
    assert stopped.reached.wait(WAIT_S)
    committing = Thread(slots.commit)
    assert cache.match(prompt()).n_blocks == 0
    stopped.let_go()
    assert filling.outcome() is None
    assert committing.outcome() == (N, 0)
    out = content(0)
    assert cache.get_into(prompt(), out).n_blocks == N
    assert (out == 5).all()
    with pytest.raises(EndedError, match="committed"):
        slots.fill(content(6))


def lease_of_blocks(client: Client) -> tuple[Any, Any]:
    cache = client.open(NAMESPACE)
    assert cache.put(prompt(), content(9)).n_stored == N
    lease = cache.lease(prompt())
    return lease, lease


def lease_of_a_group(client: Client) -> tuple[Any, Any]:
    hybrid = client.open_hybrid(HYBRID)
    also = np.full((N, place_bytes(ALSO_FULL)), 3, np.uint8)
    assert hybrid.put(prompt(), {FULL: content(9), ALSO_FULL: also, STATE: (N - 1, content(9, 1))}).n_skipped == 0
    lease = hybrid.lease(prompt())
    return lease, lease.group(FULL)


def lease_of_a_shard(client: Client) -> tuple[Any, Any]:
    spaces = [Namespace("family", NAMESPACE.spec, shard=Shard(rank, 2)) for rank in range(2)]
    family = client.open_family(spaces)
    for shard in family.shards:
        assert shard.put(prompt(), content(9)).n_stored == N
    lease = family.lease(prompt())
    return lease, lease.shard(1)


def place_bytes(group: int) -> int:
    from kvstore.hybrid import place_of

    return place_of(HYBRID.spec, group)[2]


@pytest.mark.parametrize("taken", [lease_of_blocks, lease_of_a_group, lease_of_a_shard])
def test_a_release_is_told_when_the_copy_has_ended(
    client: Client, taken: Callable[[Client], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    lease, source = taken(client)
    assert (source[0] == 9).all()  # a remote client has fetched them now
    out = content(0)
    stopped = Stopped(monkeypatch, native, "copy_batch")
    copying = Thread(lambda: source.copy_into(out))
    assert stopped.reached.wait(WAIT_S)
    lease.release()
    assert not lease.valid
    settled(client, wait_until)
    assert gauge(client, "leases") == 1
    stopped.let_go()
    assert copying.outcome() == 0
    assert (out == 9).all()
    wait_until(lambda: gauge(client, "leases") == 0, "the release is told")


@pytest.mark.parametrize("taken", [lease_of_blocks, lease_of_a_group, lease_of_a_shard])
def test_the_end_of_the_client_leaves_a_copy_its_memory(
    connect: Connect, taken: Callable[[Client], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end this process with SIGSEGV."""
    client = connect()
    lease, source = taken(client)
    assert (source[0] == 9).all()
    out = content(0)
    stopped = Stopped(monkeypatch, native, "copy_batch")
    copying = Thread(lambda: source.copy_into(out))
    assert stopped.reached.wait(WAIT_S)
    closing = Thread(client.close)  # of an asyncio client, which waits for the copy
    if isinstance(client, Client):
        assert closing.outcome() is None
    stopped.let_go()
    assert copying.outcome() in (0, N)
    assert (out == 9).all()
    closing.outcome()
    assert not lease.valid


def test_the_end_of_the_client_leaves_a_fill_its_memory(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect()
    slots = client.open(NAMESPACE).reserve(prompt(), n_blocks=N)
    stopped = Stopped(monkeypatch, native, "copy_batch")
    filling = Thread(lambda: slots.fill(content(5)))
    assert stopped.reached.wait(WAIT_S)
    closing = Thread(client.close)
    if isinstance(client, Client):
        assert closing.outcome() is None
    stopped.let_go()
    assert filling.outcome() is None
    closing.outcome()
    assert slots.commit() == (0, 0)
