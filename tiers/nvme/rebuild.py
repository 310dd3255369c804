"""A catalog from the segments themselves, and the check of every frame that recovery "strict" makes.

The index pages of a segment say which frames it holds; a frame counts if its own header says the same. Frames
that were dead come back by this if their place was not used again: they are whole, and the newest copy of a
block wins. A block that was to be found for some time only, as its newest copy was written, is left out: nothing here
says for how long, nor whether its life was made longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.native import aligned_bytes
from kvstore.tiers.nvme.cleared import read_marks
from kvstore.tiers.nvme.files import Extent, Files
from kvstore.tiers.nvme.layout import FRAME_BYTES_MIN, PAGE_BYTES, Geometry, Int64s
from kvstore.tiers.nvme.namebook import number_for
from kvstore.tiers.nvme.names import FIRST, RECORD, Records, seal
from kvstore.tiers.nvme.recovery import SegmentOnDisk, newest_of_each
from kvstore.tiers.nvme.segment_index import ENTRY_FIRST, ENTRY_LIMITED, read_entries

READ_BYTES = 32 << 20
"""Memory for frames and headers that are looked at together."""


class FrameFacts(Protocol):
    """What the tier needs to know about a frame; the frame format has the real one."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...


Inspect = Callable[[memoryview], FrameFacts | None]
"""From the whole header of a frame to its facts; None when it isn't intact."""

Verify = Callable[[memoryview], bool]
"""Whether the bytes of a whole frame are intact."""


def rebuild_names(
    files: Files,
    geometry: Geometry,
    segments: list[SegmentOnDisk],
    inspect: Inspect,
    namespaces: dict[int, tuple[bytes, str]],
) -> Records:
    """Names of all frames that the segments hold, in order of writing. Adds to ``namespaces``, undescribed.

    Frames that were cleared are left out, and blocks that had an end.
    """
    marks = read_marks(files)
    numbers_of = {digest: number for number, (digest, _) in namespaces.items()}
    found, limits = [np.zeros(0, RECORD)], [np.zeros(0, np.bool_)]
    for segment in sorted(segments, key=lambda each: each.log_seq):
        if segment.log_seq < 0:
            continue
        records, digests, limited = _names_of(files, geometry, segment)
        counts = ~marks.excludes(segment.log_seq, digests)
        records, digests, limited = records[counts], digests[counts], limited[counts]
        good = np.zeros(len(records), np.bool_)
        for at, buffer in frames_of(files, segment.handle, records, headers_only=True):
            facts = inspect(buffer)
            value = records[at]["value"]
            good[at] = facts is not None and same_frame(facts, value, digests[at].tobytes())
        records, digests, limited = records[good], digests[good], limited[good]
        kinds, which = np.unique(digests.view("V16").reshape(-1), return_inverse=True)
        for digest in (kind.tobytes() for kind in kinds):
            if digest not in numbers_of:
                numbers_of[digest] = number_for(digest, namespaces)
                namespaces[numbers_of[digest]] = (digest, "")
        numbers = np.array([numbers_of[kind.tobytes()] for kind in kinds], np.uint32)
        if len(records):
            records["value"]["namespace"] = numbers[which.reshape(-1)]
        found.append(records)
        limits.append(limited)
    together = np.concatenate(found).astype(RECORD)  # concatenate makes big-endian fields native
    together = together[~_has_limit(together, np.concatenate(limits))]
    together["value"]["age"] = np.arange(len(together))
    seal(together)
    return together


def same_frame(facts: FrameFacts, value: Any, namespace: bytes) -> bool:
    """Whether a frame is the one that a name (the ``value`` of one record) and the digest of its namespace say."""
    return bool(
        facts.key == value["key"].tobytes()
        and facts.parent == value["parent"].tobytes()
        and facts.namespace == namespace
        and facts.frame_bytes == int(value["pages"]) * PAGE_BYTES
        and facts.payload_bytes == int(value["payload_bytes"])
    )


