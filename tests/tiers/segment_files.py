"""An NVMe directory looked at from outside: frames found by hand in its files, and the room that it takes.

Knows docs/FORMAT.md and no code of the tier or of frames.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECTOR_BYTES = 4096
_MAGIC = b"KVSFRAME"
# Offsets in a frame header: see "Frames" in docs/FORMAT.md.
_PAYLOAD_OFFSET, _PAYLOAD_BYTES, _FRAME_BYTES, _KEY, _PARENT, _LOG_SEQ = 16, 40, 56, 88, 104, 80


class FrameOnDisk(NamedTuple):
    """A frame, or the remains of one, in a segment file."""

    path: Path
    offset: int
    key: bytes
    parent: bytes
    log_seq: int
    payload_offset: int
    payload_bytes: int
    frame_bytes: int

    def payload(self) -> bytes:
        """What lies there now; nothing for a header that can't be true."""
        if self.offset + self.payload_offset + self.payload_bytes > self.path.stat().st_size:
            return b""
        with self.path.open("rb") as file:
            file.seek(self.offset + self.payload_offset)
            return file.read(self.payload_bytes)

    def flip(self, at: int) -> None:
        """One bit of the byte ``at`` of the frame is wrong from now on."""
        with self.path.open("r+b") as file:
            file.seek(self.offset + at)
            (value,) = file.read(1)
            file.seek(self.offset + at)
            file.write(bytes([value ^ 1 << at % 8]))


def key_in(sector: bytes) -> bytes:
    """The key of the frame that begins with this sector; empty if none does."""
    return sector[_KEY : _KEY + 16] if sector.startswith(_MAGIC) else b""


def segment_paths(directory: Path) -> list[Path]:
    """The segment files of a directory."""
    return sorted(directory.glob("segment-*"))


def frame_at(path: Path, offset: int) -> FrameOnDisk | None:
    """The frame that starts there, whether it is named or not, intact or not."""
    with path.open("rb") as file:
        file.seek(offset)
        head = file.read(SECTOR_BYTES)
    if len(head) < SECTOR_BYTES or not head.startswith(_MAGIC):
        return None
    (payload_offset,) = struct.unpack_from("<I", head, _PAYLOAD_OFFSET)
    (payload_bytes,) = struct.unpack_from("<Q", head, _PAYLOAD_BYTES)
    (frame_bytes,) = struct.unpack_from("<Q", head, _FRAME_BYTES)
    (log_seq,) = struct.unpack_from("<Q", head, _LOG_SEQ)
    key, parent = head[_KEY : _KEY + 16], head[_PARENT : _PARENT + 16]
    return FrameOnDisk(path, offset, key, parent, log_seq, payload_offset, payload_bytes, frame_bytes)


def frames_in(directory: Path) -> Iterator[FrameOnDisk]:
    """All frames that lie in a directory, the dead ones too."""
    for path in segment_paths(directory):
        for offset in range(0, path.stat().st_size, SECTOR_BYTES):
            frame = frame_at(path, offset)
            if frame is not None:
                yield frame


def frames_of(directory: Path, key: bytes) -> list[FrameOnDisk]:
    """All frames of one block, the dead ones too."""
    return [frame for frame in frames_in(directory) if frame.key == key]


def directory_bytes(directory: Path) -> int:
    """What the directory takes up, everything below it included."""
    total_bytes = directory.lstat().st_blocks * 512
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            try:
                total_bytes += (Path(folder) / name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue  # removed by the tier meanwhile
    return total_bytes
