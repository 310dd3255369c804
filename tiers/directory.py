"""What lies in which slot, in a memory file that outlives the daemon if somebody keeps its descriptor.

One column per field, one place per slot (the place of its generation). A slot counts only where its state
byte says so: the byte is written after all else of a label and cleared before anything else happens to the
slot. So a daemon may die between any two stores, and whoever reads the file afterwards sees no half label.
The header's ``valid`` word says whether the file, and what is kept beside it, tells the whole story.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.native import Mapping
from kvstore.tiers import memfd
from kvstore.types import KEY_BYTES

Int64s = NDArray[np.int64]
Keys = NDArray[np.uint8]

_HEADER = struct.Struct("<8sIIQQ")  # magic, version, valid, places, highest region id
_MAGIC, _VERSION = b"KVSLOTS\0", 1
_VALID_WORD, _LAST_REGION_WORD = 3, 6
_EMPTY, _BLOCK, _FIRST_BLOCK = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Labels:
    """What is to be known of blocks, one entry a block, so that they are found without the daemon that stored them."""

    keys: Keys
    """uint8 [n, 16]"""
    parents: Keys
    """uint8 [n, 16]: the key of the block before, or the root key"""
    is_first: NDArray[np.bool_]
    """Whether ``parents`` is a root key."""
    namespaces: Keys
    """uint8 [n, 16]: the digest of the namespace; zeros where it was not known"""
    size_bytes: NDArray[np.uint32]
    ranks: NDArray[np.float64]
    """The order of eviction when it was last noted: lowest first."""

    def __len__(self) -> int:
        return len(self.size_bytes)

    def take(self, which: NDArray[np.bool_] | NDArray[np.integer[Any]]) -> Labels:
        """The labels of some of the blocks, by a mask or by places; copies."""
        return Labels(*(getattr(self, each.name)[which] for each in fields(self)))

    @staticmethod
    def join(parts: Sequence[Labels]) -> Labels:
        """One after the other."""
        keys = np.empty((0, KEY_BYTES), np.uint8)
        none = Labels(keys, keys, np.empty(0, np.bool_), keys, np.empty(0, np.uint32), np.empty(0, np.float64))
        columns = [[getattr(part, each.name) for part in (none, *parts)] for each in fields(none)]
        return Labels(*map(np.concatenate, columns))


_COLUMNS = (("state", np.uint8, 1), ("size_bytes", np.uint32, 1), ("rank", np.float64, 1), ("key", np.uint8, KEY_BYTES),
            ("parent", np.uint8, KEY_BYTES), ("namespace", np.uint8, KEY_BYTES))  # fmt: skip


def _sections(n_places: int) -> tuple[list[tuple[int, int]], int]:
    """Start and length of each column in bytes, and the size of the file."""
    out: list[tuple[int, int]] = []
    end = memfd.PAGE_BYTES
    for _, dtype, width in _COLUMNS:
        length = n_places * width * np.dtype(dtype).itemsize
        out.append((end, length))
        end = -(-(end + length) // memfd.PAGE_BYTES) * memfd.PAGE_BYTES
    return out, end


class _Columns:
    """The file as arrays."""

    def __init__(self, mapping: Mapping, n_places: int) -> None:
        data = mapping.array()
        columns = []
        for (_, dtype, width), (start, length) in zip(_COLUMNS, _sections(n_places)[0], strict=True):
            column = data[start : start + length].view(dtype)
            columns.append(column.reshape(n_places, width) if width > 1 else column)
        self.header: NDArray[np.uint32] = data[: _HEADER.size].view(np.uint32)
        self.state: NDArray[np.uint8] = columns[0]
        self.size_bytes: NDArray[np.uint32] = columns[1]
        self.rank: NDArray[np.float64] = columns[2]
        self.key: Keys = columns[3]
        self.parent: Keys = columns[4]
        self.namespace: Keys = columns[5]


class SlotDirectory:
    """The daemon's side. Sparse: a place costs 61 bytes once it has been used. Close it when done."""

    def __init__(self, n_places: int) -> None:
        """Raises OSError when there is no memory file."""
        size_bytes = _sections(n_places)[1]
        self.fd = memfd.create("kvstore-directory", size_bytes)
        try:
            memfd.seal_size(self.fd)
            os.pwrite(self.fd, _HEADER.pack(_MAGIC, _VERSION, 0, n_places, 0), 0)
            self._columns: _Columns | None = _Columns(Mapping(self.fd, size_bytes, writable=True), n_places)
        except OSError:
            os.close(self.fd)
            raise
        self._fresh: list[Int64s] = []

    @property
    def valid(self) -> bool:
        """Whether a next daemon may believe it. Not so at first."""
        return bool(self._open.header[_VALID_WORD])

    @valid.setter
    def valid(self, value: bool) -> None:
        self._open.header[_VALID_WORD] = int(value)

    def region_made(self, region_id: int) -> None:
        """Ids are never given again: what is said late of a region must not be taken for another."""
        self._open.header[_LAST_REGION_WORD] = region_id

    @property
    def _open(self) -> _Columns:
        if self._columns is None:
            raise IntegrityError("the slot directory is closed")
        return self._columns

    def committed(self, slots: Int64s) -> None:
        """These slots are live and have no label yet."""
        if len(slots):
            self._fresh.append(slots)

    def take_committed(self) -> Int64s:
        """All slots that ``committed`` named since the last call; some may be in use no longer, or be named twice."""
        if not self._fresh:
            return np.empty(0, np.int64)
        fresh, self._fresh = self._fresh, []
        return fresh[0] if len(fresh) == 1 else np.unique(np.concatenate(fresh))

    def has_label(self, places: Int64s) -> NDArray[np.bool_]:
        """Which places have a label that counts."""
        labelled: NDArray[np.bool_] = self._open.state[places] != _EMPTY
        return labelled

    def publish(self, places: Int64s, labels: Labels) -> None:
        """From now on these blocks are found there. The places have no label yet."""
        columns = self._open
        columns.key[places] = labels.keys
        columns.parent[places] = labels.parents
        columns.namespace[places] = labels.namespaces
        columns.size_bytes[places] = labels.size_bytes
        columns.rank[places] = labels.ranks
        columns.state[places] = np.where(labels.is_first, _FIRST_BLOCK, _BLOCK)

    def forget(self, places: Int64s) -> None:
        """The slots are about to be nobody's."""
        self._open.state[places] = _EMPTY

    def note_ranks(self, places: Int64s, ranks: NDArray[np.float64]) -> None:
        """The order of eviction as it is now."""
        self._open.rank[places] = ranks

    def close(self) -> None:
        """Close the descriptor and unmap. Idempotent."""
        if self._columns is not None:
            self._columns = None
            os.close(self.fd)


