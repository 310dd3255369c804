"""Clients of a daemon with an NVMe tier: waiting, not waiting, prefetching, and what is durable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client, NamespaceHandle, Persist, WaitRule
from kvstore.errors import ConfigError
from kvstore.types import KVSpec, Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

BLOCK_BYTES, BLOCK_TOKENS = 16384, 16
N = 8
NAMESPACE = Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))

Start = Callable[..., Any]


def prompt(seed: int, n_blocks: int = N, extra: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, n_blocks * BLOCK_TOKENS + extra, dtype=np.uint32)


def content(seed: int, n_blocks: int = N) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1_000_000).integers(0, 256, (n_blocks, BLOCK_BYTES), dtype=np.uint8)


def connect(daemon: Any) -> Client:
    return Client(daemon.config.socket_path, timeout_s=10.0)


@pytest.fixture
def cold(start_daemon: Start, nvme: dict[str, Any]) -> Callable[..., Any]:
    """``cold(seeds, **settings)``: a daemon that has these prompts on NVMe and nothing in DRAM."""

    def start(seeds: range, **settings: Any) -> Any:
        first = start_daemon(**nvme)
        with connect(first) as client:
            ns = client.open(NAMESPACE)
            for seed in seeds:
                assert ns.put(prompt(seed), content(seed), durable_within_s=20.0).n_durable == N
        first.stop()
        assert first.stopped_in_order
        return start_daemon(**nvme, **settings)

    return start


@pytest.fixture
def ns(cold: Callable[..., Any]) -> Iterator[NamespaceHandle]:
    """A client of a daemon that has prompts 0..3 on NVMe only."""
    with connect(cold(range(4))) as client:
        yield client.open(NAMESPACE)


def stats_of(ns: NamespaceHandle) -> dict[str, Any]:
    return dict(ns._session.call(Method.STATS, pb.StatsRequest(), pb.StatsReply).numbers)


# Reading -----------------------------------------------------------------------------------------


def test_a_restart_finds_everything_again_and_a_lease_waits_for_it(ns: NamespaceHandle) -> None:
    found = ns.match(prompt(1))
    assert (found.n_blocks, found.n_dram_blocks) == (N, 0)
    with ns.lease(prompt(1)) as lease:
        assert (lease.n_blocks, len(lease), lease.n_nvme, lease.n_pending) == (N, N, N, 0)
        for i in range(N):
            np.testing.assert_array_equal(lease[i], content(1)[i])
    assert ns.match(prompt(1)).n_dram_blocks == N
    with ns.lease(prompt(1)) as again:
        assert (len(again), again.n_nvme) == (N, 0)


def test_get_into_copies_what_came_from_nvme(ns: NamespaceHandle) -> None:
    out = np.zeros((N, BLOCK_BYTES), np.uint8)
    got = ns.get_into(prompt(2), out)
    assert (got.n_blocks, got.n_tokens, got.n_pending) == (N, N * BLOCK_TOKENS, 0)
    np.testing.assert_array_equal(out, content(2))
    part = np.zeros((3, BLOCK_BYTES), np.uint8)
    assert ns.get_into(prompt(3), part, first_block=2).n_blocks == 3
    np.testing.assert_array_equal(part, content(3)[2:5])


def test_best_effort_takes_what_is_there_and_starts_the_rest(ns: NamespaceHandle, wait_until: Any) -> None:
    lease = ns.lease(prompt(1), wait="best_effort")
    assert not lease
    assert (lease.n_blocks, lease.n_pending, lease.n_nvme) == (0, N, 0)
    assert lease.eta_s > 0
    assert not lease.reason
    wait_until(lambda: ns.match(prompt(1)).n_dram_blocks == N, "the blocks arrive although nobody waits")
    with ns.lease(prompt(1), wait="best_effort") as there:
        assert len(there) == N
        np.testing.assert_array_equal(there[N - 1], content(1)[N - 1])


def test_best_effort_takes_the_leading_blocks_only(ns: NamespaceHandle) -> None:
    with ns.lease(prompt(1), max_blocks=3) as first:
        assert len(first) == 3
    with ns.lease(prompt(1), wait=0) as lease:
        assert (len(lease), lease.n_blocks, lease.n_tokens, lease.n_pending) == (3, 3, 3 * BLOCK_TOKENS, N - 3)


@pytest.mark.parametrize("wait", ["wait", 20.0, WaitRule(5.0, 1.0)])
def test_every_way_to_wait_gets_the_blocks(ns: NamespaceHandle, wait: Any) -> None:
    with ns.lease(prompt(0), wait=wait) as lease:
        assert (len(lease), lease.n_nvme) == (N, N)


def test_a_prefetch_makes_the_best_effort_lease_hit(ns: NamespaceHandle, wait_until: Any) -> None:
    started = ns.prefetch(prompt(1))
    assert (started.n_blocks, started.n_ready, started.reason) == (N, 0, "")
    assert started.n_pending == N
    assert started.eta_s > 0
    wait_until(lambda: ns.match(prompt(1)).n_dram_blocks == N, "the prefetch ends")
    with ns.lease(prompt(1), wait="best_effort") as lease:
        assert (len(lease), lease.n_nvme) == (N, 0)
        np.testing.assert_array_equal(lease[3], content(1)[3])
    waited = ns.prefetch(prompt(2), wait="wait")
    assert (waited.n_blocks, waited.n_ready, waited.n_pending) == (N, N, 0)
    part = ns.prefetch(prompt(3), max_blocks=3, wait=20.0)
    assert (part.n_blocks, part.n_ready, part.n_pending) == (3, 3, 0)
    assert ns.match(prompt(3)).n_dram_blocks == 3
    nothing = ns.prefetch(prompt(99), wait="wait")
    assert (nothing.n_blocks, nothing.n_ready, nothing.n_pending) == (0, 0, 0)
    assert stats_of(ns)["leases"] == 0


def test_a_lease_whose_connection_is_lost_while_it_waited_is_a_miss_and_given_back(
    ns: NamespaceHandle, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply came, but the right went with the connection before anybody could use it."""
    session = ns._session
    wait_for = session._wait_for

    def lose(*arguments: Any) -> Any:
        reply = wait_for(*arguments)
        assert reply[0].lease_id
        session._disconnected("pulled")
        assert session.wait_healthy(20.0)
        return reply

    monkeypatch.setattr(session, "_wait_for", lose)
    lease = ns.lease(prompt(1))
    assert not lease
    assert "lost" in lease.reason
    monkeypatch.undo()
    held = ("leases", "leases_ended_unacknowledged")
    wait_until(lambda: all(stats_of(ns)[name] == 0 for name in held), "what it held is given back")


