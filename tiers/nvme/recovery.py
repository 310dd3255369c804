"""From what lies on the disk to what the tier serves: names checked against segments, whole prefixes only, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstore.native import aligned_bytes
from kvstore.tiers.nvme.files import Extent, Files
from kvstore.tiers.nvme.layout import PAGE_BYTES, Geometry, Int64s
from kvstore.tiers.nvme.lookup import KeyLookup
from kvstore.tiers.nvme.names import FIRST, Records
from kvstore.tiers.nvme.segment_index import DAMAGED, log_seq_of
from kvstore.tiers.nvme.superblock import segment_name, segment_numbers


@dataclass(frozen=True, slots=True)
class SegmentOnDisk:
    """A segment file as it was found. ``log_seq`` is below 0 when it has no intact head of its own."""

    number: int
    handle: int
    size_bytes: int
    log_seq: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """Frames found when a directory was opened, parents before children, else oldest first; arrays ``[n]``.

    ``namespaces`` are the numbers of ``NvmeTier.namespaces``. ``keys`` and ``parents`` are uint8 [n, 16]. ``until_s``:
    Unix time from which on a block must not be found, perhaps past; inf for none.
    """

    slots: Int64s
    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    namespaces: NDArray[np.uint32]
    payload_bytes: NDArray[np.uint32]
    frame_bytes: NDArray[np.uint32]
    until_s: NDArray[np.float64]


def open_segments(files: Files, uuid: bytes) -> list[SegmentOnDisk]:
    """Open all segment files and read their heads. Raises OSError for a file that is there and can't be opened."""
    page = aligned_bytes(PAGE_BYTES)
    found: list[SegmentOnDisk] = []
    try:
        for number in segment_numbers(files.names()):
            try:
                handle = files.open(segment_name(number))
            except FileNotFoundError:
                continue
            found.append(SegmentOnDisk(number, handle, 0, DAMAGED))
            size_bytes = files.size_bytes(handle)
            page[:] = 0
            done = files.read(handle, [Extent(0, ((int(page.ctypes.data), PAGE_BYTES),))])
            log_seq = log_seq_of(page, uuid, number) if done[0] == PAGE_BYTES else DAMAGED
            found[-1] = SegmentOnDisk(number, handle, size_bytes, log_seq)
    except OSError:
        for segment in found:
            files.close(segment.handle)
        raise
    return found


def with_heads(segments: list[SegmentOnDisk], records: Records) -> list[SegmentOnDisk]:
    """Where a head is damaged, what the names say is believed: those of earlier incarnations were taken out before
    the segment was used again. Readers check every frame in any case."""
    damaged = {segment.number for segment in segments if segment.log_seq == DAMAGED}
    said: dict[int, int] = {}
    numbers = records["value"]["segment"]
    for at in np.flatnonzero(np.isin(numbers, list(damaged))).tolist() if damaged else ():
        number = int(numbers[at])
        said[number] = max(said.get(number, DAMAGED), int(records["place"]["log_seq"][at]))
    return [replace(each, log_seq=said[each.number]) if each.number in said else each for each in segments]


def in_segments(records: Records, segments: list[SegmentOnDisk], geometry: Geometry) -> NDArray[np.bool_]:
    """Which names point to a whole extent of a segment that is in the same incarnation; bool [n]."""
    if not segments:
        return np.zeros(len(records), np.bool_)
    facts = np.array([(each.number, each.log_seq, each.size_bytes) for each in segments], np.int64)
    sorted_numbers, log_seqs, sizes = facts[np.argsort(facts[:, 0])].T
    value = records["value"]
    numbers = value["segment"].astype(np.int64)
    at = np.minimum(np.searchsorted(sorted_numbers, numbers), len(segments) - 1)
    known = sorted_numbers[at] == numbers
    firsts, pages = records["place"]["page"].astype(np.int64), value["pages"].astype(np.int64)
    inside = (firsts >= geometry.index_pages) & (pages > 0) & ((firsts + pages) * PAGE_BYTES <= sizes[at])
    same: NDArray[np.bool_] = known & inside & (log_seqs[at] == records["place"]["log_seq"].astype(np.int64))
    return same


def newest_of_each(records: Records) -> NDArray[np.bool_]:
    """Which names are the last written of their key; bool [n]. ``records`` are in order of writing."""
    pairs = np.ascontiguousarray(records["value"]["key"]).view(np.uint64).reshape(-1, 2)
    last = np.ones(len(records), np.bool_)
    halves = np.sort(pairs[:, 0])
    if not (halves[1:] == halves[:-1]).any():
        return last
    order = np.lexsort((np.arange(len(records)), pairs[:, 1], pairs[:, 0]))
    last[order[:-1]] = (pairs[order[1:]] != pairs[order[:-1]]).any(axis=1)
    return last


def closed_and_ordered(records: Records) -> Int64s:
    """Indexes of the names whose ancestors are all there, parents before children, else oldest first.

    Keys are distinct. Walks up all chains at once, twice as far in every round.
    """
    n = len(records)
    value = records["value"]
    keys = np.ascontiguousarray(value["key"])
    lookup = KeyLookup(n)
    lookup.add(keys, np.arange(n))
    parents = lookup.find(keys, value["parent"])
    first = (value["flags"] & FIRST) != 0
    lost = ~first & (parents < 0)
    up = parents.copy()  # also of one that calls itself a first block: if its parent is here, it is none
    depth = np.ones(n, np.int64)
    age = value["age"].astype(np.int64)
    for _ in range(n.bit_length() + 1):
        climbing = np.flatnonzero(up >= 0)
        to = up[climbing]
        depth[climbing] += depth[to]
        lost[climbing] |= lost[to]
        age[climbing] = np.maximum(age[climbing], age[to])
        up[climbing] = up[to]
    lost[up >= 0] = True  # a cycle, which no hash chain has
    order = np.lexsort((depth, age))
    kept: Int64s = order[~lost[order]]
    return kept
