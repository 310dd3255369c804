"""One memory region: a memfd, the daemon's mapping of it, whose it is and who maps it.

    raw -> assigned(writer, tenant, slot size) -> sealed -> orphan (the writer is gone) -> retired

A region has one writer in its whole life. Everybody else gets the descriptor after the seal only. One that
outlives its daemon is adopted by the next: sealed, so that this daemon can only read it.

An ``unsealed`` region goes the same way, but the kernel seals its size only: any client that has the descriptor may map
it writable, and clients of its tenant are trusted not to write there.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.native import Mapping
from kvstore.tiers import memfd
from kvstore.tiers.any_region import DAEMON_WRITER, AnyRegion

__all__ = ["DAEMON_WRITER", "Region"]


class Region(AnyRegion):
    """Memory of ``size_bytes``; ``fd`` belongs to this object. Used by one thread at a time."""

    def __init__(self, size_bytes: int, adopted_fd: int | None = None, *, unsealed: bool = False) -> None:
        """A raw region, mapped writable by the daemon, or a sealed one of an earlier daemon, mapped read-only.

        Takes over ``adopted_fd``, whatever happens. Raises OSError when there is no memory, or it can't be mapped.
        """
        super().__init__(size_bytes)
        self.read_only = adopted_fd is not None
        """Only a writer that had it mapped before can write here; this daemon can't."""
        self.unsealed = unsealed
        self.sealed = self.read_only
        self.populated_bytes = 0
        self.fd = memfd.create("kvstore-region", size_bytes) if adopted_fd is None else adopted_fd
        self._array: NDArray[np.uint8] | None = None
        self.inode = os.fstat(self.fd).st_ino
        try:
            self._mapping: Mapping | None = Mapping(self.fd, size_bytes, writable=not self.read_only, inherit=False)
            if self.read_only:
                self.populated_bytes = min(os.fstat(self.fd).st_blocks * 512, size_bytes)
        except OSError:
            os.close(self.fd)
            raise

    @property
    def mapping(self) -> Mapping:
        """The daemon's own mapping, writable unless the region is adopted."""
        if self._mapping is None:
            raise IntegrityError(f"region {self.id} is closed; nothing may use its memory")
        return self._mapping

    @property
    def address(self) -> int:
        """Where the daemon's mapping starts."""
        return self.mapping.address

    @property
    def array(self) -> NDArray[np.uint8]:
        """The daemon's mapping as uint8 ``[size_bytes]``. An array kept keeps the memory."""
        if self._array is None:
            self._array = self.mapping.array()
        return self._array

    def populate(self, length_bytes: int) -> None:
        """Fill the next pages of a raw region, huge ones where it fills whole ones. Blocks without Python's lock;
        raises OSError."""
        length_bytes = min(length_bytes, self.size_bytes - self.populated_bytes)
        self.mapping.populate(self.populated_bytes, length_bytes)
        self.mapping.gather(self.populated_bytes, length_bytes)
        self.populated_bytes += length_bytes

    def resize(self, size_bytes: int) -> None:
        """Change the size of a raw region; filled pages stay filled. Raises OSError."""
        self._must_be_raw()
        if size_bytes < self.size_bytes:
            self.mapping.shrink(size_bytes)
            os.ftruncate(self.fd, size_bytes)
        elif size_bytes > self.size_bytes:
            os.ftruncate(self.fd, size_bytes)
            self._mapping = Mapping(self.fd, size_bytes, writable=True, inherit=False)
        self.size_bytes = size_bytes
        self.populated_bytes = min(self.populated_bytes, size_bytes)

    def assign(self, region_id: int, writer: int, tenant: str, slot_bytes: int) -> None:
        """Give a raw region its id, class and its only writer. The daemon's own are sealed at once."""
        super().assign(region_id, writer, tenant, slot_bytes)
        memfd.seal_size(self.fd)
        if writer == DAEMON_WRITER:
            self.seal()

    def seal(self) -> None:
        """Others may have it. Nobody can map it writable any more, unless it is ``unsealed``; mappings that exist stay
        writable. Idempotent."""
        if not self.sealed:
            if not self.unsealed:
                memfd.seal_read_only(self.fd)
            self.sealed = True

    def orphan(self) -> None:
        """The writer is gone, so it is sealed if it wasn't. One that can't be sealed stays unsealed.

        That is a region whose writer sealed the seals: its descriptor never goes to anybody else.
        """
        super().orphan()
        with contextlib.suppress(OSError):
            self.seal()

    def check(self) -> None:
        """Raises IntegrityError when the descriptor contradicts this object."""
        if os.fstat(self.fd).st_size != self.size_bytes:
            raise IntegrityError(f"region {self.id} has {os.fstat(self.fd).st_size} bytes, not {self.size_bytes}")
        if not self.unsealed and memfd.is_read_only(self.fd) != self.sealed:
            raise IntegrityError(f"region {self.id}: the kernel's seals are not what sealed={self.sealed} says")
        others = self.mappers - {self.writer}
        if not self.sealed and others:
            raise IntegrityError(f"region {self.id} is not sealed but clients {sorted(others)} map it")
        super().check()

    def close(self) -> None:
        """Close the descriptor and unmap. Idempotent. Memory lives on while a client maps it."""
        if self._mapping is not None:
            self._mapping = self._array = None
            os.close(self.fd)