def test_many_threads_wait_for_the_same_blocks_and_they_are_read_once(ns: NamespaceHandle) -> None:
    def read(_: int) -> NDArray[np.uint8]:
        out = np.zeros((N, BLOCK_BYTES), np.uint8)
        assert ns.get_into(prompt(1), out).n_blocks == N
        return out

    with ThreadPoolExecutor(8) as threads:
        for out in threads.map(read, range(24)):
            np.testing.assert_array_equal(out, content(1))
    assert stats_of(ns)["onboarded_blocks"] == N
    assert stats_of(ns)["leases"] == 0


# Writing -----------------------------------------------------------------------------------------


def test_a_put_says_what_is_durable(start_daemon: Start, nvme: dict[str, Any]) -> None:
    daemon = start_daemon(**nvme, write_policy="back")
    with connect(daemon) as client:
        ns = client.open(NAMESPACE)
        assert ns.put(prompt(1), content(1)).n_durable == 0
        assert stats_of(ns)["nvme_live_frames"] == 0
        asked = ns.persist(prompt(1))
        assert asked.n_blocks == N
        assert asked.reason in ("", f"{asked.n_pending} blocks are still being written")
        done = ns.persist(prompt(1), 20.0)
        assert (done.n_blocks, done.n_durable, done.n_pending) == (N, N, 0)
        half = ns.put(prompt(2)[: 4 * BLOCK_TOKENS], content(2)[:4], durable_within_s=20.0)
        assert (half.n_stored, half.n_durable) == (4, 4)
        rest = ns.put(prompt(2), content(2)[3:], first_block=3, durable_within_s=20.0)
        assert (rest.n_present, rest.n_stored, rest.n_durable) == (1, N - 4, N - 3)
        assert ns.persist(prompt(50), 20.0).n_blocks == 0
        assert ns.persist(prompt(2), n_blocks=2).n_blocks == 2


