"""A daemon with a holder as a process, blocks that say what they must hold, and what memory is really there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.cli.daemon_process import READY
from kvstore.client import Client, NamespaceHandle
from kvstore.types import KVSpec, Namespace
from tests.server import children

MIB = 1 << 20
BLOCK_BYTES, BLOCK_TOKENS, N = 16384, 16, 4
NAMESPACE = Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
WaitUntil = Callable[[Callable[[], bool], str], None]


def prompt(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1_000_000).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)


def put(ns: NamespaceHandle, seeds: range) -> int:
    return sum(ns.put(prompt(seed), content(seed)).n_stored for seed in seeds)


def found(ns: NamespaceHandle, seeds: range) -> int:
    """Blocks of these prompts that are found, each compared."""
    total = 0
    for seed in seeds:
        out = np.zeros((N, BLOCK_BYTES), np.uint8)
        n = ns.get_into(prompt(seed), out).n_blocks
        np.testing.assert_array_equal(out[:n], content(seed)[:n])
        total += n
    return total


class Warm:
    """``kvstore serve`` with a holder; ``start`` returns when clients are accepted."""

    def __init__(self, folder: Path) -> None:
        self.path, self.holder = folder / "d.sock", folder / "h.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.said = ""
        leave_out_others()

    def spawn(self, *more: str, dram: str = "8MiB") -> int:
        """Start, without waiting; returns the end to read that it is ready from."""
        ready, child = os.pipe()
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(self.path), "--dram", dram,
                   "--no-prefault", "--ready-fd", str(child), "--holder", str(self.holder), *more]  # fmt: skip
        self.process = subprocess.Popen(command, pass_fds=(child,), stderr=subprocess.PIPE)
        os.close(child)
        return ready

    def start(self, *more: str, dram: str = "8MiB") -> None:
        with os.fdopen(self.spawn(*more, dram=dram), "rb") as pipe:
            assert pipe.read(len(READY)) == READY, self.end(signal.SIGKILL) or self.said

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        self.said = self.process.communicate(timeout=30)[1].decode()
        return self.process.returncode

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def holder_pid(self) -> int:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as sock:
            sock.connect(str(self.holder))
            return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


@contextlib.contextmanager
def warm_daemon() -> Iterator[Warm]:
    """One that is not started yet; it and its holder end with the block."""
    with tempfile.TemporaryDirectory(prefix="kvw-") as folder:
        made = Warm(Path(folder))
        yield made
        if made.process is not None and made.process.poll() is None:
            made.process.send_signal(signal.SIGCONT)
            made.kill()
        if made.holder.exists():
            with contextlib.suppress(OSError):
                os.kill(made.holder_pid(), signal.SIGKILL)


@contextlib.contextmanager
def patient_client(warm: Warm) -> Iterator[Client]:
    """It is there before the daemon, and waits for it."""
    with Client(warm.path, timeout_s=20.0, required=False) as connected:
        yield connected


@contextlib.contextmanager
def child(target: Any, *args: Any) -> Iterator[tuple[Any, Connection]]:
    """One that ends well, when it is told to."""
    with children.child(target, *args) as (process, ours):
        try:
            yield process, ours
        finally:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
            with contextlib.suppress(OSError):
                ours.send("end")
    assert process.exitcode == 0, "the child ended badly"


_of_others: set[str] = set()


def leave_out_others() -> None:
    """From now on don't count what this process still has of other tests' daemons."""
    _of_others.update(_region_sizes(os.getpid()))


def region_bytes(*pids: int) -> int:
    """Memory of all regions that these processes have open or mapped, each counted once."""
    return sum(size for inode, size in _region_sizes(*pids).items() if inode not in _of_others)


def _region_sizes(*pids: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if "memfd:kvstore-region" in str(fd.readlink()):
                        facts = fd.stat()
                        sizes[str(facts.st_ino)] = facts.st_size
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "memfd:kvstore-region" in line:
                    start, end, inode = re.match(r"(\w+)-(\w+) \S+ \S+ \S+ (\d+)", line).groups()  # type: ignore[union-attr]
                    sizes.setdefault(inode, int(end, 16) - int(start, 16))
    return sizes
