"""How a capacity is divided: segments, their index pages, the catalog's room, and what may be live at once.

A segment file is ``[head page | index pages | frames]``. All arithmetic of sizes is here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.config import format_size
from kvstore.errors import BadInputError, ConfigError

PAGE_BYTES = 4096
FRAME_BYTES_MIN = 2 * PAGE_BYTES
"""A frame has at least one page of header and one of payload."""

ENTRY_BYTES = 64
"""One frame in a segment's index."""

NAME_BYTES = 256
"""Room of the catalog for one frame. Measured: 100 to 170 B, with batches of 20 to 5000 names."""

# The more segments, the less has to be moved; but a batch of writes should not spread over many, nor large frames
# leave much of a segment unfilled, and each is an open file.
_SEGMENTS_FEW, _SEGMENT_BYTES_MIN, _SEGMENT_BYTES_FEW = 16, 1 << 20, 32 << 20
_SEGMENTS_MANY, _SEGMENT_BYTES_MAX = 64, 256 << 20
_SEGMENTS_MAX = 512
_SEGMENTS_LEAST = 6
_SEGMENT_FILES_MAX = 4096
_CATALOG_SHARE, _CATALOG_BYTES_MIN = 64, 384 << 10
_NAMESPACES_SHARE, _NAMESPACES_BYTES_MIN, _NAMESPACES_BYTES_MAX = 1024, 128 << 10, 16 << 20
_FOLDERS_BYTES = 64 << 10
"""Superblock, locks, directory blocks."""
_RESERVE_SHARE, _RESERVE_LEAST = 8, 3

Int64s = NDArray[np.int64]


