"""Daemons as processes over one NVMe directory: killed and started again, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.cli.daemon_process import READY
from kvstore.client import Client
from kvstore.types import KVSpec, Namespace

BLOCK_BYTES, BLOCK_TOKENS = 16384, 16
N = 8
NAMESPACE = Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))


def prompt(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1_000_000).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)


class Served:
    """``kvstore serve`` with an NVMe tier; ``start`` returns when clients are accepted."""

    def __init__(self, folder: Path) -> None:
        self.socket_path, self.nvme_dir = folder / "d.sock", folder / "nvme"
        self.process: subprocess.Popen[bytes] | None = None
        self.said = b""

    def start(self, *more: str, program: tuple[str, ...] = ("-m", "kvstore.cli")) -> None:
        ready, child = os.pipe()
        command = [sys.executable, *program, "serve", "--socket", str(self.socket_path), "--dram", "16MiB",
                   "--no-prefault", "--ready-fd", str(child), "--nvme-dir", str(self.nvme_dir), "--nvme", "128MiB",
                   *more]  # fmt: skip
        self.process = subprocess.Popen(command, pass_fds=(child,), stderr=subprocess.PIPE)
        os.close(child)
        with os.fdopen(ready, "rb") as pipe:
            assert pipe.read(len(READY)) == READY, self.process.communicate()[1]

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        _, self.said = self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end(signal.SIGKILL)


def test_what_was_said_to_be_durable_survives_kill_9(served: Served) -> None:
    served.start()
    durable: dict[int, int] = {}
    with Client(served.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        for seed in range(60):
            within_s = 20.0 if seed % 3 == 0 else None
            durable[seed] = ns.put(prompt(seed), content(seed), durable_within_s=within_s).n_durable
    assert [seed for seed, n in durable.items() if n == N] == list(range(0, 60, 3))
    served.end(signal.SIGKILL)
    served.start()
    with Client(served.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        out = np.zeros((N, BLOCK_BYTES), np.uint8)
        for seed, n in durable.items():
            got = ns.get_into(prompt(seed), out).n_blocks
            assert got >= n, seed
            np.testing.assert_array_equal(out[:got], content(seed)[:got])
        assert ns.match(prompt(1000)).n_blocks == 0
    assert served.end(signal.SIGTERM) == 0
    assert b"blocks found" in served.said
    assert b"Traceback" not in served.said


@pytest.mark.slow
def test_killed_five_times_while_it_writes(served: Served) -> None:
    """Each life adds to what the ones before made durable; what comes back is right to the byte."""
    durable: dict[int, int] = {}
    for life in range(5):
        served.start()
        with Client(served.socket_path, timeout_s=20.0) as client:
            ns = client.open(NAMESPACE)
            out = np.zeros((N, BLOCK_BYTES), np.uint8)
            for seed, n in durable.items():
                got = ns.get_into(prompt(seed), out).n_blocks
                assert got >= n, (life, seed)
                np.testing.assert_array_equal(out[:got], content(seed)[:got])
            for seed in range(10 * life, 10 * life + 10):
                within_s = 20.0 if seed % 2 == 0 else None
                result = ns.put(prompt(seed), content(seed), durable_within_s=within_s)
                durable[seed] = result.n_durable
                assert result.n_durable == (N if within_s else 0)
            served.end(signal.SIGKILL)


def test_sigterm_writes_what_waits_and_is_quick(served: Served) -> None:
    served.start("--drain", "20", "--write-behind", "12MiB")
    with Client(served.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        for seed in range(30):
            assert ns.put(prompt(seed), content(seed)).n_stored == N
        start_s = time.monotonic()
        assert served.end(signal.SIGTERM) == 0
        assert time.monotonic() - start_s < 20
        assert b"lost" not in served.said
        served.start()
        assert client.wait_healthy(20.0)
        out = np.zeros((N, BLOCK_BYTES), np.uint8)
        for seed in range(30):
            assert ns.get_into(prompt(seed), out).n_blocks == N
            np.testing.assert_array_equal(out, content(seed))


def test_an_empty_start_and_a_verified_one(served: Served) -> None:
    served.start()
    with Client(served.socket_path, timeout_s=20.0) as client:
        assert client.open(NAMESPACE).put(prompt(1), content(1), durable_within_s=20.0).n_durable == N
    served.end(signal.SIGKILL)
    served.start("--recovery", "strict")
    with Client(served.socket_path, timeout_s=20.0) as client:
        assert client.open(NAMESPACE).match(prompt(1)).n_blocks == N
    served.end(signal.SIGKILL)
    served.start("--recovery", "none")
    with Client(served.socket_path, timeout_s=20.0) as client:
        assert client.open(NAMESPACE).match(prompt(1)).n_blocks == 0
        assert client.stats()["blocks"] == 0


HANGING_DISK = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from kvstore.cli.main import main
from kvstore.tiers.nvme.direct import DirectFiles

def hang(self, handle, extents):
    # As a disk does that answers no more: in a thread that the interpreter would wait for at its end.
    return ThreadPoolExecutor(1).submit(threading.Event().wait).result()

DirectFiles.write = hang
main(sys.argv[1:])
"""


def test_sigterm_ends_a_daemon_whose_disk_hangs(served: Served) -> None:
    served.start("--drain", "0.2", program=("-c", HANGING_DISK))
    with Client(served.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        result = ns.put(prompt(1), content(1), durable_within_s=0.1)
        assert (result.n_stored, result.n_durable) == (N, 0)
        start_s = time.monotonic()
        assert served.end(signal.SIGTERM) == 0
        assert time.monotonic() - start_s < 15
    assert b"is lost" in served.said
    assert b"Traceback" not in served.said
    served.start()
    with Client(served.socket_path, timeout_s=20.0) as client:
        assert client.open(NAMESPACE).match(prompt(1)).n_blocks == 0
