"""Names as the catalog holds them: where a frame lies, and which block it is. Fixed-size, checksummed records.

A name's key is ``(log_seq, page)``: the incarnation of a segment and a place in it. Places of one incarnation
are given once, so a key never comes again, names are put in at the end of the catalog, and its order is that
of writing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.nvme.mixing import record_checksums

FIRST = 1
"""Flag: the block has no parent block; its parent key is a root key."""
_UNTIL_STEP_S = 2
_UNTIL_MAX = (1 << 31) - 1
"""In the other bits of the flags: until when the block may be found, in steps of Unix time; 0 = without end."""

KEY = np.dtype([("log_seq", ">u8"), ("page", ">u4")])
VALUE = np.dtype(
    [
        ("key", "u1", 16),
        ("parent", "u1", 16),
        ("age", "<u8"),
        ("segment", "<u4"),
        ("pages", "<u4"),
        ("namespace", "<u4"),
        ("payload_bytes", "<u4"),
        ("flags", "<u4"),
        ("checksum", "<u4"),
    ]
)
RECORD = np.dtype([("place", KEY), ("value", VALUE)])
"""A name as read back: key and value side by side."""

Records = NDArray[np.void]
NO_RECORDS: Records = np.zeros(0, RECORD)


def flags_of(first: NDArray[np.bool_], until_s: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Flags of names. ``until_s``: Unix time, inf for no end; what is kept of it is never later."""
    steps = np.clip(until_s / _UNTIL_STEP_S, 1, _UNTIL_MAX).astype(np.uint32)
    steps[np.isinf(until_s)] = 0
    flags: NDArray[np.uint32] = steps << np.uint32(1) | first
    return flags


def until_of(records: Records) -> NDArray[np.float64]:
    """Until when blocks may be found: Unix time, inf for no end; [n]."""
    steps = records["value"]["flags"] >> np.uint32(1)
    return np.where(steps == 0, np.inf, steps.astype(np.float64) * _UNTIL_STEP_S)


def seal(records: Records) -> None:
    """Put the checksums in."""
    records["value"]["checksum"] = _checksums(records)


def intact(records: Records) -> NDArray[np.bool_]:
    """Which records are what was sealed; bool [n]."""
    good: NDArray[np.bool_] = records["value"]["checksum"] == _checksums(records)
    return good


def items(records: Records) -> list[tuple[bytes, bytes]]:
    """Keys and values for the catalog."""
    places = np.ascontiguousarray(records["place"]).view(f"V{KEY.itemsize}").tolist()
    values = np.ascontiguousarray(records["value"]).view(f"V{VALUE.itemsize}").tolist()
    return list(zip(places, values, strict=True))


def place_keys(log_seqs: NDArray[np.int64], pages: NDArray[np.int64]) -> list[bytes]:
    """Catalog keys of places."""
    places = np.empty(len(pages), KEY)
    places["log_seq"], places["page"] = log_seqs, pages
    raw, size = places.tobytes(), KEY.itemsize
    return [raw[i : i + size] for i in range(0, len(raw), size)]


def _checksums(records: Records) -> NDArray[np.uint32]:
    words = np.empty((10, len(records)), np.uint64)
    words[0], words[1] = records["place"]["log_seq"], records["place"]["page"]
    words[2:] = np.ascontiguousarray(records["value"]).view("<u8").reshape(len(records), 8).T
    words[9] &= np.uint64(0xFFFFFFFF)
    return record_checksums(words)
