"""Mooncake Store with a master of its own, over TCP on the loopback.

Option ``way``: ``own`` (the segment is this process's own, so that its transfers are copies in memory), ``shm`` (the
segment belongs to a client process beside it, with which this one shares memory). Batch calls on registered memory:
what Mooncake is fastest with.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvstore.bench.peers.driver import Batch, Blocks, Setup

_HOST = "127.0.0.1"
_START_S = 30.0
_STOP_S = 10.0
_SPARE_BYTES = 64 << 20


class Mooncake:
    """A master, a client, and with ``shm`` the process that owns the segment."""

    def __init__(self, setup: Setup) -> None:
        # Both are read when the library is loaded.
        os.environ["MC_TCP_BIND_ADDRESS"] = _HOST
        os.environ["MC_STORE_MEMCPY"] = "1"
        from mooncake.store import MooncakeDistributedStore

        self.version = f"Mooncake {importlib.metadata.version('mooncake-transfer-engine-non-cuda')}"
        self._setup = setup
        self._arrays: list[Blocks] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store: Any = MooncakeDistributedStore()
        self._shared = setup.options["way"] == "shm"
        try:
            self._start()
        except BaseException:
            self._stop()
            raise

    def _start(self) -> None:
        rpc, metrics = _free_port(), _free_port()
        self._run(
            "mooncake_master", rpc, f"--rpc_port={rpc}", f"--rpc_address={_HOST}", f"--metrics_port={metrics}",
            f"--metrics_host={_HOST}",
        )  # fmt: skip
        # Twice what is kept: it begins to evict long before it is full.
        segment_bytes = 2 * self._setup.kept_bytes + _SPARE_BYTES
        if not self._shared:
            done = self._store.setup(
                f"{_HOST}:{_free_port()}", "P2PHANDSHAKE", segment_bytes, _SPARE_BYTES, "tcp", "", f"{_HOST}:{rpc}"
            )
        else:
            port = _free_port()
            self._run(
                "mooncake_client", port, f"--host={_HOST}", f"--port={port}", "--metadata_server=P2PHANDSHAKE",
                f"--master_server_address={_HOST}:{rpc}", f"--global_segment_size={segment_bytes}",
                "--protocol=tcp",
            )  # fmt: skip
            pool_bytes = 4 * self._setup.batch_bytes + _SPARE_BYTES
            done = self._store.setup_dummy(pool_bytes, _SPARE_BYTES, f"{_HOST}:{port}")
        if done != 0:
            raise ConnectionError(f"setup returned {done}")

    def array(self) -> Blocks:
        """Registered memory: transfers go to and from it without a copy in between."""
        setup = self._setup
        shape = (setup.n_blocks, setup.block_bytes)
        if self._shared:
            address = self._store.alloc_from_mem_pool(setup.batch_bytes)
            if not address:
                raise MemoryError(f"no room for {setup.batch_bytes} bytes in the shared pool")
            memory = (ctypes.c_uint8 * setup.batch_bytes).from_address(address)
            array: Blocks = np.ctypeslib.as_array(memory).reshape(shape)
        else:
            array = np.ones(shape, np.uint8)
        if self._store.register_buffer(array.ctypes.data, array.nbytes) != 0:
            raise MemoryError(f"{array.nbytes} bytes could not be registered")
        array.fill(1)
        self._arrays.append(array)
        return array

    def put(self, batch: Batch, blocks: Blocks) -> int:
        return sum(result == 0 for result in self._store.batch_put_from(batch.keys, *self._places(blocks)))

    def get(self, batch: Batch, out: Blocks) -> int:
        results = self._store.batch_get_into(batch.keys, *self._places(out))
        return sum(result == self._setup.block_bytes for result in results)

    def lookup(self, batch: Batch) -> int:
        return sum(result == 1 for result in self._store.batch_is_exist(batch.keys))

    def drop(self, batch: Batch) -> None:
        self._store.batch_remove(batch.keys, True)

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        for array in self._arrays:
            self._store.unregister_buffer(array.ctypes.data)
        self._stop()

    def _places(self, blocks: Blocks) -> tuple[list[int], list[int]]:
        n, n_bytes = blocks.shape
        first = blocks.ctypes.data
        return [first + i * n_bytes for i in range(n)], [n_bytes] * n

    def _run(self, program: str, port: int, *arguments: str) -> None:
        """Start a program; returns once it listens. Raises OSError if it doesn't."""
        path = shutil.which(program)
        if path is None:
            raise FileNotFoundError(f"{program} is not on the PATH")
        with (Path(self._setup.folder) / f"{program}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - a program of this environment
                [path, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._setup.folder
            )
        self._processes.append(process)
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection((_HOST, port), timeout=1).close()
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.02)
            else:
                return

    def _stop(self) -> None:
        with contextlib.suppress(Exception):
            self._store.close()
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def open_system(setup: Setup) -> Mooncake:
    return Mooncake(setup)
