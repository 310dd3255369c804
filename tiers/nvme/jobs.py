"""What worker threads do for the tier: write and name frames, read frames. A job touches no table and never raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.nvme.catalog import CatalogError
from kvstore.tiers.nvme.files import Extent, Files, Int64s
from kvstore.tiers.nvme.health import means_full
from kvstore.tiers.nvme.incarnation import Batch, Incarnation
from kvstore.tiers.nvme.namebook import NameBook
from kvstore.tiers.nvme.names import NO_RECORDS, Records


@dataclass(slots=True)
class Failure:
    """What went wrong in a job, the worst of it."""

    full: bool
    text: str


@dataclass(slots=True)
class Removal:
    """Names of dead frames that a transaction takes out; ``failed`` until it has."""

    names: list[bytes]
    rows: Int64s
    """Slots that are free once their names are gone."""
    segments: Int64s
    """Where each further frame lies that has a name and no slot."""
    failed: bool = True

    @classmethod
    def of_nothing(cls) -> Removal:
        """No names."""
        return cls([], np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(slots=True)
class WritePart:
    """The frames of a job that go to one segment: their places in the job, extents and numbers of their entries."""

    number: int
    incarnation: Incarnation
    frames: Int64s
    extents: list[Extent]
    entries: Batch
    failed: bool = False

    def write(self, durable: NDArray[np.bool_]) -> Failure | None:
        """Write and sync; marks what is durable. Blocks."""
        try:
            whole = self.incarnation.write(self.entries, self.extents)
            self.incarnation.sync()
        except OSError as error:
            self.failed = True
            return failure_of(error, self.incarnation)
        durable[self.frames] = whole
        self.failed = not whole.all()
        return Failure(False, f"frames were not written ({self.incarnation.file.name})") if self.failed else None


def failure_of(error: OSError, incarnation: Incarnation) -> Failure:
    """What to remember of an error of the disk."""
    return Failure(means_full(error.errno or 0), f"{error.strerror or error} ({incarnation.file.name})")


@dataclass(slots=True, eq=False)
class WriteJob:
    """Frames on their way to the disk. ``write``, then ``name``, each once, then ``finish_write`` of the tier."""

    rows: Int64s
    parts: list[WritePart]
    """Without the frames of blocks whose parent isn't here, or whose namespace can't be listed: they get no name."""
    records: Records
    removal: Removal
    book: NameBook
    before: dict[int, tuple[WriteJob, int]]
    """By place in this job: where the parent is being written."""
    durable: NDArray[np.bool_] = field(init=False)
    named: NDArray[np.bool_] = field(init=False)
    failure: Failure | None = None

    def __post_init__(self) -> None:
        self.durable = np.zeros(len(self.rows), np.bool_)
        self.named = np.zeros(len(self.rows), np.bool_)

    def write(self) -> None:
        """Put the frames on the disk; blocks until they are durable, or failed. For any worker thread."""
        for part in self.parts:
            self.failure = part.write(self.durable) or self.failure

    def name(self) -> None:
        """Put the names of durable frames into the catalog; blocks. In the order in which the jobs began.

        A frame whose parent was not named is not named either.
        """
        good = self.durable.copy()
        for at, (job, place) in self.before.items():  # in order: a parent in the same job comes first
            good[at] &= bool(good[place] if job is self else job.named[place])
        done, failure = commit(self.book, self.records[good], self.removal)
        if done:
            self.named = good
        self.failure = failure or self.failure


def commit(
    book: NameBook,
    records: Records,
    removal: Removal,
    exchanged: Sequence[bytes] = (),
    renamed: Records = NO_RECORDS,
) -> tuple[bool, Failure | None]:
    """One transaction: names in, names of dead frames and ``exchanged`` ones out, ``renamed`` ones changed. Blocks.

    Returns whether the names are in and changed. If they don't fit, the dead ones go all the same: that is what makes
    room.
    """
    try:
        book.commit(records, [*removal.names, *exchanged], renamed)
        removal.failed = False
        return True, None
    except CatalogError as error:
        failure = Failure(error.full, str(error))
    if failure.full and (len(records) or len(renamed)):
        try:
            book.commit(NO_RECORDS, removal.names)
            removal.failed = False
        except CatalogError as error:
            failure = Failure(error.full, str(error))
    return False, failure


@dataclass(frozen=True, slots=True)
class ReadPart:
    """The frames of a job that lie in one segment: its number and handle, their places in the job, where to read."""

    number: int
    handle: int
    frames: Int64s
    extents: Sequence[Extent]


@dataclass(frozen=True, slots=True, eq=False)
class ReadJob:
    """Frames on their way from the disk. ``run`` once, then ``finish_read`` of the tier."""

    files: Files
    parts: list[ReadPart]
    arrived: NDArray[np.bool_]

    def run(self) -> None:
        """Read; blocks. For any worker thread."""
        for part in self.parts:
            done = self.files.read(part.handle, part.extents)
            self.arrived[part.frames] = done == np.array([extent.length_bytes for extent in part.extents], np.int64)
