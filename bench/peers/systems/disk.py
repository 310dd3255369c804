"""The limit on disk: fio with direct I/O (or a plain loop of it), on a file on the same disk. It looks nothing up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.bench.bandwidth_nvme import NvmeOptions
from kvstore.bench.disk_limit import LimitFile, disk_limit

if TYPE_CHECKING:
    from kvstore.bench.peers.driver import Batch, Blocks, Setup


class Disk:
    """Measures by its own stopwatch: starting fio is not what is to be known. Nothing comes into the arrays."""

    brings_bytes = False

    def __init__(self, setup: Setup) -> None:
        defaults = NvmeOptions()
        self._setup = setup
        self._file = LimitFile(Path(setup.folder), max(setup.kept_bytes, 64 << 20))
        self._limit = disk_limit(self._file, defaults.depth, defaults.sync_bytes)
        self._passed_s = 0.0
        self.version = self._limit.name

    def clock(self) -> float:
        return self._passed_s

    def put(self, batch: Batch, blocks: Blocks) -> int:  # noqa: ARG002 - one of the protocol's
        self._passed_s += self._limit.write_s(self._setup.batch_bytes, self._setup.block_bytes)
        return self._setup.n_blocks

    def get(self, batch: Batch, out: Blocks) -> int:  # noqa: ARG002 - as above
        self._passed_s += self._limit.read_s(self._setup.batch_bytes, self._setup.block_bytes)
        return self._setup.n_blocks

    def lookup(self, batch: Batch) -> int:  # noqa: ARG002 - as above
        return self._setup.n_blocks

    def drop(self, batch: Batch) -> None:
        pass

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._file.close()


def open_system(setup: Setup) -> Disk:
    return Disk(setup)
