"""Opening a directory: lock, superblock, segments, and the names that count."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError
from kvstore.logs import about
from kvstore.tiers.nvme.catalog import Catalog, CatalogError, read_names
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.layout import Geometry, Int64s
from kvstore.tiers.nvme.namebook import (
    Described,
    NameBook,
    file_bytes,
    fitting,
    read_namespaces,
    write_namespaces,
)
from kvstore.tiers.nvme.names import Records
from kvstore.tiers.nvme.rebuild import Inspect, Verify, rebuild_names, verified
from kvstore.tiers.nvme.recovery import (
    SegmentOnDisk,
    closed_and_ordered,
    in_segments,
    newest_of_each,
    open_segments,
    with_heads,
)
from kvstore.tiers.nvme.superblock import (
    CATALOG,
    NAMESPACES,
    DirectoryLock,
    Superblock,
    clear,
    open_superblock,
    segment_name,
    taken_numbers,
)

log = logging.getLogger("kvstore.nvme")

RECOVERIES = ("none", "normal", "strict")


@dataclass(slots=True)
class Opened:
    """An open directory. ``records``: what is served, parents first. ``taken``: numbers no segment can have."""

    lock: DirectoryLock
    files: Files
    superblock: Superblock
    geometry: Geometry
    segments: list[SegmentOnDisk]
    book: NameBook
    records: Records
    taken: list[int]
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
    segments = _open_segments(files, superblock, directory)
    try:
        path = directory / CATALOG
        listing = directory / NAMESPACES
        if listing.is_dir() and not listing.is_symlink():
            raise ConfigError(f"{str(listing)!r} is a directory: remove it")
        in_file = read_namespaces(files)
        records = names_in(path, in_file)
        rebuilt = records is None and bool(segments)
        in_file = in_file or {}
        known = dict(in_file)
        if records is None:
            if rebuilt:
                log.warning(
                    "the catalog in %s is missing or damaged: rebuilding it from the segments", directory,
                    extra=about("nvme_catalog_rebuilt", directory=str(directory)),
                )  # fmt: skip
            records = rebuild_names(files, geometry, segments, inspect, known)
        segments, n_removed = _within_capacity(files, with_heads(segments, records), records, geometry)
        placed = np.flatnonzero(in_segments(records, segments, geometry))
        newest = placed[newest_of_each(_part(records, placed))]
        good = newest
        if recovery == "strict" and verify is not None:
            good = newest[verified(files, segments, records[newest], verify)]
        n_frames = _counts(records["value"]["namespace"][good])
        listed = fitting({number: known[number] for number in n_frames}, geometry.namespaces_bytes, n_frames)
        served = good
        if len(listed) < len(n_frames):
            served = good[np.isin(records["value"]["namespace"][good], list(listed))]
        kept = served[closed_and_ordered(_part(records, served))]
        facts = {
            "rebuilt": int(rebuilt),
            "removed_segments": n_removed,
            "dropped_misplaced": len(records) - len(placed),
            "dropped_older": len(placed) - len(newest),
            "dropped_corrupt": len(newest) - len(good),
            "dropped_unlisted": len(good) - len(served),
            "dropped_orphans": len(served) - len(kept),
        }
        in_file = _listed_in_file(files, listed, in_file, geometry)
        catalog = Catalog(path, geometry.catalog_bytes, records[np.sort(kept)])
        files.sync_directory()
        files.catalog_committed()
    except BaseException:
        for segment in segments:
            files.close(segment.handle)
        raise
    book = NameBook(files, catalog, geometry.namespaces_bytes, listed, in_file, lock.is_there)
    taken = taken_numbers(files, directory)
    return Opened(lock, files, superblock, geometry, segments, book, records[kept], taken, facts)


def _open_segments(files: Files, superblock: Superblock, directory: Path) -> list[SegmentOnDisk]:
    try:
        return open_segments(files, superblock.uuid_bytes)
    except OSError as error:
        raise ConfigError(
            f"a segment of the NVMe directory {str(directory)!r} can't be opened: {error}; nothing was changed. "
            "Let this user read and write all files there (and open enough of them: ulimit -n); "
            "or move the file away: without it the tier starts, but without the blocks in it"
        ) from error


def _within_capacity(
    files: Files, segments: list[SegmentOnDisk], records: Records, geometry: Geometry
) -> tuple[list[SegmentOnDisk], int]:
    """Remove files that the capacity has no room for: those with the fewest frames."""
    n_places = sum(geometry.n_places(segment.size_bytes) for segment in segments)
    if n_places <= geometry.n_segments:
        return segments, 0
    n_frames = _counts(records["value"]["segment"])
    by_use = sorted(segments, key=lambda segment: -n_frames.get(segment.number, 0))
    n_before = len(by_use)
    while n_places > geometry.n_segments:
        segment = by_use.pop()
        files.close(segment.handle)
        files.remove(segment_name(segment.number))
        n_places -= geometry.n_places(segment.size_bytes)
    files.sync_directory()
    return sorted(by_use, key=lambda segment: segment.number), n_before - len(by_use)


def _listed_in_file(
    files: Files, listed: dict[int, Described], in_file: dict[int, Described], geometry: Geometry
) -> dict[int, Described]:
    """Have namespaces in the file; returns what it says then."""
    is_there = all(in_file.get(number) == described for number, described in listed.items())
    if is_there and file_bytes(in_file) <= geometry.namespaces_bytes:
        return in_file
    try:
        write_namespaces(files, listed)
    except CatalogError as error:
        log.warning(
            "%s; it is tried again with the next names", error, extra=about("nvme_list_failed", error=str(error))
        )
        return in_file
    return listed


def _counts(numbers: NDArray[np.uint32]) -> dict[int, int]:
    each, n = np.unique(numbers, return_counts=True)
    return dict(zip(each.tolist(), n.tolist(), strict=True))


def names_in(path: Path, known: dict[int, Described] | None) -> Records | None:
    """What the catalog says, None if it can't be used: it is damaged, or its namespaces are."""
    records = None if known is None else read_names(path)
    if records is None or known is None or not set(np.unique(records["value"]["namespace"]).tolist()) <= known.keys():
        return None
    return records


def _part(records: Records, places: Int64s) -> Records:
    """Some of the records; mostly it is all of them, which needs no copy. ``places`` are ascending."""
    return records if len(places) == len(records) else records[places]
