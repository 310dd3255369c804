"""The one seam between the NVMe tier and the disk: files in one directory, batches of extents, sync points.

Everything the tier does to a disk goes through ``Files``. ``DirectFiles`` is the real one; ``FaultyFiles``
and ``CrashFiles`` wrap it to misbehave, or to say what a power cut would leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError

SECTOR_BYTES = 4096
"""Offsets, addresses and lengths of extents are multiples of this."""

Int64s = NDArray[np.int64]


class Extent(NamedTuple):
    """Consecutive bytes of a file, and the pieces of memory they come from or go to, in order."""

    offset: int
    """In the file, in bytes."""
    buffers: tuple[tuple[int, int], ...]
    """``(address, length in bytes)`` each. The caller keeps the memory mapped during the call."""

    @property
    def length_bytes(self) -> int:
        """The sum over all pieces."""
        return sum(length for _, length in self.buffers)

    def part(self, start_bytes: int, end_bytes: int) -> Extent:
        """The bytes from ``start_bytes`` up to ``end_bytes``, counted from the start of this extent."""
        pieces = []
        at = 0
        for address, length in self.buffers:
            low, high = max(start_bytes - at, 0), min(end_bytes - at, length)
            if low < high:
                pieces.append((address + low, high - low))
            at += length
        return Extent(self.offset + start_bytes, tuple(pieces))


def pieces_of(extents: Sequence[Extent]) -> Int64s:
    """Address and length of every piece of memory in order, int64 ``[pieces, 2]``: an array of ``struct iovec``.

    Raises BadInputError unless all offsets, addresses and lengths are multiples of ``SECTOR_BYTES``, lengths
    positive.
    """
    numbers = chain.from_iterable(chain.from_iterable(extent.buffers for extent in extents))
    pieces = np.fromiter(numbers, dtype=np.int64).reshape(-1, 2)
    odd = bool((pieces % SECTOR_BYTES).any()) or bool((pieces <= 0).any())
    if odd or any(extent.offset % SECTOR_BYTES or extent.offset < 0 or not extent.buffers for extent in extents):
        raise BadInputError(f"an extent isn't made of whole sectors; use multiples of {SECTOR_BYTES} bytes everywhere")
    return pieces


def plain_name(name: str) -> str:
    """The name itself; raises BadInputError for one that would lead out of the directory."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise BadInputError(f"{name!r} is not the name of a file; give one without '/'")
    return name


class Files(Protocol):
    """Plain files in one directory.

    Handles are ints. All methods may be called from any thread, several at a time; a handle must not be closed
    while another call uses it. All but ``catalog_committed`` may block on the disk, without Python's lock. Where
    nothing else is said, a method raises OSError when the system refuses, FileNotFoundError for a name that isn't
    there, and BadInputError for a name with a folder in it.
    """

    direct: bool
    """Whether the page cache is bypassed, as far as is known."""

    def create(self, name: str, size_bytes: int) -> int:
        """Make and open a new file of this size with its room set aside; reads as zeros. Returns its handle.

        Raises FileExistsError, or OSError with ENOSPC or EDQUOT; then there is no such file. The name is durable
        after ``sync_directory``.
        """
        ...

    def open(self, name: str) -> int:
        """Open an existing file for reading and writing; returns its handle."""
        ...

    def size_bytes(self, handle: int) -> int:
        """The length of the file now."""
        ...

    def close(self, handle: int) -> None:
        """Give the handle back. Syncs nothing."""
        ...

    def names(self) -> list[str]:
        """All files of the directory in alphabetical order, without folders."""
        ...

    def remove(self, name: str) -> None:
        """Take the name away; the room comes back when the last handle is closed. Durable after ``sync_directory``."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of a file that has it. Handles stay. Durable after ``sync_directory``."""
        ...

    def read(self, handle: int, extents: Sequence[Extent]) -> Int64s:
        """Read a batch; returns int64 ``[n]``: bytes that arrived for each extent, or ``-errno``.

        Fewer bytes than asked for means the end of the file. Never raises for what the disk does; raises
        BadInputError, before anything is read, for an extent that isn't made of whole sectors.
        """
        ...

    def write(self, handle: int, extents: Sequence[Extent]) -> Int64s:
        """Write a batch; returns as ``read``. Durable after ``sync``. Extents of a batch must not overlap.

        The memory must not change during the call.
        """
        ...

    def sync(self, handle: int) -> None:
        """Make the bytes of all writes that have returned, and the file's size, durable.

        After an OSError, what was written since the last success may or may not be there, and a further
        ``sync`` proves nothing about it.
        """
        ...

    def sync_directory(self) -> None:
        """Make the names as they are now durable."""
        ...

    def read_small(self, name: str) -> bytes:
        """A whole file at once."""
        ...

    def write_small(self, name: str, data: bytes) -> None:
        """Replace a whole file, or make it; durable on return, and never partly there. On OSError the old one stays."""
        ...

    def disk_free_bytes(self) -> int:
        """Room that the file system has left for this process."""
        ...

    def on_disk_bytes(self) -> int:
        """What the directory takes up on the disk, everything below it included."""
        ...

    def catalog_committed(self) -> None:
        """A transaction of the catalog has just become durable. Only equipment for tests cares."""
        ...

    def end_threads(self) -> None:
        """No call is under way: end what threads there are. They come back when they are needed."""
        ...
