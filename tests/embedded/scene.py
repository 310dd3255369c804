"""An embedded store for tests: its prompts and blocks, and what it has open in this process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import KVSpec, Namespace, NamespaceHandle

WAIT_S = 20.0

BLOCK_TOKENS, BLOCK_BYTES = 16, 8192

NAMESPACE = Namespace("model", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))

SMALL: dict[str, Any] = {"dram": "8MiB", "prefault": False}

NVME = {**SMALL, "nvme": "64MiB"}


def prompt(n_blocks: int, seed: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 50_000, n_blocks * BLOCK_TOKENS, dtype=np.uint32)


def content(n_blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1000).integers(0, 256, (n_blocks, BLOCK_BYTES), dtype=np.uint8)


def holds(cache: NamespaceHandle, n_blocks: int, seed: int = 0) -> bool:
    out = np.zeros((n_blocks, BLOCK_BYTES), np.uint8)
    got = cache.get_into(prompt(n_blocks, seed), out)
    return got.n_blocks == n_blocks and bool((out == content(n_blocks, seed)).all())


def store_memory(pid: int | str) -> set[int]:
    """Inodes of stores' memory that a process has open or mapped."""
    found = {
        fd.stat().st_ino
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if fd.is_symlink() and "memfd:kvstore" in str(fd.readlink())
    }
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return found | {int(line.split()[4]) for line in lines if "memfd:kvstore" in line}


def descriptors(pid: int | str = "self") -> Counter[str]:
    """What a process has open, by what it leads to; numbers of sockets and the like left out."""
    found: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[str(fd.readlink()).partition(":[")[0]] += 1
        except FileNotFoundError:
            continue
    return found


class InUse:
    """Threads, descriptors and mapped memory of stores in this process."""

    def __init__(self) -> None:
        gc.collect()
        self.threads = set(threading.enumerate())
        self.descriptors = descriptors()
        self.n_mappings = Path("/proc/self/maps").read_text().count("memfd:kvstore")

    def check(self) -> None:
        """Nothing has come since. (What went may have been an earlier test's.)"""
        now = InUse()
        assert not now.threads - self.threads
        assert not now.descriptors - self.descriptors
        assert now.n_mappings <= self.n_mappings


def run_program(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of its own that starts with the names of this module at hand."""
    start = (
        "import os, signal, sys, threading\nimport numpy as np\nimport kvstore\n"
        "from kvstore import KVSpec, Namespace\n"
        f"space = Namespace('model', KVSpec.opaque({BLOCK_TOKENS}, {BLOCK_BYTES}))\n"
        f"settings = dict(dram='8MiB', nvme='64MiB', prefault=False)\n"
        f"tokens, blocks = np.arange({4 * BLOCK_TOKENS}), np.full((4, {BLOCK_BYTES}), 7, np.uint8)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", start + body, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
