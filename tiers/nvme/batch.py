"""A batch of extents as few vectored system calls, and what came of each extent.

Neighbours in the file become one call. A call that comes back short is continued; one that fails is repeated
extent by extent, so that a bad sector costs exactly the extents that touch it.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.tiers.nvme.files import SECTOR_BYTES, Extent, Int64s, pieces_of

IOV_MAX = 1024
CALL_BYTES = IOV_MAX * SECTOR_BYTES
"""Neighbours are joined up to this size (4 MiB), so that their pieces fit into one call in any case."""

VectoredCall = Callable[[int, int, int, int], int]
"""``(fd, address of iovecs, number of iovecs, offset)`` -> bytes, or -1 with ``ctypes.get_errno()``."""

_IOVEC_BYTES = 16

_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.preadv, _libc.pwritev):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)

# Through ctypes and not os.preadv: that wants an object per piece of memory, this an array of addresses.
preadv: VectoredCall = _libc.preadv
pwritev: VectoredCall = _libc.pwritev


class _Run(NamedTuple):
    """Extents that one call moves: ``first`` up to ``end`` in the order of the file."""

    first: int
    end: int
    first_piece: int
    n_pieces: int
    offset: int
    length_bytes: int


class Batch:
    """Extents made ready. ``results`` is int64 ``[n]``, in the caller's order, filled by ``work``."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        """Raises BadInputError for extents that aren't made of whole sectors."""
        self.results: Int64s = np.zeros(len(extents), dtype=np.int64)
        self._places = sorted(range(len(extents)), key=lambda i: extents[i].offset)
        self._extents = [extents[i] for i in self._places]
        self._lengths = [extent.length_bytes for extent in self._extents]
        self._iovecs = pieces_of(self._extents)
        self._runs = list(_runs(self._extents, self._lengths))
        self._next = iter(self._runs)

    @property
    def n_calls(self) -> int:
        """How many system calls it takes if none is cut short."""
        return len(self._runs)

    def work(self, call: VectoredCall, fd: int) -> None:
        """Do calls until none is left. Several threads may work on one batch; each call is done once."""
        base = self._iovecs.ctypes.data
        for run in self._next:  # one shared iterator: taking from it is atomic
            done = call(fd, base + run.first_piece * _IOVEC_BYTES, run.n_pieces, run.offset)
            if done == run.length_bytes:
                for i in range(run.first, run.end):
                    self.results[self._places[i]] = self._lengths[i]
            else:
                self._one_by_one(call, fd, run, max(done, 0))

    def _one_by_one(self, call: VectoredCall, fd: int, run: _Run, done_bytes: int) -> None:
        for i in range(run.first, run.end):
            extent, length_bytes = self._extents[i], self._lengths[i]
            whole = extent.offset + length_bytes <= run.offset + done_bytes
            self.results[self._places[i]] = length_bytes if whole else _move(call, fd, extent)


def _move(call: VectoredCall, fd: int, extent: Extent) -> int:
    """One extent, continued until it is whole, the file ends (bytes so far) or it fails (``-errno``)."""
    length_bytes = extent.length_bytes
    done = 0
    while done < length_bytes:
        # Unbuffered calls start on a sector: after an odd number of bytes, the last sector is done again.
        start = done // SECTOR_BYTES * SECTOR_BYTES
        iovecs = pieces_of([extent.part(start, length_bytes)])[:IOV_MAX]
        n_bytes = call(fd, iovecs.ctypes.data, len(iovecs), extent.offset + start)
        if n_bytes < 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            return -code
        if start + n_bytes <= done:
            return done
        done = start + n_bytes
    return done


def _runs(extents: Sequence[Extent], lengths: Sequence[int]) -> Iterator[_Run]:
    """Join neighbours (``extents`` is in the order of the file)."""
    first = first_piece = n_pieces = length_bytes = 0
    for i, extent in enumerate(extents):
        extent_bytes = lengths[i]
        if i > first and (
            extent.offset != extents[first].offset + length_bytes or length_bytes + extent_bytes > CALL_BYTES
        ):
            yield _Run(first, i, first_piece, n_pieces, extents[first].offset, length_bytes)
            first, first_piece, n_pieces, length_bytes = i, first_piece + n_pieces, 0, 0
        n_pieces += len(extent.buffers)
        length_bytes += extent_bytes
    if extents:
        yield _Run(first, len(extents), first_piece, n_pieces, extents[first].offset, length_bytes)
