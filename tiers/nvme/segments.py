"""The segment files: which are free, which is being filled, what is live in each, which may be reused."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from kvstore.errors import IntegrityError
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.incarnation import Incarnation, SegmentFile
from kvstore.tiers.nvme.layout import Geometry, Int64s
from kvstore.tiers.nvme.segment_index import head_page
from kvstore.tiers.nvme.superblock import segment_name

_RANDOM_BITS = 24


class SegmentState(IntEnum):
    """ABSENT: no file. FREE: nothing in it counts. OPEN: being filled. SEALED: full, or filled no further."""

    ABSENT = 0
    FREE = 1
    OPEN = 2
    SEALED = 3


class Stream(IntEnum):
    """Frames that were moved are old and likely to stay: they get segments of their own."""

    NEW = 0
    MOVED = 1


@dataclass(slots=True, eq=False)
class Segment:
    """One segment. ``n_busy`` frames are reserved or being written, ``n_dying`` are dead but not yet unnamed."""

    number: int
    file: SegmentFile
    state: SegmentState
    log_seq: int = 0
    incarnation: Incarnation | None = None
    fill_page: int = 0
    live_pages: int = 0
    charged_bytes: int = 0
    n_live: int = 0
    n_busy: int = 0
    n_dying: int = 0
    n_readers: int = 0
    unreadable: bool = False
    """Frames in it could not be moved; left alone until some of them are gone."""
    discard: bool = False
    """The file isn't whole, or one too many: it goes instead of being reused."""
    rows: list[Int64s] = field(default_factory=list)
    """Rows of the frames put here, dead ones too."""

    @property
    def is_idle(self) -> bool:
        """Nothing in it counts any more."""
        return not (self.n_live or self.n_busy or self.n_dying or self.n_readers)


