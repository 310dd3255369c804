"""What a segment says about itself: a head page, and one entry per frame. From these a catalog is rebuilt.

The head names the incarnation (``log_seq``) that the segment is in. Every entry's checksum covers it, so that
entries of earlier incarnations, which still lie in a reused file, aren't taken for present ones; as half of a
``log_seq`` is random, bytes of a payload can't pass for an entry either. Entries are only ever appended: a page
of them that is written again, and torn by a crash, keeps its earlier entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.nvme.layout import ENTRY_BYTES, PAGE_BYTES
from kvstore.tiers.nvme.mixing import record_checksums

MAGIC = b"KVSEGMT1"
HEAD = np.dtype([("magic", "S8"), ("uuid", "u1", 16), ("log_seq", "<u8"), ("number", "<u4"), ("checksum", "<u4")])
ENTRY = np.dtype(
    [
        ("key", "u1", 16),
        ("parent", "u1", 16),
        ("namespace", "u1", 16),
        ("page", "<u4"),
        ("pages", "<u4"),
        ("payload_bytes", "<u4"),
        ("checksum", "<u4"),
    ]
)
ENTRY_FIRST = np.uint32(1 << 31)
"""In ``pages``: the block has no parent block."""
ENTRY_LIMITED = np.uint32(1 << 30)
"""In ``pages``: the block was to be found for some time only. Until when, the catalog alone knows."""

DAMAGED, FOREIGN = -1, -2
"""In place of a ``log_seq``."""

Entries = NDArray[np.void]
assert ENTRY.itemsize == ENTRY_BYTES  # noqa: S101 - two modules must agree


def head_page(uuid: bytes, number: int, log_seq: int) -> NDArray[np.uint8]:
    """The first page of a segment, uint8 [4096]."""
    page = np.zeros(PAGE_BYTES, np.uint8)
    head = page[: HEAD.itemsize].view(HEAD)
    head["magic"], head["uuid"], head["number"] = MAGIC, np.frombuffer(uuid, np.uint8), number
    head["log_seq"] = log_seq
    head["checksum"] = _head_checksum(head)
    return page


def log_seq_of(page: NDArray[np.uint8], uuid: bytes, number: int) -> int:
    """The incarnation that a head page names; DAMAGED, or FOREIGN for another segment's or directory's."""
    head = page[: HEAD.itemsize].view(HEAD)
    if head["magic"][0] != MAGIC or head["checksum"][0] != _head_checksum(head)[0]:
        return DAMAGED
    ours = head["number"][0] == number and head["uuid"].tobytes() == uuid
    return int(head["log_seq"][0]) if ours else FOREIGN


def seal(entries: Entries, log_seq: int) -> None:
    """Put the checksums in."""
    entries["checksum"] = _checksums(entries, log_seq)


def read_entries(index: NDArray[np.uint8], log_seq: int) -> Entries:
    """The intact entries of an incarnation in the index pages (without the head), in order of writing."""
    entries = index[: len(index) // ENTRY_BYTES * ENTRY_BYTES].view(ENTRY)
    intact: Entries = entries[entries["checksum"] == _checksums(entries, log_seq)]
    return intact


def _checksums(entries: Entries, log_seq: int) -> NDArray[np.uint32]:
    words = np.empty((9, len(entries)), np.uint64)
    words[0] = log_seq
    words[1:] = np.ascontiguousarray(entries).view("<u8").reshape(len(entries), 8).T
    words[8] &= np.uint64(0xFFFFFFFF)
    return record_checksums(words)


def _head_checksum(head: NDArray[np.void]) -> NDArray[np.uint32]:
    words = np.frombuffer(head.tobytes(), "<u8").astype(np.uint64).reshape(-1, 1)
    words[-1] &= np.uint64(0xFFFFFFFF)
    return record_checksums(words)
