"""What is different for a client over gRPC: ends of its daemon, its lease, its process; many clients at once."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.clock import ManualClock
from kvstore.config import GrpcOptions
from kvstore.errors import BadInputError, EndedError, UnavailableError
from kvstore.types import KVSpec, Namespace
from kvstore.wire.block_chunks import BlockChunks
from tests.client.scene import BLOCK_BYTES, BLOCK_TOKENS, blocks_of, spec_of, tokens_of

NAMESPACE = Namespace("model", spec_of())
TIMEOUT_S = 10.0
CROWD = int(os.environ.get("KVSTORE_CROWD", "48"))
"""Clients at once, a thread or more each. Many take the processors away from tests that run beside them."""


@pytest.fixture
def listen(tmp_path: Path) -> str:
    return f"unix:{tmp_path / 'grpc.sock'}"


@pytest.fixture
def serve(start_daemon: Callable[..., Any], listen: str) -> Callable[..., Any]:
    """``serve(clock=None, **settings)``: a daemon that serves gRPC."""
    return lambda clock=None, **settings: start_daemon(clock, **{"grpc": GrpcOptions(listen=listen), **settings})


@pytest.fixture
def remote(serve: Callable[..., Any], listen: str) -> Iterator[Client]:
    serve()
    with Client(f"grpc+{listen}", timeout_s=TIMEOUT_S) as client:
        yield client


def test_arrays_outlive_lease_and_client(remote: Client) -> None:
    ns = remote.open(NAMESPACE)
    ns.put(tokens_of(3), blocks_of(3))
    lease = ns.lease(tokens_of(3))
    view = lease[1]
    lease.release()
    with pytest.raises(EndedError, match="released"):
        lease.view(1)
    remote.close()
    gc.collect()
    np.testing.assert_array_equal(view, blocks_of(3)[1])
    assert not view.flags.writeable


def test_only_what_is_looked_at_is_fetched(remote: Client) -> None:
    big = Namespace("big", KVSpec.opaque(BLOCK_TOKENS, 1 << 20))
    ns = remote.open(big)
    blocks = blocks_of(5, block_bytes=1 << 20)
    ns.put(tokens_of(5), blocks)

    def read_bytes() -> float:
        return float(remote.stats().get("grpc_read_bytes", 0))

    with ns.lease(tokens_of(5)) as lease:
        assert read_bytes() == 0
        np.testing.assert_array_equal(lease[4], blocks[4])
        assert read_bytes() == 1 << 20
        np.testing.assert_array_equal(lease[0], blocks[0])
        np.testing.assert_array_equal(lease[4], blocks[4])
        for i in range(5):
            np.testing.assert_array_equal(lease[i], blocks[i])
        assert read_bytes() <= 6 << 20


def test_an_ended_lease_is_a_miss_and_frees_its_blocks_at_once(
    serve: Callable[..., Any], listen: str, wait_until: Callable[..., None]
) -> None:
    clock = ManualClock(1000.0)
    serve(clock, lease_s_default=30.0, heartbeat_s=3600.0)
    with Client(f"grpc+{listen}", timeout_s=TIMEOUT_S) as client:
        ns = client.open(NAMESPACE)
        ns.put(tokens_of(3), blocks_of(3))
        lease, out = ns.lease(tokens_of(3)), np.zeros((3, BLOCK_BYTES), np.uint8)
        assert lease.copy_into(out) == 3
        assert lease.renew(40.0)
        clock.advance(45.0)
        wait_until(lambda: not lease.valid, "the daemon tells that the lease has ended")
        assert lease.copy_into(out) == 0
        with pytest.raises(EndedError, match="time was up"):
            lease.view(0)
        assert client.stats()["leases"] == client.stats()["leases_ended_unacknowledged"] == 0


def test_a_reservation_of_a_client_that_went_away_leaves_nothing(
    remote: Client, listen: str, wait_until: Callable[..., None]
) -> None:
    other = Client(f"grpc+{listen}", timeout_s=TIMEOUT_S)
    reservation = other.open(NAMESPACE).reserve(tokens_of(4), n_blocks=4)
    reservation.fill(blocks_of(4))
    assert remote.stats()["dram_reserved_bytes"] == 4 * BLOCK_BYTES
    other.close()
    wait_until(lambda: remote.stats()["dram_reserved_bytes"] == 0, "its slots are free")
    assert remote.open(NAMESPACE).match(tokens_of(4)).n_tokens == 0
    assert reservation.commit() == (0, 0)


def test_a_forgotten_client_ends_its_session(remote: Client, listen: str, wait_until: Callable[..., None]) -> None:
    other = Client(f"grpc+{listen}", timeout_s=TIMEOUT_S)
    wait_until(lambda: remote.stats()["grpc_sessions"] == 2, "both are there")
    del other
    gc.collect()
    wait_until(lambda: remote.stats()["grpc_sessions"] == 1, "the forgotten one is gone")


def test_blocks_that_do_not_arrive_as_they_were_sent_are_misses(
    remote: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns = remote.open(NAMESPACE)
    ns.put(tokens_of(3), blocks_of(3))
    chunk_of = BlockChunks.chunk_of

    def damaged(*arguments: Any) -> bytes:
        message = bytearray(chunk_of(*arguments))
        message[BLOCK_BYTES + 500] ^= 1
        return bytes(message)

    out = np.zeros((3, BLOCK_BYTES), np.uint8)
    with monkeypatch.context() as patch, ns.lease(tokens_of(3)) as lease:
        patch.setattr(BlockChunks, "chunk_of", damaged)
        assert ns.get_into(tokens_of(3), out).n_blocks == 0
        with pytest.raises(EndedError, match="did not arrive"):
            lease.view(1)
    assert remote.healthy
    assert ns.get_into(tokens_of(3), out).n_blocks == 3
    np.testing.assert_array_equal(out, blocks_of(3))


def test_a_message_that_is_too_long_is_named(serve: Callable[..., Any], listen: str) -> None:
    serve(grpc=GrpcOptions(listen=listen, message_bytes_max=64 << 10))
    with Client(f"grpc+{listen}", timeout_s=TIMEOUT_S) as client:
        ns = client.open(NAMESPACE)
        with pytest.raises(BadInputError, match="65536 at most"):
            ns.match(np.zeros(20_000, np.uint32))
        assert client.healthy
        blocks = blocks_of(40)  # more than one message holds
        assert ns.put(tokens_of(40), blocks).n_stored == 40
        out = np.zeros_like(blocks)
        assert ns.get_into(tokens_of(40), out).n_blocks == 40
        np.testing.assert_array_equal(out, blocks)


# Ends of the daemon --------------------------------------------------------------------------------------


class DaemonProcess:
    """A daemon of its own process that serves gRPC."""

    def __init__(self, folder: Path, listen: str) -> None:
        self.socket = folder / "process.sock"
        self.command = [
            sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(self.socket), "--dram", "64MiB",
            "--no-prefault", "--grpc-listen", listen, "--ready-fd", "1",
        ]  # fmt: skip

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_killed_daemon_makes_misses_and_another_is_found(
    tmp_path: Path, listen: str, wait_until: Callable[..., None]
) -> None:
    daemon = DaemonProcess(tmp_path, listen)
    with daemon, Client(f"grpc+{listen}", timeout_s=TIMEOUT_S) as client:
        ns = client.open(NAMESPACE)
        blocks = blocks_of(4)
        ns.put(tokens_of(4), blocks)
        lease = ns.lease(tokens_of(4))
        reservation = ns.reserve(tokens_of(4, seed=5), n_blocks=4)
        view = lease[0]
        daemon.process.kill()
        daemon.process.wait(20)
        wait_until(lambda: not client.healthy, "the client has noticed")
        out = np.zeros_like(blocks)
        assert lease.copy_into(out) == 0
        assert ns.get_into(tokens_of(4), out).n_blocks == 0
        assert ns.put(tokens_of(4), blocks).n_skipped == 4
        assert reservation.commit() == (0, 0)
        np.testing.assert_array_equal(view, blocks[0])
        with DaemonProcess(tmp_path, listen):
            assert client.wait_healthy(20)
            assert not lease.valid
            assert ns.match(tokens_of(4)).n_blocks == 0
            assert ns.put(tokens_of(4), blocks).n_stored == 4
            assert ns.get_into(tokens_of(4), out).n_blocks == 4
            np.testing.assert_array_equal(out, blocks)


@pytest.mark.parametrize("writing", [False, True])
def test_a_daemon_killed_in_the_middle_of_a_stream_is_a_miss(tmp_path: Path, listen: str, writing: bool) -> None:
    daemon = DaemonProcess(tmp_path, listen)
    with daemon, Client(f"grpc+{listen}", timeout_s=TIMEOUT_S) as client:
        ns = client.open(Namespace("big", KVSpec.opaque(BLOCK_TOKENS, 1 << 20)))
        blocks = blocks_of(40, block_bytes=1 << 20)
        out = np.zeros_like(blocks)
        outcomes: list[int] = []
        killed = threading.Event()

        def work() -> None:
            seed = 0
            while not killed.is_set() or not outcomes or outcomes[-1] == 40:
                seed += 1
                tokens = tokens_of(40, seed % 2)
                if writing:
                    tokens = tokens_of(40, seed)
                    outcomes.append(ns.put(tokens, blocks).n_stored)
                else:
                    ns.put(tokens, blocks)
                    outcomes.append(ns.get_into(tokens, out).n_blocks)

        thread = threading.Thread(target=work)
        thread.start()
        deadline_s = time.monotonic() + 30
        while len(outcomes) < 3 and time.monotonic() < deadline_s:
            killed.wait(0.01)
        daemon.process.send_signal(signal.SIGKILL)
        killed.set()
        thread.join(30)
        assert not thread.is_alive()
        assert set(outcomes) <= {0, 40}
        assert outcomes[-1] == 0


def test_a_daemon_that_hangs_costs_one_deadline(tmp_path: Path, listen: str, wait_until: Callable[..., None]) -> None:
    daemon = DaemonProcess(tmp_path, listen)
    with daemon, Client(f"grpc+{listen}", timeout_s=0.5) as client:
        ns = client.open(NAMESPACE)
        ns.put(tokens_of(2), blocks_of(2))
        daemon.process.send_signal(signal.SIGSTOP)
        assert ns.match(tokens_of(2)).n_blocks == 0
        assert not client.healthy
        reasons = {ns.match(tokens_of(2)).reason for _ in range(50)}
        assert len(reasons) == 1
        assert "down or does not answer" in reasons.pop()
        daemon.process.send_signal(signal.SIGCONT)
        assert client.wait_healthy(20)
        wait_until(lambda: ns.match(tokens_of(2)).n_blocks == 2, "it answers again")
        with Client(daemon.socket, timeout_s=TIMEOUT_S) as local:
            wait_until(lambda: local.stats()["leases"] == 0, "nothing is held for calls that nobody waited for")


def test_no_daemon_is_an_error_once_and_misses_afterwards(
    serve: Callable[..., Any], listen: str, wait_until: Callable[..., None]
) -> None:
    with pytest.raises(UnavailableError, match=f"--grpc-listen {listen}"):
        Client(f"grpc+{listen}", timeout_s=2.0)
    with Client(f"grpc+{listen}", timeout_s=2.0, required=False) as client:
        ns = client.open(NAMESPACE)
        assert ns.match(tokens_of(2)).n_tokens == 0
        assert ns.put(tokens_of(2), blocks_of(2)).n_skipped == 2
        serve()
        assert client.wait_healthy(20)
        assert ns.put(tokens_of(2), blocks_of(2)).n_stored == 2


def test_a_forked_child_gets_misses_and_does_not_hang(remote: Client) -> None:
    ns = remote.open(NAMESPACE)
    ns.put(tokens_of(2), blocks_of(2))
    with ns.lease(tokens_of(2)) as lease:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                out = np.zeros((2, BLOCK_BYTES), np.uint8)
                got = ns.get_into(tokens_of(2), out)
                fine = not lease.valid and got.n_blocks == 0 and not remote.healthy
                del lease
                gc.collect()
                code = 0 if fine else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        np.testing.assert_array_equal(lease[1], blocks_of(2)[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_clients_at_once_lose_no_call(serve: Callable[..., Any], listen: str) -> None:
    daemon = serve(dram_bytes=64 << 20)
    n_clients, n_rounds, failures = CROWD, 5, []
    together = threading.Barrier(n_clients)

    def work(number: int) -> None:
        try:
            with Client(f"grpc+{listen}", timeout_s=200.0) as client:
                ns = client.open(NAMESPACE)
                together.wait(200)
                for turn in range(n_rounds):
                    tokens, blocks = tokens_of(2, number * 100 + turn), blocks_of(2, number)
                    out = np.zeros_like(blocks)
                    assert ns.put(tokens, blocks).n_stored == 2
                    assert ns.match(tokens).n_blocks == 2
                    assert ns.get_into(tokens, out).n_blocks == 2
                    np.testing.assert_array_equal(out, blocks)
                together.wait(200)
        except BaseException as error:
            together.abort()
            failures.append((number, repr(error)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(500)
    assert failures == []
    stats, _ = daemon.call(lambda daemon: daemon.store.stats())
    assert stats["committed_blocks"] == n_clients * n_rounds * 2
    assert "grpc_refused_calls" not in stats
