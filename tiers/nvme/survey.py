"""A directory that no daemon has open, looked at as a whole: every name, every frame, every byte of them.

``survey`` says what is wrong and changes nothing. ``repair`` leaves the names of intact frames only, and of those only
the ones whose ancestors are all there; frames themselves are never written to. The catalog is replaced in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError
from kvstore.tiers.nvme.catalog import Catalog
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.layout import NAME_BYTES, PAGE_BYTES, Geometry, Int64s
from kvstore.tiers.nvme.namebook import Described, read_namespaces, write_namespaces
from kvstore.tiers.nvme.names import Records
from kvstore.tiers.nvme.opening import names_in
from kvstore.tiers.nvme.rebuild import Inspect, Verify, frames_of, rebuild_names, same_frame
from kvstore.tiers.nvme.recovery import (
    SegmentOnDisk,
    closed_and_ordered,
    in_segments,
    newest_of_each,
    open_segments,
    with_heads,
)
from kvstore.tiers.nvme.segment_index import DAMAGED, FOREIGN
from kvstore.tiers.nvme.superblock import (
    CATALOG,
    NAMESPACES,
    SUPERBLOCK,
    DirectoryLock,
    Superblock,
    open_superblock,
)

LISTED_MAX = 1000
"""Bad frames that a report lists; all are counted."""

Progress = Callable[[int, int], object]
"""Called now and then with bytes read so far and bytes to be read."""


@dataclass(frozen=True, slots=True)
class BadFrame:
    """A named frame that is not what its name says. ``key`` is that of its block, in hex."""

    segment: int
    offset: int
    frame_bytes: int
    key: str
    what: str


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """A segment file. ``head`` is intact, damaged or foreign (another directory's); none if it was never used."""

    number: int
    size_bytes: int
    head: str
    n_names: int


@dataclass(slots=True)
class Survey:
    """What was found. ``catalog`` and ``namespaces`` (the file of them) are ok, missing or damaged.

    Names are those of the catalog; without one, what the segments say of themselves. ``n_misplaced`` point to no
    segment that is there, ``n_older`` to a frame of which there is a newer one; the frames of all others were read.
    ``n_orphans`` are intact, but the block before them is not.
    """

    uuid: str
    segment_bytes: int
    catalog: str
    namespaces: str
    segments: list[SegmentFacts]
    n_names: int = 0
    n_misplaced: int = 0
    n_older: int = 0
    n_unreadable: int = 0
    n_corrupt: int = 0
    n_orphans: int = 0
    n_intact: int = 0
    n_bytes: int = 0
    bad: list[BadFrame] = field(default_factory=list)
    repaired: str = ""
    """What was done about it, in words."""

    @property
    def n_bad(self) -> int:
        """Frames that can't be served, and blocks that lost theirs."""
        return self.n_misplaced + self.n_unreadable + self.n_corrupt + self.n_orphans

    @property
    def ok(self) -> bool:
        """Whether a daemon would find everything that the directory says it has.

        A damaged head alone is no harm as long as there are names.
        """
        return not self.n_bad and self.catalog == "ok" and self.namespaces != "damaged"


def survey(
    directory: Path,
    inspect: Inspect,
    verify: Verify,
    progress: Progress = lambda _done, _all: None,
    *,
    frames: bool = True,
    repair: bool = False,
) -> Survey:
    """Read everything in a directory; with ``repair`` also make the catalog true. Blocks for as long as that takes.

    ``inspect`` and ``verify`` know the frames. Without ``frames`` only names are looked at, and frames believed.
    Raises ConfigError for what is no such directory, or in use; OSError, or
    CatalogError when the new catalog can't be written: then the old one is still there.
    """
    with _opened(directory) as (files, superblock, segments):
        in_file = read_namespaces(files)
        records = names_in(directory / CATALOG, in_file)
        found = Survey(
            uuid=superblock.uuid,
            segment_bytes=superblock.segment_bytes,
            catalog="ok" if records is not None else _absence(directory / CATALOG, segments),
            namespaces="damaged" if in_file is None else "ok" if (directory / NAMESPACES).exists() else "missing",
            segments=[],
        )
        known: dict[int, Described] = dict(in_file or {})
        if records is None:
            geometry = _geometry(superblock.segment_bytes, segments, 0)
            records = rebuild_names(files, geometry, segments, inspect, known)
        reader = _Reader(found, files, segments, known, inspect, verify, progress) if frames or repair else None
        kept = _look(found, segments, records, reader)
        if repair and not found.ok:
            _write(found, files, directory / CATALOG, segments, records[kept], known)
        return found


@contextmanager
def _opened(directory: Path) -> Iterator[tuple[Files, Superblock, list[SegmentOnDisk]]]:
    """Lock and segments of a directory that is there already."""
    if not (directory / SUPERBLOCK).is_file():
        what = "there is no such directory" if not directory.is_dir() else f"it has no {SUPERBLOCK}"
        raise ConfigError(f"{str(directory)!r} is no NVMe directory of kvstore: {what}")
    lock = DirectoryLock(directory)
    try:
        files = DirectFiles(directory)
        superblock = open_superblock(files, directory, 0)
        segments = open_segments(files, superblock.uuid_bytes)
        try:
            yield files, superblock, segments
        finally:
            for segment in segments:
                files.close(segment.handle)
    finally:
        lock.release()


def _absence(path: Path, segments: list[SegmentOnDisk]) -> str:
    """Why there are no names: a directory without segments needs none."""
    if path.is_dir():
        return "damaged"
    return "missing" if segments else "ok"


def _geometry(segment_bytes: int, segments: list[SegmentOnDisk], n_names: int) -> Geometry:
    """One with room for all that is there: the capacity is the daemon's to say, and nothing is to go for want of it."""
    n_bytes = sum(segment.size_bytes for segment in segments) + segment_bytes * 8
    return Geometry(2 * n_bytes + 64 * n_names * NAME_BYTES + (64 << 20), segment_bytes)


def _facts(segment: SegmentOnDisk, n_names: int) -> SegmentFacts:
    head = "intact"
    if segment.log_seq == FOREIGN:
        head = "foreign"
    elif segment.log_seq == DAMAGED:
        head = "damaged" if n_names else "none"
    return SegmentFacts(segment.number, segment.size_bytes, head, n_names)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads frames and compares them with their names."""

    found: Survey
    files: Files
    segments: list[SegmentOnDisk]
    known: dict[int, Described]
    inspect: Inspect
    verify: Verify
    progress: Progress

    def intact(self, records: Records) -> NDArray[np.bool_]:
        """Which frames are what their names say, read whole; bool [n]. Lists the others."""
        good, read = np.zeros(len(records), np.bool_), np.zeros(len(records), np.bool_)
        n_all = int(records["value"]["pages"].sum(dtype=np.int64)) * PAGE_BYTES
        for segment in self.segments:
            mine = np.flatnonzero(records["value"]["segment"] == segment.number)
            for at, buffer in frames_of(self.files, segment.handle, records[mine], headers_only=False):
                place = int(mine[at])
                read[place] = True
                what = self._fault(buffer, records[place]["value"])
                good[place] = not what
                if what:
                    self.found.n_corrupt += 1
                    _list(self.found, records, np.array([place]), what)
                self.found.n_bytes += len(buffer)
                self.progress(self.found.n_bytes, n_all)
        self.found.n_unreadable = int((~read).sum())
        _list(self.found, records, np.flatnonzero(~read), "it can't be read")
        return good

    def _fault(self, frame: memoryview, value: Any) -> str:
        facts = self.inspect(frame)
        if facts is None:
            return "its header is damaged"
        if not same_frame(facts, value, self.known[int(value["namespace"])][0]):
            return "another frame lies there"
        return "" if self.verify(frame) else "its bytes are damaged"


def _look(found: Survey, segments: list[SegmentOnDisk], records: Records, reader: _Reader | None) -> Int64s:
    """Fill in what was found; returns the places of the names to be kept, ascending."""
    geometry = _geometry(found.segment_bytes, segments, len(records))
    placed = np.flatnonzero(in_segments(records, with_heads(segments, records), geometry))
    newest = placed[newest_of_each(records[placed])]
    good = np.zeros(len(records), np.bool_)
    good[newest] = True if reader is None else reader.intact(records[newest])
    whole = np.flatnonzero(good)
    kept = whole[closed_and_ordered(records[whole])]
    found.n_names, found.n_misplaced = len(records), len(records) - len(placed)
    found.n_older = len(placed) - len(newest)
    found.n_orphans, found.n_intact = len(whole) - len(kept), len(kept)
    _list(found, records, np.setdiff1d(np.arange(len(records)), placed), "it lies in no segment that is there")
    _list(found, records, np.setdiff1d(whole, kept), "a block before it is missing")
    named = records["value"]["segment"]
    found.segments = [_facts(segment, int(np.count_nonzero(named == segment.number))) for segment in segments]
    return np.sort(kept)


def _list(found: Survey, records: Records, places: Int64s, what: str) -> None:
    for record in records[places[: max(LISTED_MAX - len(found.bad), 0)]]:
        value = record["value"]
        offset, frame_bytes = int(record["place"]["page"]) * PAGE_BYTES, int(value["pages"]) * PAGE_BYTES
        found.bad.append(BadFrame(int(value["segment"]), offset, frame_bytes, value["key"].tobytes().hex(), what))


def _write(
    found: Survey,
    files: Files,
    path: Path,
    segments: list[SegmentOnDisk],
    records: Records,
    known: dict[int, Described],
) -> None:
    """The names that are kept, and their namespaces, in place of what was there."""
    used = np.unique(records["value"]["namespace"]).tolist()
    write_namespaces(files, {number: known[number] for number in used})
    Catalog(path, _geometry(found.segment_bytes, segments, len(records)).catalog_bytes, records).close()
    files.sync_directory()
    n_dropped = found.n_names - found.n_older - len(records)
    source = "the catalog" if found.catalog == "ok" else "the segments"
    found.repaired = f"{len(records)} names of {source} were kept, {n_dropped} dropped; no frame was changed"
