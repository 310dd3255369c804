"""Making room: live frames of a segment that is mostly dead are written again elsewhere, then its place is free."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.native import aligned_bytes
from kvstore.tiers.nvme.disk_room import DiskRoom
from kvstore.tiers.nvme.files import Extent, Files, Int64s
from kvstore.tiers.nvme.incarnation import Batch, Incarnation, SegmentFile
from kvstore.tiers.nvme.jobs import Failure, Removal, commit, failure_of
from kvstore.tiers.nvme.namebook import NameBook
from kvstore.tiers.nvme.names import Records

CHUNK_BYTES = 8 << 20
"""Moved at a time: a bound on memory."""


@dataclass(slots=True, eq=False)
class MovePart:
    """Frames that go to one segment: their places in the job, where they come from, where they go."""

    number: int
    incarnation: Incarnation
    frames: Int64s
    from_bytes: Int64s
    to_bytes: Int64s
    sizes: Int64s
    entries: Batch
    failed: bool = False


@dataclass(slots=True, eq=False)
class CompactJob:
    """Moves of one segment's frames, names to change, names and files to remove, a look at the room that the file
    system has. ``run``, then ``finish_compact`` of the tier.

    ``rows``, ``slots`` and ``new_*`` have one entry a move.
    """

    victim: int
    """The segment that frames come from, -1 when none is moved."""
    source: int
    """Its handle."""
    rows: Int64s
    slots: Int64s
    new_segments: Int64s
    new_pages: Int64s
    parts: list[MovePart]
    records: Records
    old_names: list[bytes]
    removal: Removal
    renamed_rows: Int64s
    """Frames whose names are to say another time."""
    renamed: Records
    """What they say then."""
    useless: list[SegmentFile]
    """Files that are to be removed."""
    disk: DiskRoom
    files: Files
    book: NameBook
    readable: NDArray[np.bool_] = field(init=False)
    moved: NDArray[np.bool_] = field(init=False)
    done: bool = False
    """Whether all names are as they should be."""
    failure: Failure | None = None

    def __post_init__(self) -> None:
        self.readable = np.ones(len(self.rows), np.bool_)
        self.moved = np.zeros(len(self.rows), np.bool_)

    def run(self) -> None:
        """Copy frames, make them durable, exchange their names and remove those of dead frames, all in one
        transaction. Blocks, never raises. For any worker thread."""
        written = np.zeros(len(self.rows), np.bool_)
        for part in self.parts:
            self.failure = self._move(part, written) or self.failure
        old = [name for name, good in zip(self.old_names, written.tolist(), strict=True) if good]
        self.done, failure = commit(self.book, self.records[written], self.removal, old, self.renamed)
        if self.done:
            self.moved = written
        self.failure = failure or self.failure
        for file in self.useless:
            with suppress(OSError):
                file.remove()
        self.disk.look()

    def _move(self, part: MovePart, written: NDArray[np.bool_]) -> Failure | None:
        """Copy a part and make it durable; marks what is."""
        whole = np.zeros(len(part.frames), np.bool_)
        try:
            for start, end in _chunks(part.sizes):
                whole[start:end] = self._copy(part, start, end)
            part.incarnation.sync()
        except OSError as error:
            part.failed = True
            return failure_of(error, part.incarnation)
        written[part.frames] = whole
        part.failed = not whole[self.readable[part.frames]].all()
        return Failure(False, f"frames were not written ({part.incarnation.file.name})") if part.failed else None

    def _copy(self, part: MovePart, start: int, end: int) -> NDArray[np.bool_]:
        sizes = part.sizes[start:end]
        memory = aligned_bytes(int(sizes.sum()))
        addresses = int(memory.ctypes.data) + np.cumsum(sizes) - sizes
        done = self.files.read(self.source, _extents(part.from_bytes[start:end], addresses, sizes))
        whole: NDArray[np.bool_] = done == sizes
        self.readable[part.frames[start:end]] = whole
        if whole.any():
            to = _extents(part.to_bytes[start:end][whole], addresses[whole], sizes[whole])
            whole[whole] = part.incarnation.write(part.entries, to)
        return whole


def _extents(offsets: Int64s, addresses: Int64s, sizes: Int64s) -> list[Extent]:
    return [
        Extent(offset, ((address, size),))
        for offset, address, size in zip(offsets.tolist(), addresses.tolist(), sizes.tolist(), strict=True)
    ]


def _chunks(sizes: Int64s) -> list[tuple[int, int]]:
    """Ranges of frames of at most ``CHUNK_BYTES`` together, at least one each."""
    ranges: list[tuple[int, int]] = []
    start, n_bytes = 0, 0
    for at, size in enumerate(sizes.tolist()):
        if at > start and n_bytes + size > CHUNK_BYTES:
            ranges.append((start, at))
            start, n_bytes = at, 0
        n_bytes += size
    return [*ranges, (start, len(sizes))] if len(sizes) else ranges
