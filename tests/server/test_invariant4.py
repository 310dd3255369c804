"""Invariant 4: the right ends by the clock, the hold on memory only when nobody could touch it any more."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client, NamespaceHandle
from kvstore.errors import EndedError
from kvstore.types import KVSpec, Namespace
from tests.server.children import child

BLOCK_BYTES = 16384
BLOCK_TOKENS = 16
TTL_S = 0.3


def prompt(seed: int, n_blocks: int = 4) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, n_blocks * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int, n_blocks: int = 4) -> NDArray[np.uint8]:
    return np.random.default_rng(~seed & 0xFFFF).integers(0, 256, (n_blocks, BLOCK_BYTES), dtype=np.uint8)


def open_ns(client: Client) -> NamespaceHandle:
    return client.open(Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES)))


def fill(ns: NamespaceHandle, first_seed: int, n_prompts: int) -> None:
    """Push new blocks through the tier; every one that is stored must read back."""
    for seed in range(first_seed, first_seed + n_prompts):
        ns.put(prompt(seed), content(seed))
        out = np.zeros((4, BLOCK_BYTES), np.uint8)
        n = ns.get_into(prompt(seed), out).n_blocks
        np.testing.assert_array_equal(out[:n], content(seed)[:n])


def stopped_reader(path: str, pipe: Connection) -> None:
    with Client(path, timeout_s=10.0) as client:
        lease = open_ns(client).lease(prompt(1), ttl_s=TTL_S)
        views = [lease[i] for i in range(4)]
        pipe.send(len(lease))
        pipe.recv()
        seen = np.stack(views)
        out = np.zeros((4, BLOCK_BYTES), np.uint8)
        pipe.send((seen, lease.valid, lease.copy_into(out)))
        pipe.recv()
        del views
        lease.release()
        pipe.send("released")
        pipe.recv()


def test_a_stopped_readers_slots_are_not_reused(client: Client, wait_until: Any) -> None:
    ns = open_ns(client)
    ns.put(prompt(1), content(1))
    with child(stopped_reader, str(client._session._link.address)) as (process, pipe):
        assert pipe.recv() == 4
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: client.stats()["leases_ended_unacknowledged"] == 1, "the lease's right ends")
        assert client.stats()["leases"] == 0
        fill(ns, 100, 300)
        assert client.stats()["leases_ended_unacknowledged"] == 1
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("go")
        seen, valid, copied = pipe.recv()
        np.testing.assert_array_equal(seen, content(1))
        assert not valid
        assert copied == 0
        pipe.send("release")
        assert pipe.recv() == "released"
        wait_until(lambda: client.stats()["leases_ended_unacknowledged"] == 0, "the end is acknowledged")
        fill(ns, 1000, 300)
        assert ns.match(prompt(1)).n_blocks == 0
        pipe.send("end")


def stopped_writer(path: str, pipe: Connection) -> None:
    with Client(path, timeout_s=10.0) as client:
        ns = open_ns(client)
        late = ns.reserve(prompt(2), n_blocks=4, ttl_s=TTL_S)
        views = [late[i] for i in range(4)]
        views[0][:] = 7
        pipe.send(len(late))
        pipe.recv()
        # The reservation is over, but this process does not care and writes on, also after it stored more.
        stored = [ns.put(prompt(seed), content(seed)).n_stored for seed in range(50, 60)]
        for view in views:
            view[:] = 0xEE
        wrong = found = 0
        for seed in range(50, 60):
            out = np.zeros((4, BLOCK_BYTES), np.uint8)
            n = ns.get_into(prompt(seed), out).n_blocks
            found += n
            wrong += not np.array_equal(out[:n], content(seed)[:n])
        try:
            late.view(0)
            ended = False
        except EndedError:
            ended = True
        pipe.send((stored, found, wrong, ended, late.commit()))
        pipe.recv()


def test_a_stopped_writers_slots_are_not_reused_and_its_commit_is_refused(client: Client, wait_until: Any) -> None:
    ns = open_ns(client)
    with child(stopped_writer, str(client._session._link.address)) as (process, pipe):
        assert pipe.recv() == 4
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: client.stats()["dram_quarantined_bytes"] == 4 * BLOCK_BYTES, "quarantine")
        fill(ns, 300, 300)
        assert client.stats()["dram_quarantined_bytes"] == 4 * BLOCK_BYTES
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("go")
        stored, found, wrong, ended, committed = pipe.recv()
        assert stored == [4] * 10
        assert found >= 8
        assert wrong == 0
        assert ended
        assert committed == (0, 0)
        assert ns.match(prompt(2)).n_blocks == 0
        wait_until(lambda: client.stats()["dram_quarantined_bytes"] == 0, "the refused commit acknowledges")
        pipe.send("end")


def test_a_killed_process_gives_everything_back_at_once(client: Client, wait_until: Any) -> None:
    """Case 11: killed while it writes and while it reads."""
    ns = open_ns(client)
    ns.put(prompt(1), content(1))
    path = str(client._session._link.address)
    with child(stopped_reader, path) as (reader, reads), child(stopped_writer, path) as (writer, writes):
        assert (reads.recv(), writes.recv()) == (4, 4)
        os.kill(reader.pid, signal.SIGKILL)
        os.kill(writer.pid, signal.SIGKILL)
    wait_until(lambda: client.stats()["sessions"] == 1, "both processes are seen to be gone")
    stats = client.stats()
    assert stats["leases"] == stats["leases_ended_unacknowledged"] == 0
    assert stats["reservations"] == stats["reservations_ended_unacknowledged"] == 0
    assert stats["dram_quarantined_bytes"] == stats["dram_reserved_bytes"] == 0
    assert ns.match(prompt(2)).n_blocks == 0
    fill(ns, 100, 200)


def silent(path: str, pipe: Connection) -> None:
    with Client(path, timeout_s=10.0) as client:
        ns = open_ns(client)
        lease = ns.lease(prompt(1), ttl_s=100.0)
        pipe.send(len(lease))
        pipe.recv()
        client.wait_healthy(10.0)
        # Stopped for longer than its heartbeats allowed: the old lease is gone, new ones are there.
        for _ in range(1000):
            with ns.lease(prompt(1)) as again:
                if again:
                    break
            client.wait_healthy(0.01)
        pipe.send((lease.valid, len(again), bool(client._session.session_id)))
        pipe.recv()
        lease.release()
        pipe.send("released")
        pipe.recv()


def test_a_client_without_heartbeat_loses_its_rights_and_may_come_back(start_daemon: Any, wait_until: Any) -> None:
    daemon = start_daemon(heartbeat_s=0.1)
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        ns = open_ns(client)
        ns.put(prompt(1), content(1))
        with child(silent, str(daemon.config.socket_path)) as (process, pipe):
            assert pipe.recv() == 4
            os.kill(process.pid, signal.SIGSTOP)
            wait_until(lambda: client.stats()["leases_ended_unacknowledged"] == 1, "the silent one is cut off")
            os.kill(process.pid, signal.SIGCONT)
            pipe.send("go")
            valid, n_again, _ = pipe.recv()
            assert not valid
            assert n_again == 4
            assert client.stats()["leases_ended_unacknowledged"] == 1
            pipe.send("release")
            assert pipe.recv() == "released"
            wait_until(lambda: client.stats()["leases_ended_unacknowledged"] == 0, "its old hold is given up")
            pipe.send("end")


def test_ten_thousand_lookups_pin_nothing(client: Client) -> None:
    """Case 7."""
    ns = open_ns(client)
    ns.put(prompt(1), content(1))
    for _ in range(10_000):
        ns.match(prompt(1))
    stats = client.stats()
    assert stats["leases"] == stats["pins"] == 0
    fill(ns, 100, 200)
    assert ns.match(prompt(1)).n_blocks == 0


def test_an_array_keeps_its_block_also_after_the_release(client: Client, wait_until: Any) -> None:
    """Whoever still has a view reads what was stored; the block goes when the last view has gone."""
    path = client._session._link.address
    ns = open_ns(client)
    ns.put(prompt(1), content(1))
    with Client(path, timeout_s=5.0) as reader:
        kept = open_ns(reader).lease(prompt(1))[0]  # the lease itself is forgotten at once
        with open_ns(reader).lease(prompt(1)) as lease:
            also_kept = lease[1]
        client.close()
        with Client(path, timeout_s=5.0) as writer:
            own = open_ns(writer)
            fill(own, 100, 300)
            assert writer.stats()["leases"] == 2
            np.testing.assert_array_equal(kept, content(1)[0])
            np.testing.assert_array_equal(also_kept, content(1)[1])
            del kept, also_kept
            wait_until(lambda: writer.stats()["leases"] == 0, "the blocks are let go of")
            fill(own, 1000, 300)
            assert own.match(prompt(1)).n_blocks == 0
            wait_until(lambda: writer.stats()["dram_retired_mapped_bytes"] == 0, "the reader unmaps what is retired")


def test_an_array_that_outlives_its_client_costs_only_its_own_region(client: Client) -> None:
    path = client._session._link.address
    ns = open_ns(client)
    for seed in range(1, 60):
        ns.put(prompt(seed), content(seed))
    with Client(path, timeout_s=5.0) as reader:
        handle = open_ns(reader)
        for seed in range(1, 60):
            handle.get_into(prompt(seed), np.zeros((4, BLOCK_BYTES), np.uint8))
        kept = handle.lease(prompt(1))[0]
    stats = client.stats()
    assert float(stats["leases"]) + float(stats["leases_ended_unacknowledged"]) == 1
    assert stats["sessions_lingering"] == 1
    fill(ns, 100, 300)
    np.testing.assert_array_equal(kept, content(1)[0])


@pytest.mark.parametrize("n_writers", [3])
def test_writers_that_come_and_go_share_a_full_tier(client: Client, n_writers: int) -> None:
    """Each new writer finds room although the tier is full of what earlier, gone writers left."""
    path = client._session._link.address
    for turn in range(n_writers):
        with Client(path, timeout_s=5.0) as writer:
            ns = open_ns(writer)
            for seed in range(1000 * turn, 1000 * turn + 200):
                result = ns.put(prompt(seed), content(seed))
                assert result.n_stored == 4, (turn, seed, result)
    stats = client.stats()
    assert float(stats["dram_used_bytes"]) >= 0.9 * float(stats["dram_capacity_bytes"])