def verified(files: Files, segments: list[SegmentOnDisk], records: Records, verify: Verify) -> NDArray[np.bool_]:
    """Which frames are intact on the disk, read whole; bool [n]."""
    good = np.zeros(len(records), np.bool_)
    for segment in segments:
        mine = np.flatnonzero(records["value"]["segment"] == segment.number)
        for at, buffer in frames_of(files, segment.handle, records[mine], headers_only=False):
            good[mine[at]] = verify(buffer)
    return good


def _names_of(
    files: Files, geometry: Geometry, segment: SegmentOnDisk
) -> tuple[Records, NDArray[np.uint8], NDArray[np.bool_]]:
    """What the index pages of a segment say: names, the digests of their namespaces (uint8 [n, 16]),
    and which blocks were to be found for some time only (bool [n])."""
    index = aligned_bytes((geometry.index_pages - 1) * PAGE_BYTES)
    index[:] = 0
    pages = [
        Extent(PAGE_BYTES + at, ((int(index.ctypes.data) + at, PAGE_BYTES),)) for at in range(0, len(index), PAGE_BYTES)
    ]
    files.read(segment.handle, pages)
    entries = read_entries(index, segment.log_seq)
    sizes = entries["pages"] & ~(ENTRY_FIRST | ENTRY_LIMITED)
    firsts = entries["page"].astype(np.int64)
    inside = (firsts >= geometry.index_pages) & ((firsts + sizes) * PAGE_BYTES <= segment.size_bytes)
    inside &= (sizes.astype(np.int64) * PAGE_BYTES >= FRAME_BYTES_MIN) & (
        entries["payload_bytes"] < sizes.astype(np.int64) * PAGE_BYTES
    )
    entries, sizes = entries[inside], sizes[inside]
    records = np.zeros(len(entries), RECORD)
    records["place"]["log_seq"], records["place"]["page"] = segment.log_seq, entries["page"]
    value = records["value"]
    for name in ("key", "parent", "payload_bytes"):
        value[name] = entries[name]
    value["segment"], value["pages"] = segment.number, sizes
    value["flags"] = np.where(entries["pages"] & ENTRY_FIRST, FIRST, 0)
    return records, np.ascontiguousarray(entries["namespace"]), entries["pages"] & ENTRY_LIMITED != 0


def _has_limit(records: Records, limited: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which frames have an end, or are of a block whose last written frame has one; bool [n]."""
    if not limited.any():
        return limited
    keys = np.ascontiguousarray(records["value"]["key"]).view("V16").reshape(-1)
    return limited | np.isin(keys, keys[limited & newest_of_each(records)])


def frames_of(files: Files, handle: int, records: Records, headers_only: bool) -> Iterator[tuple[int, memoryview]]:
    """Frames, or their headers, one after the other, with their places in ``records``; unreadable ones are left out."""
    pages = records["value"]["pages"].astype(np.int64)
    if headers_only:
        pages -= -(-records["value"]["payload_bytes"].astype(np.int64) // PAGE_BYTES)
    offsets = records["place"]["page"].astype(np.int64) * PAGE_BYTES
    start = 0
    while start < len(records):
        ends = np.cumsum(pages[start:]) * PAGE_BYTES
        n = max(int(np.searchsorted(ends, READ_BYTES, side="right")), 1)
        yield from _read(files, handle, start, offsets[start : start + n], pages[start : start + n] * PAGE_BYTES)
        start += n


def _read(files: Files, handle: int, start: int, offsets: Int64s, sizes: Int64s) -> Iterator[tuple[int, memoryview]]:
    memory = aligned_bytes(int(sizes.sum()))
    places = np.cumsum(sizes) - sizes
    base = int(memory.ctypes.data)
    extents = [
        Extent(offset, ((base + place, size),))
        for offset, place, size in zip(offsets.tolist(), places.tolist(), sizes.tolist(), strict=True)
    ]
    done = files.read(handle, extents)
    for i in np.flatnonzero(done == sizes).tolist():
        place = int(places[i])
        yield start + i, memoryview(memory[place : place + int(sizes[i])])  # type: ignore[arg-type]