class Segments:
    """All segments of a tier, and the places in them. ``growth_bytes`` says how much new files may take now."""

    def __init__(self, geometry: Geometry, files: Files, uuid: bytes, growth_bytes: Callable[[], int]) -> None:
        self.geometry = geometry
        self.all: list[Segment] = []
        self._files = files
        self._uuid = uuid
        self._growth_bytes = growth_bytes
        self._open: list[Segment | None] = [None] * len(Stream)
        self._last_seq = 0

    # -- opening --------------------------------------------------------------------------------

    def adopt(self, number: int, handle: int, log_seq: int, whole: bool) -> Segment:
        """A file that is there already, with frames in it or not."""
        self._reach(number)
        segment = self.all[number]
        segment.file = SegmentFile(self._files, segment_name(number), self.geometry.segment_bytes, handle)
        segment.state, segment.discard, segment.log_seq = SegmentState.SEALED, not whole, log_seq
        self._last_seq = max(self._last_seq, log_seq >> _RANDOM_BITS)
        return segment

    def fill_up(self) -> None:
        """All numbers up to the capacity have a segment, ABSENT ones included."""
        self._reach(self.geometry.n_segments - 1)

    # -- places ---------------------------------------------------------------------------------

    def room(self, stream: Stream, pages: int) -> int:
        """How many frames of a size ``place`` would take now."""
        head = self._open[stream]
        here = 0 if head is None else (self.geometry.segment_pages - head.fill_page) // pages
        return here + self.n_available(stream) * (self.geometry.frame_pages // pages)

    def room_pages(self, stream: Stream) -> int:
        """Pages that ``place`` could fill, if frames filled segments without a rest."""
        return self.room(stream, 1)

    def place(self, stream: Stream, pages: int, n: int) -> tuple[Int64s, Int64s]:
        """Places for up to ``n`` frames, which count as busy: int64 segment numbers and first pages, in order."""
        numbers, firsts = [], []
        left = n
        while left:
            head = self._open[stream]
            here = 0 if head is None else min((self.geometry.segment_pages - head.fill_page) // pages, left)
            if head is None or not here:
                if not self._next(stream):
                    break
                continue
            numbers.append(np.full(here, head.number, np.int64))
            firsts.append(head.fill_page + np.arange(here, dtype=np.int64) * pages)
            head.fill_page += here * pages
            head.n_busy += here
            left -= here
        empty = np.zeros(0, np.int64)
        return np.concatenate([empty, *numbers]), np.concatenate([empty, *firsts])

    def n_available(self, stream: Stream) -> int:
        """Segments that a stream could open. One is kept for frames that are moved, else no room ever came back."""
        n = len(self._of(SegmentState.FREE)) + self.n_growable
        return max(n - 1, 0) if stream is Stream.NEW else n

    @property
    def n_growable(self) -> int:
        """Files that may still be made."""
        n_absent = self.geometry.n_segments - self.n_files
        if n_absent <= 0:
            return 0
        n_planned = sum(not segment.file.exists for segment in self.all if segment.state is not SegmentState.ABSENT)
        return max(min(n_absent, self._growth_bytes() // self.geometry.segment_bytes - n_planned), 0)

    @property
    def n_files(self) -> int:
        """Segments that have a file, or will have one for frames that have a place in it."""
        return sum(segment.state is not SegmentState.ABSENT for segment in self.all)

    # -- life -----------------------------------------------------------------------------------

    def seal(self, segment: Segment) -> None:
        """Nothing more goes into it. Idempotent."""
        if segment.state is SegmentState.OPEN:
            segment.state = SegmentState.SEALED
            self._open[self._open.index(segment)] = None

    def settle(self, segment: Segment) -> bool:
        """Make a segment free for reuse if nothing in it counts any more; returns whether it is."""
        if segment.state is not SegmentState.SEALED or not segment.is_idle:
            return False
        if segment.discard:
            try:
                segment.file.remove()
            except OSError:
                return False  # it keeps its room; tried again when something else settles
            segment.discard = False
        segment.incarnation, segment.rows, segment.fill_page, segment.unreadable = None, [], 0, False
        segment.state = SegmentState.FREE if segment.file.exists else SegmentState.ABSENT
        return True

    def sealed(self) -> list[Segment]:
        """Segments that nothing goes into any more."""
        return self._of(SegmentState.SEALED)

    def make_reserve(self) -> None:
        """Have one file ready that only moved frames use, so that room can be made on a full disk. Raises OSError."""
        if not self._of(SegmentState.FREE):
            absent = self._of(SegmentState.ABSENT)
            if absent and self.n_files < self.geometry.n_segments:
                absent[0].file.ensure()
                absent[0].state = SegmentState.FREE

    def check(self) -> None:
        """Raises IntegrityError when a segment is in a state that can't be."""
        for segment in self.all:
            if min(segment.n_live, segment.n_busy, segment.n_dying, segment.n_readers) < 0:
                raise IntegrityError(f"segment {segment.number} counts less than nothing: {segment}")
            if segment.state in (SegmentState.FREE, SegmentState.ABSENT) and not segment.is_idle:
                raise IntegrityError(f"segment {segment.number} is {segment.state.name} but not idle: {segment}")
            if (segment.state is SegmentState.OPEN) != (segment in self._open):
                raise IntegrityError(f"segment {segment.number} is {segment.state.name}, which its stream doesn't know")
        if self.n_files > self.geometry.n_segments:
            raise IntegrityError(f"{self.n_files} segment files, but {self.geometry.n_segments} fit")

    def close(self) -> None:
        """Close all files. Idempotent."""
        for segment in self.all:
            segment.file.close()

    def _of(self, state: SegmentState) -> list[Segment]:
        return [segment for segment in self.all if segment.state is state]

    def _reach(self, number: int) -> None:
        for new in range(len(self.all), number + 1):
            file = SegmentFile(self._files, segment_name(new), self.geometry.segment_bytes)
            self.all.append(Segment(new, file, SegmentState.ABSENT))

    def _next(self, stream: Stream) -> bool:
        """Open another segment for a stream. New frames leave one file to moved ones as long as files can be made."""
        head = self._open[stream]
        if head is not None:
            self.seal(head)
            self.settle(head)
        if not self.n_available(stream):
            return False
        free = self._of(SegmentState.FREE)
        spare = len(free) - 1 if stream is Stream.NEW else len(free)
        segment = free[0] if spare > 0 else self._of(SegmentState.ABSENT)[0]
        self._last_seq += 1
        segment.log_seq = self._last_seq << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        head_bytes = head_page(self._uuid, segment.number, segment.log_seq)
        segment.incarnation = Incarnation(
            self._files, segment.file, head_bytes, self.geometry.index_pages, segment.log_seq
        )
        segment.state, segment.fill_page = SegmentState.OPEN, self.geometry.index_pages
        self._open[stream] = segment
        return True
