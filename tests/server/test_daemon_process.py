"""A daemon as a process: started, stopped, killed, hanging, restarted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.cli.daemon_process import READY, own_daemon
from kvstore.client import Client
from kvstore.types import KVSpec, Namespace
from tests.shared_memory import shared_memory_files

NAMESPACE = Namespace("m", KVSpec.opaque(16, 4096))
TOKENS = np.arange(64, dtype=np.uint32)
BLOCKS = np.random.default_rng(0).integers(0, 256, (4, 4096), dtype=np.uint8)


class Process:
    """``kvstore serve`` on a socket; ``start`` returns when clients are accepted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ready, child = os.pipe()
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(self.path), "--dram", "8MiB",
                   "--no-prefault", "--ready-fd", str(child)]  # fmt: skip
        self.process = subprocess.Popen(command, pass_fds=(child,), stderr=subprocess.DEVNULL)
        os.close(child)
        with os.fdopen(ready, "rb") as pipe:
            assert pipe.read(len(READY)) == READY

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(20)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    daemon = Process(tmp_path / "d.sock")
    daemon.start()
    yield daemon
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.signal(signal.SIGCONT)
        daemon.kill()


def run_serve(path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(path), "--no-prefault", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_sigterm_ends_it_cleanly(process: Process) -> None:
    process.signal(signal.SIGTERM)
    assert process.process is not None
    assert process.process.wait(20) == 0
    assert not process.path.exists()


def test_a_second_daemon_on_the_socket_is_refused_with_the_way_out(process: Process) -> None:
    done = run_serve(process.path)
    assert done.returncode == 1
    assert process.process is not None
    assert str(process.process.pid) in done.stderr
    assert "--socket" in done.stderr
    assert "Traceback" not in done.stderr
    with Client(process.path, timeout_s=5.0) as client:
        assert client.stats()["sessions"] == 1


def test_what_another_process_uses_is_no_mistake_of_the_settings(tmp_path: Path) -> None:
    """Exit code 1: with 2, systemd would not try again (docs/OPERATIONS.md)."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_serve(tmp_path / "d.sock", "--dram", "8MiB", "--metrics-listen", place)
        assert (done.returncode, "Address already in use" in done.stderr) == (1, True), done.stderr
    nvme = ["--dram", "8MiB", "--nvme-dir", str(tmp_path / "nvme"), "--nvme", "64MiB"]
    with own_daemon(nvme, tmp_path / "first.sock"):
        done = run_serve(tmp_path / "d.sock", *nvme)
        assert (done.returncode, "in use by another process" in done.stderr) == (1, True), done.stderr
    assert run_serve(tmp_path / "d.sock", "--metrics-listen", "nonsense").returncode == 2


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    done = run_serve(path)
    assert done.returncode == 2
    assert "not a socket" in done.stderr
    assert path.read_text() == "data"


def test_killed_with_a_lease_held_it_starts_again(tmp_path: Path) -> None:
    """Stale socket files, nothing left behind; twenty times in a row: ``tests/cases/test_case_08``."""
    shm = shared_memory_files()
    daemon = Process(tmp_path / "d.sock")
    for _ in range(4):
        daemon.start()
        with Client(daemon.path, timeout_s=10.0) as client:
            ns = client.open(NAMESPACE)
            assert ns.put(TOKENS, BLOCKS).n_stored == 4
            with ns.lease(TOKENS):
                daemon.kill()
    assert shared_memory_files() <= shm
    assert {path.name for path in tmp_path.iterdir()} <= {"d.sock", "d.sock.lock"}


def test_clients_carry_on_after_a_restart(process: Process) -> None:
    with Client(process.path, timeout_s=5.0) as client:
        ns = client.open(NAMESPACE)
        ns.put(TOKENS, BLOCKS)
        lease = ns.lease(TOKENS)
        view = lease[0]
        process.kill()
        assert ns.match(TOKENS).n_blocks == 0
        assert not lease.valid
        np.testing.assert_array_equal(view, BLOCKS[0])
        process.start()
        assert client.wait_healthy(20.0)
        assert ns.match(TOKENS).n_blocks == 0
        assert ns.put(TOKENS, BLOCKS).n_stored == 4
        out = np.zeros_like(BLOCKS)
        assert ns.get_into(TOKENS, out).n_blocks == 4
        np.testing.assert_array_equal(out, BLOCKS)
        lease.release()
        assert client.stats()["leases"] == 0


def test_a_restarted_daemon_cant_take_one_namespace_for_another(process: Process) -> None:
    """Whatever order clients come back in, each finds its own model's blocks and nobody else's."""
    other = Namespace("another model", NAMESPACE.spec)
    with Client(process.path, timeout_s=5.0) as first, Client(process.path, timeout_s=5.0) as second:
        mine, theirs = first.open(NAMESPACE), second.open(other)
        process.kill()
        process.start()
        assert second.wait_healthy(20.0)
        assert theirs.put(TOKENS, BLOCKS[::-1].copy()).n_stored == 4  # now the first namespace of this daemon
        assert first.wait_healthy(20.0)
        assert mine.match(TOKENS).n_blocks == 0
        assert mine.put(TOKENS, BLOCKS).n_stored == 4
        out = np.zeros_like(BLOCKS)
        assert mine.get_into(TOKENS, out).n_blocks == 4
        np.testing.assert_array_equal(out, BLOCKS)
        assert theirs.get_into(TOKENS, out).n_blocks == 4
        np.testing.assert_array_equal(out, BLOCKS[::-1])


def test_a_hanging_daemon_costs_one_deadline_and_then_nothing(process: Process, wait_until: Any) -> None:
    """Case 12: the miss comes by the deadline, the next ones at once, and it recovers by itself."""
    with Client(process.path, timeout_s=0.3) as client:
        ns = client.open(NAMESPACE)
        ns.put(TOKENS, BLOCKS)
        process.signal(signal.SIGSTOP)
        start = time.monotonic()
        assert not ns.lease(TOKENS)
        first_s = time.monotonic() - start
        assert 0.2 < first_s < 5.0
        assert not client.healthy
        out = np.zeros_like(BLOCKS)
        for _ in range(100):
            assert not ns.lease(TOKENS)
            assert ns.get_into(TOKENS, out).n_blocks == 0
            assert ns.put(TOKENS, BLOCKS).n_skipped == 4
        assert time.monotonic() - start - first_s < 300 * 0.3 / 2, "each call waited for its own deadline"
        process.signal(signal.SIGCONT)
        wait_until(lambda: client.healthy, "the daemon answers again")
        wait_until(lambda: bool(ns.lease(TOKENS)), "blocks are found again")
        # The reply to the lease that nobody waited for came late: what it granted was given back.
        wait_until(lambda: client.stats()["leases"] == 0, "the late grant is released")


def test_something_else_behind_the_socket_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()
    from kvstore.errors import UnavailableError

    start = time.monotonic()
    with pytest.raises(UnavailableError):
        Client(path, timeout_s=0.2)
    assert time.monotonic() - start < 10
    server.close()
