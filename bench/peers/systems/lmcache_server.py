"""LMCache's standalone server and one worker of it, on the CPU: paged KV in the worker, copied through shared memory.

Blocks are its chunks. The arrays of the benchmark are the worker's paged KV itself, so that nothing is copied beside
what LMCache copies. A lookup is a request and the question after its outcome, as LMCache's own benchmark asks.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvstore.bench.peers.driver import Batch, Blocks, Setup

_HOST = "127.0.0.1"
_MODEL = "bench"
_GIB = 1 << 30
_SPARE_BYTES = 64 << 20
_START_S = 120.0
_ANSWER_S = 30.0
_STOP_S = 10.0
_ARRAYS = 4
"""Two that are stored from, two that are read into."""


class LMCacheServer:
    """A server process and a worker that is registered with it."""

    def __init__(self, setup: Setup) -> None:
        self.version = f"LMCache {importlib.metadata.version('lmcache')}"
        self._setup = setup
        self._tokens: int = setup.options["block_tokens"]
        self._requests = itertools.count()
        self._n_arrays = 0
        # All arrays in one: what is registered is the worker's whole KV.
        self._memory: Blocks = np.ones((_ARRAYS * setup.n_blocks, setup.block_bytes), np.uint8)
        self._server = self._start()
        try:
            self._connect()
        except BaseException:
            self._stop()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        self._port = _free_port()
        # It begins to evict long before it is full, and then much at a time.
        gib = (4 * self._setup.kept_bytes + _SPARE_BYTES) / _GIB
        command = [
            sys.executable, "-m", "lmcache.cli.main", "server", "--host", _HOST, "--port", str(self._port),
            "--http-host", _HOST, "--http-port", str(_free_port()), "--chunk-size", str(self._tokens),
            "--l1-size-gb", f"{gib:.4f}", "--no-l1-use-lazy", "--eviction-policy", "LRU", "--disable-observability",
            "--supported-transfer-mode", "engine_driven", "--shm-name", f"kvstore-peers-{self._port}",
        ]  # fmt: skip
        with (Path(self._setup.folder) / "server.log").open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - a program of this environment
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._setup.folder
            )

    def _connect(self) -> None:
        """Register this process as a worker of one layer whose block is a chunk."""
        import torch
        import zmq
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        torch.set_num_threads(1)
        _wait_for(self._port, self._server)
        self._key: Any = IPCCacheServerKey
        self._zmq: Any = zmq.Context()
        self._client: Any = RequestClientFactory.create(f"tcp://{_HOST}:{self._port}", context=self._zmq)
        if self._client.get_chunk_size().result(timeout=_START_S) != self._tokens:
            raise ConnectionError("the server has chunks of another size than it was told")
        # Three dimensions, one plane: a block lies in one piece, as everybody's here.
        kv = torch.from_numpy(self._memory).view(len(self._memory), self._tokens, -1)
        self._kv = {"layer.0": kv}
        self._transfer: Any = EngineDrivenTransferContext(1000, self._client)
        infos = [EngineGroupInfo(engine_group_id=0, layer_indices=(0,), tokens_per_block=self._tokens)]
        self._transfer.register(
            self._kv, _MODEL, 1, 1, _START_S, layout_hints={"kv_layout": "NHD"}, engine_group_infos=infos,
            engine_type=EngineType.VLLM,
        )  # fmt: skip

    def array(self) -> Blocks:
        """A part of the worker's KV."""
        first = self._n_arrays * self._setup.n_blocks
        self._n_arrays += 1
        return self._memory[first : first + self._setup.n_blocks]

    def put(self, batch: Batch, blocks: Blocks) -> int:
        request, key = self._named(batch, worker_id=0)
        event = self._transfer.create_recorded_event()
        future = self._transfer.submit_store(request, key, self._kv, [self._places(blocks)], event, 1)
        return self._setup.n_blocks if future.result(timeout=_ANSWER_S) else 0

    def get(self, batch: Batch, out: Blocks) -> int:
        """As an engine does: a lookup, which also locks what is found, then the copy, which unlocks it."""
        request, key = self._named(batch, worker_id=None)
        n = self._look(request, key)
        key = self._named(batch, worker_id=0, request=request)[1]
        event = self._transfer.create_recorded_event()
        future = self._transfer.submit_retrieve(
            request, key, self._kv, [self._places(out)], event, 1, skip_first_n_tokens=0
        )
        n = n if future.result(timeout=_ANSWER_S) else 0
        self._client.end_session(request)
        return n

    def lookup(self, batch: Batch) -> int:
        request, key = self._named(batch, worker_id=None)
        n = self._look(request, key)
        # It has locked what it found, for a reader that does not come; nobody waits for the answer.
        self._client.free_lookup_locks(key, 1)
        self._client.end_session(request)
        return n

    def _look(self, request: str, key: Any) -> int:
        self._client.lookup(key, 1).result(timeout=_ANSWER_S)
        while (found := self._client.query_prefetch_status(request).result(timeout=_ANSWER_S)) is None:
            pass
        return int(found)

    def drop(self, batch: Batch) -> None:
        """It evicts by itself, within a put."""

    def pids(self) -> list[int]:
        return [self._server.pid]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._transfer.unregister().result(timeout=_STOP_S)
        self._transfer.close()
        self._client.close()
        self._zmq.destroy(linger=0)
        self._stop()

    def _named(self, batch: Batch, worker_id: int | None, request: str | None = None) -> tuple[str, Any]:
        request = request or f"request-{next(self._requests)}"
        key = self._key(
            model_name=_MODEL, world_size=1, num_kv_readers=1, worker_id=worker_id,
            token_ids=tuple(batch.tokens.tolist()), start=0, end=len(batch.tokens), request_id=request,
        )  # fmt: skip
        return request, key

    def _places(self, blocks: Blocks) -> list[int]:
        """Numbers of the blocks in the worker's KV."""
        first = (blocks.ctypes.data - self._memory.ctypes.data) // self._setup.block_bytes
        return list(range(first, first + len(blocks)))

    def _stop(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until somebody listens there. Raises OSError if nobody does."""
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((_HOST, port), timeout=1).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def open_system(setup: Setup) -> LMCacheServer:
    return LMCacheServer(setup)
