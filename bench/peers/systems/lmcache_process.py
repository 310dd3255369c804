"""LMCache inside this process: its CPU backend, as an engine's worker has it.

Blocks are its chunks. Keys come from tokens, by its own token database, as in its engine; a get copies out of its
memory objects with torch, a put copies into them.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.bench.peers.driver import Batch, Blocks, Setup

_GIB = 1 << 30
_SPARE_BYTES = 64 << 20


class LMCacheProcess:
    """A ``LocalCPUBackend`` with a ``ChunkedTokenDatabase`` beside it."""

    def __init__(self, setup: Setup) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.token_database import ChunkedTokenDatabase

        self.version = f"LMCache {importlib.metadata.version('lmcache')}, torch {torch.__version__}"
        # As everywhere here, one thread copies.
        torch.set_num_threads(1)
        block_tokens = setup.options["block_tokens"]
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=block_tokens, local_cpu=True, max_local_cpu_size=(2 * setup.kept_bytes + _SPARE_BYTES) / _GIB
        )
        metadata = LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.uint8, kv_shape=(1, 1, block_tokens, 1, setup.block_bytes // block_tokens),
            chunk_size=block_tokens,
        )  # fmt: skip
        self._torch: Any = torch
        self._format: Any = MemoryFormat.KV_2LTD
        self._shape: Any = torch.Size([1, 1, block_tokens, setup.block_bytes // block_tokens])
        self._backend: Any = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._tokens: Any = ChunkedTokenDatabase(config, metadata)

    def put(self, batch: Batch, blocks: Blocks) -> int:
        keys = self._keys(batch)
        objects = self._backend.batched_allocate(self._shape, self._torch.uint8, len(keys), self._format)
        if objects is None:
            return 0
        for memory, block in zip(objects, self._torch.from_numpy(blocks), strict=True):
            memory.tensor.view(-1).copy_(block)
        self._backend.batched_submit_put_task(keys, objects)
        for memory in objects:
            memory.ref_count_down()  # the backend has its own
        return len(objects)

    def get(self, batch: Batch, out: Blocks) -> int:
        n = 0
        for key, room in zip(self._keys(batch), self._torch.from_numpy(out), strict=True):
            memory = self._backend.get_blocking(key)
            if memory is not None:
                room.copy_(memory.tensor.view(-1))
                memory.ref_count_down()
                n += 1
        return n

    def lookup(self, batch: Batch) -> int:
        return sum(map(self._backend.contains, self._keys(batch)))

    def drop(self, batch: Batch) -> None:
        for key in self._keys(batch):
            self._backend.remove(key)

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._backend.close()

    def _keys(self, batch: Batch) -> list[Any]:
        return [
            key for _, _, key in self._tokens.process_tokens(tokens=self._torch.from_numpy(batch.tokens.view("i4")))
        ]


def open_system(setup: Setup) -> LMCacheProcess:
    return LMCacheProcess(setup)
