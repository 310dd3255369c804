"""The segment files: which are free, which is being filled, what is live in each, which may be reused.

A tier may have thousands of segments. What depends on a segment's counts is therefore looked at only where a
count has changed since the last time.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from kvstore.errors import IntegrityError
from kvstore.tiers.nvme.disk_room import DiskRoom
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.incarnation import Incarnation, SegmentFile
from kvstore.tiers.nvme.layout import Geometry, Int64s
from kvstore.tiers.nvme.segment_index import head_page
from kvstore.tiers.nvme.superblock import segment_name

_RANDOM_BITS = 24


class SegmentState(IntEnum):
    """FREE: nothing in it counts. OPEN: being filled. SEALED: full, or filled no further. GONE: it has no file."""

    FREE = 1
    OPEN = 2
    SEALED = 3
    GONE = 4


class Stream(IntEnum):
    """Frames that were moved are old and likely to stay: they get segments of their own."""

    NEW = 0
    MOVED = 1


@dataclass(slots=True, eq=False)
class Segment:
    """One segment. ``n_busy`` frames are reserved or being written, ``n_dying`` are dead but not yet unnamed."""

    number: int
    file: SegmentFile
    changed: set[Segment]
    """It adds itself here when a count changes."""
    state: SegmentState = SegmentState.FREE
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
    """The file isn't whole: it goes instead of being reused."""
    listed_charge: int = -1
    """The charge under which it is in the heap of what may be moved; -1 when it isn't."""
    n_places: int = 1
    """Files of the usual size that fit in the room that it takes."""
    rows: list[Int64s] = field(default_factory=list)
    """Rows of the frames put here, dead ones too."""

    def count_live(self, n: int, pages: int, charged_bytes: int) -> None:
        """As ``count``, for live frames."""
        self.live_pages += pages
        self.charged_bytes += charged_bytes
        self.count(live=n)

    def count(self, live: int = 0, busy: int = 0, dying: int = 0, readers: int = 0) -> None:
        """So many more, or fewer, are in it."""
        self.n_live += live
        self.n_busy += busy
        self.n_dying += dying
        self.n_readers += readers
        self.changed.add(self)

    @property
    def is_idle(self) -> bool:
        """Nothing in it counts any more."""
        return not (self.n_live or self.n_busy or self.n_dying or self.n_readers)

    @property
    def waits_for_names(self) -> bool:
        """Nothing in it counts but names of dead frames."""
        return self.n_dying > 0 and not (self.n_live or self.n_busy or self.n_readers)