class FormerDirectory:
    """What an earlier daemon wrote: read-only. ``fd`` stays the caller's; the memory stays while this object does."""

    def __init__(self, fd: int) -> None:
        """Raises IntegrityError for a file that is not a directory of this version, or is not valid; OSError."""
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size:
            raise IntegrityError(f"a slot directory of {len(header)} bytes has no header")
        magic, version, valid, self.n_places, self.last_region_id = _HEADER.unpack(header)
        if magic != _MAGIC or version != _VERSION:
            raise IntegrityError(f"a slot directory of version {version}, magic {magic!r}; {_VERSION} is known here")
        if not valid:
            raise IntegrityError("the slot directory was given up by the daemon that wrote it")
        size_bytes = _sections(self.n_places)[1]
        if os.fstat(fd).st_size != size_bytes:
            raise IntegrityError(f"a slot directory of {self.n_places} places has {os.fstat(fd).st_size} bytes")
        self._columns = _Columns(Mapping(fd, size_bytes, writable=False), self.n_places)

    def labelled(self, base: int, n: int) -> Int64s:
        """Which of ``n`` places from ``base`` on have a label, counted from ``base``. IntegrityError out of range."""
        if base < 0 or n < 0 or base + n > self.n_places:
            raise IntegrityError(f"places {base}..{base + n - 1} of a slot directory with {self.n_places}")
        return np.flatnonzero(self._columns.state[base : base + n] != _EMPTY).astype(np.int64, copy=False)

    def labels(self, places: Int64s) -> Labels:
        """Copies of the labels at these places."""
        columns = self._columns
        return Labels(
            columns.key[places],
            columns.parent[places],
            columns.state[places] == _FIRST_BLOCK,
            columns.namespace[places],
            columns.size_bytes[places],
            columns.rank[places],
        )
