"""Case 8: the daemon is killed with -9 twenty times in a row, also with a tiny /dev/shm and with a stale socket file.
It starts again each time, leaks nothing, and keeps what was durable."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.types import KVSpec, Namespace
from tests.cases.processes import DaemonProcess
from tests.shared_memory import shared_memory_files

BLOCK_BYTES, BLOCK_TOKENS, N = 32768, 16, 4
NAMESPACE = Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
N_KILLS = 20
TINY_SHM = ("unshare", "--mount", "--propagation", "private", "sh", "-c",
            'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh")  # fmt: skip


def prompt(number: int) -> NDArray[np.uint32]:
    return np.random.default_rng(number).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(1000 + number).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    made = DaemonProcess(tmp_path, "--nvme", "256MiB")
    yield made
    made.end()


class Writers:
    """Clients that store prompts until their daemon dies under them; ``durable`` are those they were told of."""

    def __init__(self, daemon: DaemonProcess, numbers: range, durable: dict[int, int]) -> None:
        self.wrote_some = threading.Event()
        self._thread = threading.Thread(target=self._write, args=(daemon, numbers, durable))
        self._thread.start()

    def _write(self, daemon: DaemonProcess, numbers: range, durable: dict[int, int]) -> None:
        with Client(daemon.socket_path, timeout_s=20.0) as client:
            ns = client.open(NAMESPACE)
            for number in numbers:
                stored = ns.put(prompt(number), content(number), durable_within_s=20.0)
                if stored.n_durable:
                    durable[number] = stored.n_durable
                    self.wrote_some.set()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def check_all(daemon: DaemonProcess, durable: dict[int, int]) -> None:
    into = np.zeros((N, BLOCK_BYTES), np.uint8)
    with Client(daemon.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        for number, n_durable in durable.items():
            n = ns.get_into(prompt(number), into).n_blocks
            assert n >= n_durable
            assert (into[:n] == content(number)[:n]).all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_kills_while_it_writes_lose_nothing_that_was_durable(daemon: DaemonProcess) -> None:
    shm_before = shared_memory_files()
    durable: dict[int, int] = {}
    for life in range(N_KILLS):
        daemon.start()  # the socket of the one before is still there
        check_all(daemon, dict(list(durable.items())[-8:]))
        writers = Writers(daemon, range(life * 100, life * 100 + 100), durable)
        assert writers.wrote_some.wait(30)
        daemon.end(signal.SIGKILL)
        assert daemon.socket_path.exists()
        writers.join()
    daemon.start()
    check_all(daemon, durable)
    assert len(durable) >= N_KILLS
    left = {path.name.split("-")[0] for path in daemon.nvme_dir.iterdir()}
    assert left <= {"segment", "catalog", "kvstore.json", "namespaces.json", "lock"}
    assert shared_memory_files() <= shm_before
    assert daemon.end(signal.SIGTERM) == 0
    assert not daemon.socket_path.exists()


def test_a_tiny_dev_shm_is_enough(daemon: DaemonProcess) -> None:
    tried = subprocess.run([*TINY_SHM, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"a mount of one's own is not permitted here: {tried.stderr.strip()}")
    daemon.before = TINY_SHM
    durable: dict[int, int] = {}
    for life in range(3):
        daemon.start()
        check_all(daemon, durable)
        writers = Writers(daemon, range(life * 10, life * 10 + 10), durable)
        writers.join()
        daemon.end(signal.SIGKILL)
    assert len(durable) == 30


@pytest.mark.parametrize("kind", ["of a process that is gone", "never listened on"])
def test_a_stale_socket_file_is_no_obstacle(daemon: DaemonProcess, kind: str) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(daemon.socket_path))
    if kind == "of a process that is gone":
        stale.listen()
    stale.close()
    daemon.start()
    durable: dict[int, int] = {}
    Writers(daemon, range(3), durable).join()
    assert len(durable) == 3
    check_all(daemon, durable)
