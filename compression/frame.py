"""Frames: how a block lies on disk and on other hosts, self-describing and with a checksum for every byte of it.

A frame is a header (what block this is, where each page group of each layer lies, checksums) and a payload, each
padded to 4096 bytes. docs/FORMAT.md gives it byte by byte. ``frame_format`` has the records, ``frame_header`` reads one
header, ``frame_layout`` writes and verifies batches of a namespace's frames.
"""

from __future__ import annotations

from kvstore.compression.frame_format import CODEC_RAW, PAGE_GROUP, SECTOR_BYTES, VERSION, FrameError, Place, PlaneKind
from kvstore.compression.frame_header import (
    FrameFacts,
    FrameGroup,
    FrameHeader,
    FramePlane,
    decode_header,
    header_bytes_of,
    inspect,
    verify_frame,
)
from kvstore.compression.frame_layout import FrameLayout, FrameRow

__all__ = [
    "CODEC_RAW",
    "PAGE_GROUP",
    "SECTOR_BYTES",
    "VERSION",
    "FrameError",
    "FrameFacts",
    "FrameGroup",
    "FrameHeader",
    "FrameLayout",
    "FramePlane",
    "FrameRow",
    "Place",
    "PlaneKind",
    "decode_header",
    "header_bytes_of",
    "inspect",
    "verify_frame",
]