def pages_of(n_bytes: int) -> int:
    """Whole pages that hold so many bytes."""
    return -(-n_bytes // PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The division of one directory. Bytes unless said otherwise."""

    capacity_bytes: int
    segment_bytes: int

    @classmethod
    def of(cls, capacity_bytes: int, segment_bytes: int = 0) -> Geometry:
        """``segment_bytes`` 0 chooses a size. Raises ConfigError when no useful tier fits."""
        if segment_bytes and (segment_bytes % PAGE_BYTES or segment_bytes < 16 * PAGE_BYTES):
            raise ConfigError(
                f"segment_bytes is {segment_bytes}; it must be a multiple of {PAGE_BYTES}, at least {16 * PAGE_BYTES}"
            )
        geometry = cls(capacity_bytes, segment_bytes or _default_segment_bytes(capacity_bytes))
        if geometry.n_segments > _SEGMENT_FILES_MAX:
            raise ConfigError(
                f"segment_bytes is {geometry.segment_bytes}, which makes {geometry.n_segments} files; "
                f"at most {_SEGMENT_FILES_MAX} are kept open: give larger segments"
            )
        if geometry.n_segments < _SEGMENTS_LEAST:
            least = _SEGMENTS_LEAST * geometry.segment_bytes
            raise ConfigError(
                f"an NVMe tier of {format_size(capacity_bytes)} is too small for segments of "
                f"{format_size(geometry.segment_bytes)}: give it at least {format_size(least * 1.1 + (1 << 20))}, "
                "or start with an empty directory (recovery 'none' empties it)"
            )
        return geometry

    @property
    def catalog_bytes(self) -> int:
        """The catalog's file never grows above this."""
        return _catalog_bytes(self.capacity_bytes)

    @property
    def namespaces_bytes(self) -> int:
        """The file of namespaces never grows above this; while it is replaced there are two."""
        return _namespaces_bytes(self.capacity_bytes) // 2

    @property
    def n_segments(self) -> int:
        """Segment files that fit."""
        return _segments_room(self.capacity_bytes) // self.segment_bytes

    def n_places(self, file_bytes: int) -> int:
        """How many segments' room a segment file takes that may have another size."""
        return max(-(-file_bytes // self.segment_bytes), 1)

    @property
    def index_pages(self) -> int:
        """Pages before the frames of a segment: its head and its index, large enough for the smallest frames."""
        return 1 + pages_of(self.segment_bytes // FRAME_BYTES_MIN * ENTRY_BYTES)

    @property
    def segment_pages(self) -> int:
        """Pages of a segment file."""
        return self.segment_bytes // PAGE_BYTES

    @property
    def frame_pages(self) -> int:
        """Pages of a segment that hold frames."""
        return self.segment_pages - self.index_pages

    @staticmethod
    def reserve_segments(n_segments: int) -> int:
        """Of so many segments, those whose room is never live: dead frames gather there, so that little is moved."""
        return max(_RESERVE_LEAST, -(-n_segments // _RESERVE_SHARE))

    def live_bytes(self, n_segments: int) -> int:
        """Bytes that may be live (charged) with so many segment files."""
        return max(n_segments - self.reserve_segments(n_segments), 0) * self.frame_pages * PAGE_BYTES

    @property
    def live_capacity_bytes(self) -> int:
        """Frame bytes that can be live at once, if frames fill segments without a rest."""
        return self.live_bytes(self.n_segments)

    def charged_bytes(self, pages: Int64s) -> Int64s:
        """What frames of these sizes take from the live bytes: their share of the rest that segments of such
        frames leave unfilled, and of the catalog's room."""
        per_segment = np.maximum(self.frame_pages // np.maximum(pages, 1), 1)
        least = -(-self.live_capacity_bytes // max(self.catalog_bytes // NAME_BYTES, 1))
        charges: Int64s = np.maximum(-(-self.frame_pages * PAGE_BYTES // per_segment), least)
        return charges

    def check_frame(self, frame_bytes: int) -> int:
        """Pages of a frame. Raises BadInputError for a size that can't be stored."""
        if frame_bytes % PAGE_BYTES or frame_bytes < FRAME_BYTES_MIN:
            raise BadInputError(
                f"frame_bytes is {frame_bytes}; it must be a multiple of {PAGE_BYTES}, at least {FRAME_BYTES_MIN}"
            )
        pages = frame_bytes // PAGE_BYTES
        if pages > self.frame_pages:
            raise BadInputError(
                f"a frame of {format_size(frame_bytes)} doesn't fit a segment of {format_size(self.segment_bytes)}: "
                "give the NVMe tier more capacity or larger segments"
            )
        return pages

    def n_frames(self, frame_bytes: int) -> int:
        """How many frames of one size can be live at once."""
        charge = int(self.charged_bytes(np.array([pages_of(frame_bytes)], np.int64))[0])
        return self.live_capacity_bytes // charge


def capacity_for(live_bytes: int, frame_bytes: int) -> int:
    """A capacity, close to the smallest, with whose default segments ``live_bytes`` of such frames can be live.

    Raises BadInputError for a frame that isn't whole pages.
    """
    if frame_bytes % PAGE_BYTES or frame_bytes < FRAME_BYTES_MIN or live_bytes < 0:
        raise BadInputError(
            f"frame_bytes is {frame_bytes}, live_bytes {live_bytes}; frames are multiples of {PAGE_BYTES} bytes"
        )
    n_frames = -(-live_bytes // frame_bytes)
    capacity_bytes = max(live_bytes, 8 << 20, 7 * frame_bytes)
    while True:
        capacity_bytes = pages_of(capacity_bytes) * PAGE_BYTES
        geometry = Geometry(capacity_bytes, _default_segment_bytes(capacity_bytes))
        fits = geometry.n_segments >= _SEGMENTS_LEAST and geometry.frame_pages * PAGE_BYTES >= frame_bytes
        if fits and geometry.n_frames(frame_bytes) >= n_frames and geometry.live_capacity_bytes >= live_bytes:
            return capacity_bytes
        capacity_bytes += max(capacity_bytes // 256, PAGE_BYTES)


def _catalog_bytes(capacity_bytes: int) -> int:
    return pages_of(max(capacity_bytes // _CATALOG_SHARE, _CATALOG_BYTES_MIN)) * PAGE_BYTES


def _namespaces_bytes(capacity_bytes: int) -> int:
    share = capacity_bytes // _NAMESPACES_SHARE
    return pages_of(min(max(share, _NAMESPACES_BYTES_MIN), _NAMESPACES_BYTES_MAX)) * PAGE_BYTES


def _segments_room(capacity_bytes: int) -> int:
    return max(capacity_bytes - _catalog_bytes(capacity_bytes) - _namespaces_bytes(capacity_bytes) - _FOLDERS_BYTES, 0)


def _default_segment_bytes(capacity_bytes: int) -> int:
    room = _segments_room(capacity_bytes)
    few = min(room // _SEGMENTS_FEW, _SEGMENT_BYTES_FEW)
    many = min(room // _SEGMENTS_MANY, _SEGMENT_BYTES_MAX)
    size = max(few, many, room // _SEGMENTS_MAX, _SEGMENT_BYTES_MIN)
    return size // PAGE_BYTES * PAGE_BYTES
