"""Several clients and processes: shared leases, pressure, forks, ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client, NamespaceHandle
from kvstore.client.transport import Transport
from kvstore.clock import ManualClock
from kvstore.errors import BadInputError, EndedError, UnavailableError
from kvstore.types import Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from tests.client.scene import BLOCK_BYTES, blocks_of, spec_of, tokens_of


def test_two_writers_of_the_same_blocks_keep_one(ns: NamespaceHandle, client: Client, connect: Any) -> None:
    tokens, blocks = tokens_of(4), blocks_of(4)
    with connect() as other:
        with ns.reserve(tokens, n_blocks=4) as mine:
            mine.fill(blocks)
            assert other.open(Namespace("model", spec_of())).put(tokens, blocks).n_stored == 4
            assert mine.commit() == (0, 4)
        assert client.stats()["blocks"] == 4
        out = np.zeros_like(blocks)
        assert ns.get_into(tokens, out).n_blocks == 4
        np.testing.assert_array_equal(out, blocks)


@pytest.mark.needs("processes", reason="the store has no clients in other processes")
def test_another_process_reads_what_the_first_wrote(ns: NamespaceHandle, place: Any) -> None:
    tokens, blocks = tokens_of(5), blocks_of(5)
    ns.put(tokens, blocks)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as pool:
        got = pool.apply(_read_elsewhere, (place.target, tokens, BLOCK_BYTES))
    np.testing.assert_array_equal(got, blocks)


def _read_elsewhere(path: str, tokens: NDArray[np.uint32], block_bytes: int) -> NDArray[np.uint8]:
    with Client(path, timeout_s=10.0) as client:
        ns = client.open(Namespace("model", spec_of(block_bytes)))
        with ns.lease(tokens) as lease:
            return np.stack([lease[i] for i in range(len(lease))])


def test_a_lease_is_usable_from_another_connection_of_the_tenant(
    ns: NamespaceHandle, client: Client, connect: Any
) -> None:
    tokens, blocks = tokens_of(3), blocks_of(3)
    ns.put(tokens, blocks)
    stranger = connect(tenant="b")
    with stranger, ns.lease(tokens, first_block=1) as lease, connect() as other:
        with other.attach(lease.id, BLOCK_BYTES) as theirs:
            lease.release()
            assert theirs.first_block == 1
            np.testing.assert_array_equal(theirs[0], blocks[1])
            assert client.stats()["leases"] == 1
        with pytest.raises(EndedError):
            other.attach(lease.id, BLOCK_BYTES)
        with ns.lease(tokens) as mine, pytest.raises(EndedError):
            stranger.attach(mine.id, BLOCK_BYTES)


def test_a_lease_is_read_as_what_it_is_over_or_not_at_all(ns: NamespaceHandle, client: Client, connect: Any) -> None:
    tokens, blocks = tokens_of(2), blocks_of(2)
    ns.put(tokens, blocks)
    same_size = Namespace("another model", spec_of())
    with ns.lease(tokens) as lease, connect() as other:
        wrong: list[dict[str, Any]] = [
            {"namespace": same_size}, {"block_bytes": BLOCK_BYTES // 2}, {"block_bytes": 1 << 40},
        ]  # fmt: skip
        for said in wrong:
            with pytest.raises(BadInputError, match="attach to it through the namespace that it was taken in"):
                other.attach(lease.id, **said)
        with pytest.raises(BadInputError, match="namespace is 'model'"):
            other.attach(lease.id, namespace="model")
        with pytest.raises(BadInputError, match="give block_bytes, or the namespace"):
            other.attach(lease.id, BLOCK_BYTES, namespace=ns.namespace)
        with other.attach(lease.id, namespace=ns.namespace) as theirs:
            np.testing.assert_array_equal(theirs[1], blocks[1])
    assert client.stats()["leases"] == 0


def test_pins_keep_blocks_under_pressure(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(20), blocks_of(20)
    ns.put(tokens, blocks)
    pinned = ns.pin(tokens, ttl_s=600.0)
    assert pinned.n_blocks == 20
    for seed in range(1, 80):
        ns.put(tokens_of(20, seed), blocks_of(20, seed))
    assert ns.match(tokens).n_blocks == 20
    assert ns.unpin(pinned)
    assert not ns.unpin(pinned)
    for seed in range(80, 160):
        ns.put(tokens_of(20, seed), blocks_of(20, seed))
    assert ns.match(tokens).n_blocks == 0


@pytest.mark.needs("shared_memory", reason="about a hold that outlives its right")
def test_an_ended_lease_is_a_miss_for_staged_reads(serve: Any, wait_until: Any) -> None:
    clock = ManualClock(1000.0)
    with serve(clock, lease_s_default=30.0, heartbeat_s=3600.0).connect() as client:
        ns = client.open(Namespace("model", spec_of()))
        ns.put(tokens_of(3), blocks_of(3))
        lease = ns.lease(tokens_of(3))
        out = np.zeros((3, BLOCK_BYTES), np.uint8)
        assert lease.copy_into(out) == 3
        assert lease.renew(40.0)
        clock.advance(35.0)
        assert lease.valid
        clock.advance(10.0)
        wait_until(lambda: not lease.valid, "the daemon tells that the lease has ended")
        assert lease.copy_into(out) == 0
        assert not lease.renew()
        with pytest.raises(EndedError, match="time was up"):
            lease.view(0)
        assert client.stats()["leases_ended_unacknowledged"] == 1
        lease.release()
        assert client.stats()["leases_ended_unacknowledged"] == 0


def test_a_forgotten_lease_gives_its_blocks_back(ns: NamespaceHandle, client: Client, wait_until: Any) -> None:
    ns.put(tokens_of(2), blocks_of(2))
    lease = ns.lease(tokens_of(2))
    assert client.stats()["leases"] == 1
    del lease
    gc.collect()
    wait_until(lambda: client.stats()["leases"] == 0, "the lease is released")


@pytest.mark.needs("fork", reason="a forked child reaches no store that lives in its parent, and has no gRPC")
def test_a_forked_child_has_its_own_session(ns: NamespaceHandle, client: Client) -> None:
    tokens, blocks = tokens_of(3), blocks_of(3)
    ns.put(tokens, blocks)
    lease = ns.lease(tokens)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            out = np.zeros_like(blocks)
            fine = not lease.valid and ns.get_into(tokens, out).n_blocks == 3
            fine = fine and bool((out == blocks).all()) and ns.put(tokens_of(2, 5), blocks_of(2, 5)).n_stored == 2
            code = 0 if fine else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    np.testing.assert_array_equal(lease[0], blocks[0])
    lease.release()
    assert ns.match(tokens_of(2, 5)).n_blocks == 2


def test_no_daemon_is_an_error_once_and_misses_afterwards(tmp_path: Any) -> None:
    path = tmp_path / "nobody.sock"
    with pytest.raises(UnavailableError, match=r"kvstore serve --socket"):
        Client(path)
    with Client(path, required=False) as client:
        ns = client.open(Namespace("m", spec_of()))
        assert ns.match(tokens_of(2)).n_tokens == 0
        assert not ns.lease(tokens_of(2))
        result = ns.put(tokens_of(2), blocks_of(2))
        assert (result.n_stored, result.n_skipped) == (0, 2)
        assert "down" in result.reason
        out = np.zeros((2, BLOCK_BYTES), np.uint8)
        assert ns.get_into(tokens_of(2), out).n_blocks == 0
        with pytest.raises(UnavailableError):
            client.stats()


def test_the_tier_never_holds_more_than_its_room(ns: NamespaceHandle, client: Client) -> None:
    """Case 9 on a DRAM tier: eight times the capacity goes in, the newest survives."""
    for seed in range(100):
        result = ns.put(tokens_of(80, seed), blocks_of(80, seed))
        assert result.n_stored == 80, result
        stats = client.stats()
        assert float(stats["dram_used_bytes"]) <= float(stats["dram_capacity_bytes"])
    assert ns.match(tokens_of(80, 99)).n_blocks == 80
    assert ns.match(tokens_of(80, 0)).n_blocks == 0


@pytest.mark.needs("unix_socket", reason="about that socket's connections")
def test_a_connection_closed_by_another_thread_is_a_broken_one(client: Client) -> None:
    """The background thread may be about to send on it: it must see what it knows how to deal with."""
    transport = Transport(client._session._link.address, 1.0)
    transport.close()
    with pytest.raises(UnavailableError):
        transport.send(Method.HEARTBEAT, pb.HeartbeatRequest(), time.monotonic() + 1.0)
