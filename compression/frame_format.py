"""The bytes of a frame: records, numbers and limits of format version 1. docs/FORMAT.md has the same as tables.

A frame is a header and a payload, each padded to ``SECTOR_BYTES``. The header is, in this order::

    HEADER, then GROUP x n_groups, PLANE x n_planes, PAGE_GROUP x n_page_groups, the row, zeros, CHECKSUM

Everything is little-endian. Numbers below are on disks and on other hosts: they are added to, never reused.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np

from kvstore.errors import IntegrityError
from kvstore.types import GroupKind

MAGIC = b"KVSFRAME"
VERSION = 1
SECTOR_BYTES = 4096
"""Headers, payloads and frames are multiples of it, so that direct I/O takes them as they are."""

HEADER_BYTES_MAX = 4 << 20
PAYLOAD_BYTES_MAX = (1 << 32) - 1

CODEC_RAW = 0
KNOWN_CODECS = frozenset({CODEC_RAW})


class FrameError(IntegrityError):
    """These bytes are no intact frame header that this release can read."""


class PlaneKind(IntEnum):
    """What of a page a plane holds."""

    WHOLE = 0
    """All of it: a latent, a state, opaque bytes, or K and V of a page one after the other."""
    K = 1
    V = 2


class Place(IntEnum):
    """Where in its chain a block stands: what its parent key is the key of."""

    UNKNOWN = 0
    FIRST = 1
    """The parent is a root, and no frame has its key."""
    BEHIND = 2
    """The parent is another block."""


HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u2"),
        ("codec", "u1"),
        ("flags", "u1"),
        ("header_bytes", "<u4"),
        ("payload_offset", "<u4"),
        ("block_tokens", "<u4"),
        ("page_tokens", "<u4"),
        ("n_groups", "<u4"),
        ("n_planes", "<u4"),
        ("n_page_groups", "<u4"),
        ("payload_bytes", "<u8"),
        ("raw_bytes", "<u8"),
        ("frame_bytes", "<u8"),
        ("namespace", "V16"),
        # Up to here a layout fixes every byte; what follows differs from frame to frame.
        ("log_seq", "<u8"),
        ("key", "V16"),
        ("parent", "V16"),
        ("extra_digest", "V16"),
        ("row_bytes", "<u4"),
        ("extra_bytes", "u1"),
        ("place", "u1"),
        ("reserved", "V18"),
    ]
)
"""The fixed part, 160 bytes."""

FIXED_BY_LAYOUT_BYTES = 80
"""``HEADER`` up to and without ``log_seq``."""

GROUP = np.dtype(
    [
        ("kind", "u1"),
        ("dtype", "u1"),
        ("layout", "u1"),
        ("n_planes", "u1"),
        ("layers", "<u4"),
        ("kv_heads", "<u4"),
        ("head_dim", "<u4"),
        ("window_tokens", "<u4"),
        ("page_bytes", "<u4"),
        ("pages", "<u4"),
        ("reserved", "<u4"),
    ]
)
"""A group of layers, 32 bytes: ``pages`` of ``page_bytes`` raw bytes per layer."""

PLANE = np.dtype(
    [
        ("kind", "u1"),
        ("codec", "u1"),
        ("flags", "<u2"),
        ("page_bytes", "<u4"),
        ("pages_per_group", "<u4"),
        ("codec_data", "<u4"),
    ]
)
"""A plane of a group, 16 bytes: ``page_bytes`` raw bytes of every page."""

PAGE_GROUP = np.dtype(
    [("offset", "<u4"), ("stored_bytes", "<u4"), ("raw_bytes", "<u4"), ("codec_data", "<u4"), ("checksum", "<u8")]
)
"""A page group, 24 bytes: where it lies in the payload, and xxh3_64 of its stored bytes."""

CHECKSUM_BYTES = 8
"""The last bytes of a header: xxh3_64 of all header bytes before them, unsigned."""

KIND_NUMBERS: Mapping[str, int] = {GroupKind.FULL: 0, GroupKind.SLIDING: 1, GroupKind.STATE: 2, GroupKind.MLA: 3}
LAYOUT_NUMBERS: Mapping[str, int] = {"NHD": 0, "HND": 1, "opaque": 2}
DTYPE_NUMBERS: Mapping[str, int] = {
    "float32": 1,
    "float16": 2,
    "bfloat16": 3,
    "float8_e4m3": 4,
    "float8_e5m2": 5,
    "int8": 6,
    "uint8": 7,
}


def padded(n_bytes: int) -> int:
    """The next multiple of ``SECTOR_BYTES``."""
    return -(-n_bytes // SECTOR_BYTES) * SECTOR_BYTES
