"""Reads without a lease: what goes, or is written anew, while it is copied is never taken for what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import native
from kvstore.client import Client, NamespaceHandle
from kvstore.client.session import Session
from kvstore.wire import kvstore_pb2 as pb
from tests.client.conftest import Connect
from tests.client.scene import BLOCK_BYTES, blocks_of, tokens_of
from tests.client.stopped import WAIT_S, Stopped, Thread

N = 4

pytestmark = pytest.mark.needs("shared_memory", reason="over a connection one call leases, copies and releases")


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The leases that this process releases."""
    seen: list[int] = []
    release = Session.release

    def counting(session: Session, request: pb.ReleaseRequest) -> None:
        seen.append(request.lease_id)
        release(session, request)

    monkeypatch.setattr(Session, "release", counting)
    return seen


def room() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros((N, BLOCK_BYTES), np.uint8)


def counts(client: Client) -> list[float]:
    stats = client.stats()
    return [float(stats[name]) for name in ("matches", "hit_blocks", "leases")]


def test_only_the_first_read_of_a_region_takes_a_lease(
    ns: NamespaceHandle, connect: Connect, releases: list[int]
) -> None:
    ns.put(tokens_of(N), blocks_of(N))
    with connect() as other:
        theirs = other.open(ns.namespace)
        for _ in range(3):
            out = room()
            assert theirs.get_into(tokens_of(N), out).n_blocks == N
            assert np.array_equal(out, blocks_of(N))
            assert len(releases) == 1
        assert theirs.get_into(tokens_of(N), out[:1], first_block=2).n_blocks == 1
        assert np.array_equal(out[0], blocks_of(N)[2])
        assert theirs.get_into(tokens_of(N, seed=5), out).n_blocks == 0
        assert theirs.get_into(tokens_of(N), out, first_block=N).n_blocks == 0
    assert len(releases) == 1


def test_a_read_without_a_lease_counts_as_an_access(ns: NamespaceHandle, client: Client) -> None:
    ns.put(tokens_of(N), blocks_of(N))
    ns.get_into(tokens_of(N), room())
    before = counts(client)
    ns.get_into(tokens_of(N), room())
    assert [now - then for now, then in zip(counts(client), before, strict=True)] == [1, N, 0]


def test_slots_that_are_filled_anew_during_the_copy_are_no_hit(
    ns: NamespaceHandle,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[[Callable[[], bool], str], None],
) -> None:
    ns.put(tokens_of(N), blocks_of(N))
    out = room()
    ns.get_into(tokens_of(N), out)
    stopped = Stopped(monkeypatch, native, "copy_batch")
    reading = Thread(lambda: ns.get_into(tokens_of(N), out))
    assert stopped.reached.wait(WAIT_S)
    assert client.clear(everything=True).n_blocks == N
    wait_until(lambda: client.stats()["dram_used_bytes"] == 0, "the blocks are gone")
    ns.put(tokens_of(N, seed=1), blocks_of(N, seed=1))  # into the slots that are being copied
    stopped.let_go()
    assert reading.outcome().n_blocks == 0


def test_blocks_that_are_stored_elsewhere_meanwhile_are_read_with_a_lease(
    ns: NamespaceHandle, client: Client, monkeypatch: pytest.MonkeyPatch, releases: list[int]
) -> None:
    ns.put(tokens_of(N), blocks_of(N))
    out = room()
    ns.get_into(tokens_of(N), out)
    n_before = len(releases)
    stopped = Stopped(monkeypatch, native, "copy_batch")
    reading = Thread(lambda: ns.get_into(tokens_of(N), out))
    assert stopped.reached.wait(WAIT_S)
    assert client.clear(everything=True).n_blocks == N
    ns.put(tokens_of(N, seed=1), blocks_of(N, seed=1))
    ns.put(tokens_of(N), blocks_of(N))
    stopped.let_go()
    assert reading.outcome().n_blocks == N
    assert np.array_equal(out, blocks_of(N))
    assert len(releases) == n_before + 1
