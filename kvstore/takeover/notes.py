"""What the namespaces are whose digests stand in the slot directory: a memory file of lines, kept beside it.

A block is labelled with the digest of its namespace only once the file has a line for that digest. So a next daemon
can list every namespace that it takes blocks over of, and clear it, before any client has opened it again.
"""

from __future__ import annotations

import json
import os

from kvstore.errors import IntegrityError
from kvstore.tiers import memfd
from kvstore.types import KEY_BYTES

NOTES_BYTES_MAX = 64 << 20
"""Far more than the descriptions of all namespaces that a daemon keeps open."""


class NamespaceNotes:
    """The daemon's side: lines are added, none is ever changed. Close it when done."""

    def __init__(self) -> None:
        """Raises OSError when there is no memory file."""
        self.fd = memfd.create("kvstore-namespaces", 0)
        self._end = 0
        self._noted: set[bytes] = set()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._noted

    def add(self, digest: bytes, description: str) -> None:
        """Note what has this digest; it is safe once this returns. Raises OSError, and then nothing was noted."""
        line = json.dumps([digest.hex(), description]).encode() + b"\n"
        if self._end + len(line) > NOTES_BYTES_MAX:
            raise OSError(f"descriptions of namespaces would have more than {NOTES_BYTES_MAX} bytes")
        written = 0
        while written < len(line):
            written += os.pwrite(self.fd, line[written:], self._end + written)
        self._end += len(line)
        self._noted.add(digest)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def read_notes(fd: int) -> dict[bytes, str]:
    """Descriptions by digest, of a file that an earlier daemon wrote; the descriptor stays the caller's.

    Raises IntegrityError or ValueError for what no daemon can have written, OSError. A last line that is not whole
    is left out: no block has a label with it.
    """
    size_bytes = os.fstat(fd).st_size
    if size_bytes > NOTES_BYTES_MAX:
        raise IntegrityError(f"descriptions of namespaces have {size_bytes} bytes, the most is {NOTES_BYTES_MAX}")
    text = bytearray()
    while part := os.pread(fd, size_bytes - len(text), len(text)):
        text += part
    found: dict[bytes, str] = {}
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        digest, description = json.loads(line)
        if len(bytes.fromhex(digest)) != KEY_BYTES or not isinstance(description, str):
            raise IntegrityError(f"{digest!r:.80} is the digest of no namespace")
        found[bytes.fromhex(digest)] = description
    return found
