"""The limit in DRAM: numpy copies between ordinary arrays, and an echo of 4 KiB over a Unix socket for a lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.bench.limits import Echo
from kvstore.bench.measure import ordinary_array

if TYPE_CHECKING:
    from kvstore.bench.peers.driver import Batch, Blocks, Setup


class Memory:
    """As many arrays as batches are kept, written in turn."""

    def __init__(self, setup: Setup) -> None:
        self.version = f"numpy {np.__version__}"
        shape = (setup.n_blocks, setup.block_bytes)
        self._arrays = [ordinary_array(setup.batch_bytes, 4096).reshape(shape) for _ in range(setup.kept)]
        self._n_blocks = setup.n_blocks
        self._echo = Echo()

    def put(self, batch: Batch, blocks: Blocks) -> int:
        np.copyto(self._arrays[batch.number % len(self._arrays)], blocks)
        return self._n_blocks

    def get(self, batch: Batch, out: Blocks) -> int:
        np.copyto(out, self._arrays[batch.number % len(self._arrays)])
        return self._n_blocks

    def lookup(self, batch: Batch) -> int:  # noqa: ARG002 - one of the protocol's
        self._echo.round_trip()
        return self._n_blocks

    def drop(self, batch: Batch) -> None:
        pass

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._echo.close()


def open_system(setup: Setup) -> Memory:
    return Memory(setup)
