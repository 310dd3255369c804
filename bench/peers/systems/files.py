"""A file for each block, as many engines' disk tiers have it: through the page cache, or past it with direct I/O.

Option ``way``: ``cached`` (plain writes and reads: the page cache), ``direct`` (O_DIRECT, no sync, as LMCache's and
SGLang's backends do), ``durable`` (O_DIRECT, and a sync of every file and of the directory before a put returns).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.bench.peers.driver import Batch, Blocks, Setup


class Files:
    """One flat directory. Source and target arrays are page-aligned, so that direct I/O needs no copy."""

    def __init__(self, setup: Setup) -> None:
        way = setup.options["way"]
        self.version = f"Linux {os.uname().release}"
        self._folder = Path(setup.folder)
        self._flags = 0 if way == "cached" else os.O_DIRECT
        self._durable = way == "durable"
        self._directory = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)

    def put(self, batch: Batch, blocks: Blocks) -> int:
        """Written to other names first, then renamed: a reader never sees half of a block."""
        handles = []
        try:
            for key, block in zip(batch.keys, blocks, strict=True):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._flags
                handles.append(os.open(f"{key}.unfinished", flags, 0o600, dir_fd=self._directory))
                if os.write(handles[-1], block) != len(block):
                    raise OSError(f"{key}: cut short")
                if not self._durable:
                    os.close(handles.pop())
            for handle in handles:  # after all were written: the first sync's journal commit does for the others, too
                os.fdatasync(handle)
        finally:
            for handle in handles:
                os.close(handle)
        for key in batch.keys:
            os.rename(f"{key}.unfinished", key, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        if self._durable:
            os.fsync(self._directory)
        return len(batch.keys)

    def get(self, batch: Batch, out: Blocks) -> int:
        n = 0
        for key, room in zip(batch.keys, out, strict=True):
            handle = os.open(key, os.O_RDONLY | self._flags, dir_fd=self._directory)
            try:
                n += os.readv(handle, [room]) == len(room)
            finally:
                os.close(handle)
        return n

    def lookup(self, batch: Batch) -> int:
        return sum(os.access(key, os.F_OK, dir_fd=self._directory) for key in batch.keys)

    def drop(self, batch: Batch) -> None:
        for key in batch.keys:
            os.unlink(key, dir_fd=self._directory)

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        os.close(self._directory)


def open_system(setup: Setup) -> Files:
    return Files(setup)