class Segments:
    """All segments of a tier, and the places in them. ``taken``: numbers that no file may be made for."""

    def __init__(
        self,
        geometry: Geometry,
        files: Files,
        uuid: bytes,
        disk: DiskRoom,
        taken: Collection[int] = (),
    ) -> None:
        self.geometry = geometry
        self.all: dict[int, Segment] = {}
        """By number: those that have a file, or will have one for frames that have a place in it."""
        self.n_files = 0
        """Segment files, or the room that they take where they are larger."""
        self._files = files
        self._uuid = uuid
        self._disk = disk
        self._taken = set(taken)
        self._open: list[Segment | None] = [None] * len(Stream)
        self._last_seq = 0
        self._changed: set[Segment] = set()
        self._free: list[int] = []
        self._unmade: set[Segment] = set()
        """Had no file yet when last looked at."""
        self._unused: list[int] = []
        """Numbers below ``_next_number`` that no segment has."""
        self._next_number = 0
        self._waiting: set[Segment] = set()
        self._to_remove: set[Segment] = set()
        self._not_removed: set[Segment] = set()
        self._by_charge: list[tuple[int, int, int]] = []
        """A heap of what may be moved: charged bytes, number, log_seq. Entries that aren't so any more are stale."""
        self._n_sealed = 0

    # -- opening --------------------------------------------------------------------------------

    def adopt(self, number: int, handle: int, log_seq: int, size_bytes: int) -> Segment:
        """A file that is there already, with frames in it or not."""
        file = SegmentFile(self._files, segment_name(number), self.geometry.segment_bytes, handle)
        segment = self.all[number] = Segment(number, file, self._changed, SegmentState.SEALED, log_seq)
        segment.discard = size_bytes != self.geometry.segment_bytes
        segment.n_places = self.geometry.n_places(size_bytes)
        self.n_files += segment.n_places
        self._n_sealed += 1
        self._changed.add(segment)
        self._last_seq = max(self._last_seq, log_seq >> _RANDOM_BITS)
        return segment

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
            head.count(busy=here)
            left -= here
        empty = np.zeros(0, np.int64)
        return np.concatenate([empty, *numbers]), np.concatenate([empty, *firsts])

    def n_available(self, stream: Stream) -> int:
        """Segments that a stream could open. One is kept for frames that are moved, else no room ever came back."""
        n = self.n_free + self.n_growable
        return max(n - 1, 0) if stream is Stream.NEW else n

    @property
    def n_free(self) -> int:
        """Files with nothing in them."""
        return len(self._free)

    @property
    def disk_limits(self) -> bool:
        """Whether fewer files can be made than the capacity has room for, as far as is known."""
        return self.n_growable < self.geometry.n_segments - self.n_files

    @property
    def n_growable(self) -> int:
        """Files that may still be made, as far as is known."""
        n_left = self.geometry.n_segments - self.n_files
        if n_left <= 0:
            return 0
        self._unmade = {segment for segment in self._unmade if not segment.file.exists}
        n_on_disk = self._disk.free_bytes // self.geometry.segment_bytes - len(self._unmade)
        return max(min(n_left, n_on_disk), 0)

    # -- life -----------------------------------------------------------------------------------

    def seal(self, segment: Segment) -> None:
        """Nothing more goes into it. Idempotent."""
        if segment.state is SegmentState.OPEN:
            segment.state = SegmentState.SEALED
            self._open[self._open.index(segment)] = None
            self._n_sealed += 1
            self._changed.add(segment)

    def seal_open(self) -> int:
        """Nothing more goes into any segment that has frames. Returns the highest ``log_seq`` that one of them has."""
        for segment in list(self._open):
            if segment is not None:
                self.seal(segment)
        return (self._last_seq + 1 << _RANDOM_BITS) - 1

    def settle(self) -> None:
        """Look at what has changed: a sealed segment that nothing counts in may be reused."""
        changed = list(self._changed)
        self._changed.clear()
        for segment in changed:
            self._waiting.discard(segment)
            if segment.state is not SegmentState.SEALED:
                continue
            if segment.is_idle and segment.discard:
                self._to_remove.add(segment)
            elif segment.is_idle:
                self._empty(segment)
            elif segment.waits_for_names:
                self._waiting.add(segment)
            elif self._may_move(segment) and segment.listed_charge != segment.charged_bytes:
                segment.listed_charge = segment.charged_bytes
                heapq.heappush(self._by_charge, (segment.charged_bytes, segment.number, segment.log_seq))
        if len(self._by_charge) > 2 * self._n_sealed + 64:
            self._by_charge = [entry for entry in self._by_charge if self._is_so(entry)]
            heapq.heapify(self._by_charge)

    def take_to_remove(self) -> list[Segment]:
        """Segments whose files are to be removed, in a job. Each goes to ``removed``."""
        self.settle()
        segments = [*self._to_remove]
        self._to_remove.clear()
        return segments

    def removed(self, segment: Segment) -> None:
        """Its file is gone; or, if it still exists, it keeps its room until something else becomes free."""
        if segment.file.exists:
            self._not_removed.add(segment)
        else:
            self._empty(segment)

    def any_to_remove(self) -> bool:
        """Whether there are files to be removed."""
        self.settle()
        return bool(self._to_remove)

    def any_waits_for_names(self) -> bool:
        """Whether a segment is free once names of dead frames are gone."""
        self.settle()
        return bool(self._waiting)

    def least_charged(self) -> Segment | None:
        """The segment with the least live in it among those that can be moved now."""
        self.settle()
        while self._by_charge and not self._is_so(self._by_charge[0]):
            heapq.heappop(self._by_charge)
        return self.all[self._by_charge[0][1]] if self._by_charge else None

    def make_reserve(self) -> None:
        """Have one file ready that only moved frames use, so that room can be made on a full disk. Raises OSError."""
        if not self._free and self.n_files < self.geometry.n_segments:
            segment = self._new()
            try:
                segment.file.ensure()
            except OSError:
                self._drop(segment)
                raise
            heapq.heappush(self._free, segment.number)

    def check(self) -> None:
        """Raises IntegrityError when a segment is in a state that can't be, or the lists of segments aren't true."""
        for number, segment in self.all.items():
            if min(segment.n_live, segment.n_busy, segment.n_dying, segment.n_readers) < 0:
                raise IntegrityError(f"segment {number} counts less than nothing: {segment}")
            if number != segment.number or segment.state is SegmentState.GONE:
                raise IntegrityError(f"segment {number} is {segment}")
            if segment.state is SegmentState.FREE and not segment.is_idle:
                raise IntegrityError(f"segment {segment.number} is {segment.state.name} but not idle: {segment}")
            if (segment.state is SegmentState.OPEN) != (segment in self._open):
                raise IntegrityError(f"segment {segment.number} is {segment.state.name}, which its stream doesn't know")
        self.settle()
        of_all = list(self.all.values())
        sealed = [each for each in of_all if each.state is SegmentState.SEALED]
        movable = {(each.charged_bytes, each.number, each.log_seq) for each in sealed if self._may_move(each)}
        facts = {
            "free": (sorted(self._free), sorted(each.number for each in of_all if each.state is SegmentState.FREE)),
            "sealed": (self._n_sealed, len(sealed)),
            "waiting": (self._waiting, {each for each in sealed if each.waits_for_names}),
            "movable": (set(filter(self._is_so, self._by_charge)), movable),
            "files": (self.n_files, sum(each.n_places for each in of_all)),
        }
        for name, (kept, counted) in facts.items():
            if kept != counted:
                raise IntegrityError(f"{name}: the list of segments says {kept}, the segments {counted}")
        if self.n_files > self.geometry.n_segments:
            raise IntegrityError(f"{self.n_files} segment files, but {self.geometry.n_segments} fit")

    def close(self) -> None:
        """Close all files. Idempotent."""
        for segment in self.all.values():
            segment.file.close()

    def _is_so(self, entry: tuple[int, int, int]) -> bool:
        """Whether an entry of the heap says what is; one that doesn't is to be taken out."""
        charged_bytes, number, log_seq = entry
        segment = self.all.get(number)
        if segment is None or segment.log_seq != log_seq or segment.listed_charge != charged_bytes:
            return False
        if segment.charged_bytes == charged_bytes and segment.state is SegmentState.SEALED and self._may_move(segment):
            return True
        segment.listed_charge = -1
        return False

    @staticmethod
    def _may_move(segment: Segment) -> bool:
        return segment.n_live > 0 and not (segment.n_busy or segment.unreadable)

    def _empty(self, segment: Segment) -> None:
        """Make a sealed segment free."""
        self._changed |= self._not_removed
        self._not_removed.clear()
        self._n_sealed -= 1
        segment.incarnation, segment.rows, segment.fill_page = None, [], 0
        segment.unreadable, segment.listed_charge = False, -1
        if segment.file.exists:
            segment.state = SegmentState.FREE
            heapq.heappush(self._free, segment.number)
        else:
            self._drop(segment)

    def _new(self) -> Segment:
        """A segment without a file, with the least number that none has."""
        while self._next_number in self.all or self._next_number in self._taken:
            self._next_number += 1
        if self._unused:
            number = heapq.heappop(self._unused)
        else:
            number = self._next_number
            self._next_number += 1
        file = SegmentFile(self._files, segment_name(number), self.geometry.segment_bytes, tried=self._disk.look)
        segment = self.all[number] = Segment(number, file, self._changed)
        self._unmade.add(segment)
        self.n_files += 1
        return segment

    def _drop(self, segment: Segment) -> None:
        """A segment without a file is none any more."""
        segment.state = SegmentState.GONE
        del self.all[segment.number]
        self._unmade.discard(segment)
        self.n_files -= segment.n_places
        if segment.file.name_is_taken:
            self._taken.add(segment.number)
        elif segment.number < self._next_number:
            heapq.heappush(self._unused, segment.number)

    def _next(self, stream: Stream) -> bool:
        """Open another segment for a stream. New frames leave one file to moved ones as long as files can be made."""
        head = self._open[stream]
        if head is not None:
            self.seal(head)
            self.settle()
        if not self.n_available(stream):
            return False
        spare = self.n_free - 1 if stream is Stream.NEW else self.n_free
        segment = self.all[heapq.heappop(self._free)] if spare > 0 else self._new()
        self._last_seq += 1
        segment.log_seq = self._last_seq << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        head_bytes = head_page(self._uuid, segment.number, segment.log_seq)
        segment.incarnation = Incarnation(
            self._files, segment.file, head_bytes, self.geometry.index_pages, segment.log_seq
        )
        segment.state, segment.fill_page = SegmentState.OPEN, self.geometry.index_pages
        self._open[stream] = segment
        return True
