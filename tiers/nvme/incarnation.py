"""One life of a segment, from its first frame to its reuse, as worker threads write to it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.native import aligned_bytes
from kvstore.tiers.nvme import segment_index
from kvstore.tiers.nvme.files import Extent, Files
from kvstore.tiers.nvme.layout import ENTRY_BYTES, PAGE_BYTES
from kvstore.tiers.nvme.segment_index import ENTRY, Entries

_PER_PAGE = PAGE_BYTES // ENTRY_BYTES


class Batch(NamedTuple):
    """Entries that are written together: their first number, how many, whether no other batch shares their pages."""

    start: int
    n: int
    own_pages: bool


class SegmentFile:
    """A file and its handle, made when it is first written; ``tried`` is called whenever that was tried."""

    def __init__(
        self,
        files: Files,
        name: str,
        size_bytes: int,
        handle: int | None = None,
        tried: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._files = files
        self._handle = handle
        self._tried = tried
        self.name_is_taken = False
        """Something that is no segment has the name."""
        self._lock = threading.Lock()

    @property
    def exists(self) -> bool:
        """Whether the file has been made."""
        return self._handle is not None

    @property
    def handle(self) -> int:
        """Of a file that exists."""
        assert self._handle is not None, self.name  # noqa: S101 - places in a file are given out after it was made
        return self._handle

    def ensure(self) -> int:
        """The handle; makes the file first if need be, with its name durable. Raises OSError."""
        with self._lock:
            if self._handle is None:
                try:
                    handle = self._make()
                finally:
                    self._tried()
                self._handle = handle
            return self._handle

    def remove(self) -> None:
        """Remove the file and close it. Raises OSError: then it is as before."""
        with suppress(FileNotFoundError):
            self._files.remove(self.name)
        self.close()

    def _make(self) -> int:
        try:
            handle = self._files.create(self.name, self.size_bytes)
        except FileExistsError:
            self.name_is_taken = True
            raise
        try:
            self._files.sync_directory()
        except OSError:
            self._files.close(handle)
            self._files.remove(self.name)
            raise
        return handle

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._handle is not None:
                self._files.close(self._handle)
                self._handle = None


class Incarnation:
    """Where the frames and entries of one life of a segment go. What writes may be called from several threads."""

    def __init__(
        self, files: Files, file: SegmentFile, head: NDArray[np.uint8], index_pages: int, log_seq: int
    ) -> None:
        self.file = file
        self.log_seq = log_seq
        self._files = files
        self._index = aligned_bytes(index_pages * PAGE_BYTES)
        self._index[:] = 0
        self._index[:PAGE_BYTES] = head
        self._entries = self._index[PAGE_BYTES:].view(ENTRY)
        self._n_entries = 0
        self._lock = threading.Lock()
        self._head_durable = False

    def append(self, entries: Entries, frames_left: int) -> Batch:
        """Give frames their entries. On the owner's thread, before they are written.

        ``frames_left``: at most so many more frames will come to this segment.
        """
        segment_index.seal(entries, self.log_seq)
        start, n = self._n_entries, len(entries)
        own_start = _whole_pages(start)
        own = _whole_pages(own_start + n) + frames_left <= len(self._entries)
        start = own_start if own else start
        self._entries[start : start + n] = entries
        self._n_entries = _whole_pages(start + n) if own else start + n
        return Batch(start, n, own)

    def write(self, batch: Batch, frames: Sequence[Extent]) -> NDArray[np.bool_]:
        """Write frames together with their entries; bool [n] says which frames were written whole. Blocks.

        Raises OSError when the file can't be made or the entries were not written.
        """
        handle = self.file.ensure()
        base = int(self._index.ctypes.data)
        extents = [Extent(0, ((base, PAGE_BYTES),))] if not self._head_durable else []
        first = 1 + batch.start // _PER_PAGE
        n_bytes = (1 + _whole_pages(batch.start + batch.n) // _PER_PAGE - first) * PAGE_BYTES
        if n_bytes:
            extents.append(Extent(first * PAGE_BYTES, ((base + first * PAGE_BYTES, n_bytes),)))
        n_index = len(extents)
        # A page that batches share must not go back to what it was before the later one.
        with nullcontext() if batch.own_pages else self._lock:
            done = self._files.write(handle, [*extents, *frames])
        extents += frames
        whole: NDArray[np.bool_] = done == np.array([extent.length_bytes for extent in extents], np.int64)
        if not whole[:n_index].all():
            code = max(-int(done[:n_index][~whole[:n_index]][0]), 0) or errno.EIO
            raise OSError(code, f"{os.strerror(code)}: the index of a segment was not written")
        return whole[n_index:]

    def sync(self) -> None:
        """Make it all durable. Blocks. Raises OSError: then none of it can be relied on."""
        self._files.sync(self.file.handle)
        self._head_durable = True


def _whole_pages(n_entries: int) -> int:
    return -(-n_entries // _PER_PAGE) * _PER_PAGE