def test_durable_blocks_of_a_put_are_counted_from_its_first(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ns = client.open(NAMESPACE)
    asked: list[Any] = []

    def persist(_tokens: Any, wait_s: float, **more: Any) -> Persist:
        asked.append((wait_s, more["n_blocks"]))
        return Persist(n_blocks=N, n_durable=5, n_pending=3)

    monkeypatch.setattr(ns, "persist", persist)
    ns.put(prompt(1)[: 3 * BLOCK_TOKENS], content(1)[:3])
    counted = [
        ns.put(prompt(1), content(1)[a:b], first_block=a, durable_within_s=9.0) for a, b in ((3, 7), (0, 2), (6, 8))
    ]
    assert [result.n_durable for result in counted] == [2, 2, 0]
    assert asked == [(9.0, 7), (9.0, 2), (9.0, 8)]


def test_a_forked_child_waits_on_connections_of_its_own(ns: NamespaceHandle) -> None:
    out = np.zeros((N, BLOCK_BYTES), np.uint8)
    assert ns.get_into(prompt(0), out).n_blocks == N
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fine = ns.get_into(prompt(1), out).n_blocks == N and bool((out == content(1)).all())
            code = 0 if fine else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ns.get_into(prompt(2), out).n_blocks == N
    np.testing.assert_array_equal(out, content(2))
    assert len(ns._session._waiting._idle) == 1


def test_without_an_nvme_tier_nothing_is_durable_and_nothing_waits(client: Client) -> None:
    ns = client.open(NAMESPACE)
    result = ns.put(prompt(1), content(1), durable_within_s=20.0)
    assert (result.n_stored, result.n_durable) == (N, 0)
    done = ns.persist(prompt(1), 20.0)
    assert (done.n_blocks, done.n_durable, done.n_pending) == (N, 0, 0)
    ready = ns.prefetch(prompt(1), wait="wait")
    assert (ready.n_blocks, ready.n_ready, ready.n_pending) == (N, N, 0)
    assert ns.match(prompt(1)).n_dram_blocks == N
    with ns.lease(prompt(1)) as lease:
        assert (lease.n_nvme, lease.n_pending, lease.eta_s) == (0, 0, 0.0)
    assert client._session._waiting._idle == []


def test_what_waits_to_be_written_is_written_when_the_daemon_stops(start_daemon: Start, nvme: dict[str, Any]) -> None:
    first = start_daemon(**nvme, write_behind_bytes=6 << 20)
    with connect(first) as client:
        ns = client.open(NAMESPACE)
        for seed in range(20):
            assert ns.put(prompt(seed), content(seed)).n_stored == N
    first.stop()
    second = start_daemon(**nvme)
    with connect(second) as client:
        ns = client.open(NAMESPACE)
        out = np.zeros((N, BLOCK_BYTES), np.uint8)
        for seed in range(20):
            assert ns.get_into(prompt(seed), out).n_blocks == N
            np.testing.assert_array_equal(out, content(seed))


@pytest.mark.parametrize("policy", ["back", "selective"])
def test_what_only_dram_holds_is_written_when_the_daemon_stops(
    policy: str, start_daemon: Start, nvme: dict[str, Any]
) -> None:
    first = start_daemon(**nvme, write_policy=policy)
    with connect(first) as client:
        ns = client.open(NAMESPACE)
        for seed in range(8):
            assert ns.put(prompt(seed, extra=3), content(seed, N + 1)).n_stored == N + 1
    first.stop()
    assert first.stopped_in_order
    with connect(start_daemon(**nvme)) as client:
        ns = client.open(NAMESPACE)
        for seed in range(8):
            with ns.lease(prompt(seed, extra=3)) as lease:
                assert (lease.n_blocks, lease.partial_tokens) == (N, 3)
                assert np.array_equal(np.array([lease[i] for i in range(N + 1)]), content(seed, N + 1))


def test_a_short_last_block_becomes_durable_too(start_daemon: Start, nvme: dict[str, Any]) -> None:
    with connect(start_daemon(**nvme)) as client:
        ns = client.open(NAMESPACE)
        done = ns.put(prompt(1, extra=3), content(1, N + 1), durable_within_s=20.0)
        assert done.n_durable == N + 1


def test_more_than_dram_holds_comes_back_from_nvme(start_daemon: Start, nvme: dict[str, Any]) -> None:
    """8 MiB of DRAM, 32 MiB of blocks: what was pushed out is still found, byte for byte."""
    daemon = start_daemon(**nvme)
    n_prompts = 32 * (1 << 20) // (N * BLOCK_BYTES)
    with connect(daemon) as client:
        ns = client.open(NAMESPACE)
        for seed in range(n_prompts):
            ns.put(prompt(seed), content(seed), durable_within_s=20.0)
        out = np.zeros((N, BLOCK_BYTES), np.uint8)
        for seed in range(n_prompts):
            assert ns.get_into(prompt(seed), out).n_blocks == N, seed
            np.testing.assert_array_equal(out, content(seed))
        stats = client.stats()
        assert float(stats["dram_used_bytes"]) <= 8 << 20
        assert float(stats["hit_blocks_nvme"]) > 0.7 * n_prompts * N
        assert stats["leases"] == stats["reservations"] == 0


# Settings ----------------------------------------------------------------------------------------


def test_a_directory_that_is_not_ours_is_refused_with_the_way_out(start_daemon: Start, tmp_path: Any) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="home"):
        start_daemon(nvme_dir=tmp_path / "home", nvme_bytes=64 << 20)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "precious"
    assert not (tmp_path / "d.sock").exists()


def test_one_daemon_a_directory(start_daemon: Start, nvme: dict[str, Any], tmp_path: Any) -> None:
    start_daemon(**nvme)
    with pytest.raises(ConfigError):
        start_daemon(**nvme, socket_path=tmp_path / "other.sock")
    assert not (tmp_path / "other.sock").exists()


def test_a_longer_block_is_not_taken_for_a_durable_short_one(start_daemon: Start, nvme: dict[str, Any]) -> None:
    """It holds the same tokens, but a restart finds blocks by key, and its key is another."""
    longer = prompt(1, 2)
    with connect(start_daemon(**nvme)) as client:
        ns = client.open(NAMESPACE)
        ns.put(longer, content(1, 2))
        tail = longer[: BLOCK_TOKENS + 5]
        assert ns.match(tail).n_tokens == BLOCK_TOKENS + 5
        done = ns.persist(tail, 20.0)
        assert (done.n_blocks, done.n_durable) == (1, 1)
