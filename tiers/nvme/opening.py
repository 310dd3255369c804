"""Opening a directory: lock, superblock, segments, and the names that count."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.errors import ConfigError
from kvstore.tiers.nvme.catalog import Catalog, read_names
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.layout import Geometry, Int64s
from kvstore.tiers.nvme.namebook import NameBook, read_namespaces
from kvstore.tiers.nvme.names import Records
from kvstore.tiers.nvme.rebuild import Inspect, Verify, rebuild_names, verified
from kvstore.tiers.nvme.recovery import (
    SegmentOnDisk,
    closed_and_ordered,
    in_segments,
    newest_of_each,
    open_segments,
)
from kvstore.tiers.nvme.superblock import CATALOG, DirectoryLock, Superblock, clear, open_superblock, segment_name

log = logging.getLogger("kvstore.nvme")

RECOVERIES = ("none", "normal", "strict")


@dataclass(slots=True)
class Opened:
    """An open directory. ``records``: what is served, parents first. ``stale``: names that are to go."""

    lock: DirectoryLock
    files: Files
    superblock: Superblock
    geometry: Geometry
    segments: list[SegmentOnDisk]
    book: NameBook
    records: Records
    stale: Records
    facts: dict[str, int]
    """Counts of what was dropped, and whether the catalog was rebuilt."""


def open_directory(
    directory: Path,
    capacity_bytes: int,
    segment_bytes: int,
    files: Files | None,
    recovery: str,
    inspect: Inspect,
    verify: Verify | None,
) -> Opened:
    """Open or make a tier's directory. Raises ConfigError (see ``NvmeTier``), CatalogError, OSError."""
    if recovery not in RECOVERIES:
        raise ConfigError(f"recovery is {recovery!r}; known are {', '.join(RECOVERIES)}")
    lock = DirectoryLock(directory)
    try:
        files = DirectFiles(directory) if files is None else files
        wanted = Geometry.of(capacity_bytes, segment_bytes)
        if recovery == "none":
            clear(files, directory, wanted.segment_bytes)
        superblock = open_superblock(files, directory, wanted.segment_bytes)
        geometry = Geometry.of(capacity_bytes, superblock.segment_bytes)
        return _open(lock, files, superblock, geometry, directory, recovery, inspect, verify)
    except BaseException:
        lock.release()
        raise


def _open(
    lock: DirectoryLock,
    files: Files,
    superblock: Superblock,
    geometry: Geometry,
    directory: Path,
    recovery: str,
    inspect: Inspect,
    verify: Verify | None,
) -> Opened:
    segments = open_segments(files, geometry, superblock.uuid_bytes)
    try:
        path = directory / CATALOG
        known = read_namespaces(files)
        records = _names_in(path, known)
        rebuilt = records is None and bool(segments)
        remake = records is None or _data_bytes(path) > geometry.catalog_bytes
        known = known or {}
        if records is None:
            if rebuilt:
                log.warning("the catalog in %s is missing or damaged: rebuilding it from the segments", directory)
            records = rebuild_names(files, geometry, segments, inspect, known)
        segments, n_removed = _within_capacity(files, segments, records, geometry)
        placed = np.flatnonzero(in_segments(records, segments, geometry))
        newest = placed[newest_of_each(_part(records, placed))]
        good = newest
        if recovery == "strict" and verify is not None:
            good = newest[verified(files, segments, records[newest], verify)]
        kept = good[closed_and_ordered(_part(records, good))]
        facts = {
            "rebuilt": int(rebuilt),
            "removed_segments": n_removed,
            "dropped_misplaced": len(records) - len(placed),
            "dropped_older": len(placed) - len(newest),
            "dropped_corrupt": len(newest) - len(good),
            "dropped_orphans": len(good) - len(kept),
        }
        stale = np.ones(len(records), np.bool_)
        stale[kept] = False
        names = records[np.sort(kept)] if remake else None
        catalog = Catalog(path, geometry.catalog_bytes, names)
        files.sync_directory()
        files.catalog_committed()
    except BaseException:
        for segment in segments:
            files.close(segment.handle)
        raise
    used = set(np.unique(records["value"]["namespace"][kept]).tolist())
    book = NameBook(files, catalog, geometry.namespaces_bytes, {n: known[n] for n in sorted(used)})
    return Opened(
        lock, files, superblock, geometry, segments, book, records[kept],
        records[:0] if remake else records[stale], facts,
    )  # fmt: skip


def _within_capacity(
    files: Files, segments: list[SegmentOnDisk], records: Records, geometry: Geometry
) -> tuple[list[SegmentOnDisk], int]:
    """Remove files that a smaller capacity has no room for: those with the fewest frames."""
    surplus = len(segments) - geometry.n_segments
    if surplus <= 0:
        return segments, 0
    frames = np.bincount(records["value"]["segment"].astype(np.int64), minlength=segments[-1].number + 1)
    by_use = sorted(segments, key=lambda segment: int(frames[segment.number]))
    for segment in by_use[:surplus]:
        files.close(segment.handle)
        files.remove(segment_name(segment.number))
    files.sync_directory()
    return sorted(by_use[surplus:], key=lambda segment: segment.number), surplus


def _names_in(path: Path, known: dict[int, tuple[bytes, str]] | None) -> Records | None:
    """What the catalog says, None if it can't be used: it is damaged, or its namespaces are."""
    records = None if known is None else read_names(path)
    if records is None or known is None or not set(np.unique(records["value"]["namespace"]).tolist()) <= known.keys():
        return None
    return records


def _part(records: Records, places: Int64s) -> Records:
    """Some of the records; mostly it is all of them, which needs no copy. ``places`` are ascending."""
    return records if len(places) == len(records) else records[places]


def _data_bytes(path: Path) -> int:
    return (path / "data.mdb").stat().st_size
