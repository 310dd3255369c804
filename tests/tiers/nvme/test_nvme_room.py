"""A disk that has less room than the capacity promises: nothing that is there goes for nothing, and nobody waits."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.disk_room import LOOK_S

PAGE = 4096
SEGMENT_BYTES = 32 * PAGE


class SmallDisk(DirectFiles):
    """The room that is left is what a test says, less what new files take of it."""

    free_bytes = 1 << 40
    looking_is_allowed = True
    is_mute = False

    def create(self, name: str, size_bytes: int) -> int:
        handle = super().create(name, size_bytes)
        self.free_bytes -= size_bytes
        return handle

    def disk_free_bytes(self) -> int:
        assert self.looking_is_allowed
        if self.is_mute:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.free_bytes


class Tight:
    """A tier of 3 MiB with 10 frames to a segment; and what its caller does to make room."""

    def __init__(self, directory: Path, rig_at: Callable[..., Any]) -> None:
        directory.mkdir()
        self.disk = SmallDisk(directory)
        self.clock = ManualClock()
        self.rig = rig_at(directory, files=self.disk, clock=self.clock)
        self.tier = self.rig.tier
        self.n_evicted = 0

    def put(self, n: int) -> list[bytes]:
        """Write ``n`` frames at the cost of the oldest, as many as the tier asks for."""
        while short := self.tier.short_of(3 * PAGE, n):
            gone = list(self.rig.known)[:short]
            assert gone, "the tier asks for more than there is"
            self.rig.free(gone)
            self.n_evicted += len(gone)
        kept: list[bytes] = self.rig.put(n, chain=False)
        self.rig.compact()
        return kept

    def fill(self, n_segments: int) -> None:
        while self.tier.stats()["segments"] < n_segments:
            assert len(self.put(5)) == 5

    def no_room(self) -> None:
        """Somebody else takes all that is left; the tier sees it the next time it looks."""
        self.disk.free_bytes = 0
        self.clock.advance(LOOK_S)
        self.tier._segments._disk.look()


@pytest.fixture
def tight(tmp_path: Path, rig_at: Callable[..., Any]) -> Tight:
    return Tight(tmp_path / "nvme", rig_at)


def test_too_few_files_for_any_frame_means_that_nothing_goes(tight: Tight) -> None:
    """Three files are what moving frames takes: none of them could be filled by evicting."""
    tight.fill(3)
    keys = list(tight.rig.known)
    tight.no_room()
    n_written = 0
    for _ in range(60):
        n_written += len(tight.put(8))
        tight.clock.advance(0.3)
    assert tight.n_evicted == 0
    assert n_written <= 10  # what the open segment still took
    assert tight.tier.health == "full"
    assert tight.rig.read(keys) == [True] * len(keys)
    tight.tier.check()
    assert set(tight.rig.reopen(files=None)) >= set(keys)


def test_a_disk_without_room_suspends_writing_for_a_while(tight: Tight) -> None:
    tight.fill(3)
    tight.no_room()
    while tight.tier.health == "ok":
        tight.put(8)
    assert not tight.tier.may_write
    assert len(tight.tier.allocate(3 * PAGE, 4)) == tight.tier.free_slots(3 * PAGE) == 0
    tight.clock.advance(5.0)
    assert tight.tier.may_write
    assert tight.tier.short_of(3 * PAGE, 4) == 0
    assert not tight.tier.may_write


def test_when_there_is_room_again_it_is_seen_without_a_write(tight: Tight) -> None:
    """Nothing can be written, so nothing would look: the tier asks for a job that does."""
    tight.fill(3)
    tight.no_room()
    while tight.put(8) or tight.tier.health == "ok":
        pass
    tight.disk.free_bytes = 1 << 40
    assert tight.tier.begin_compact() is None
    tight.clock.advance(LOOK_S)
    job = tight.tier.begin_compact()
    assert job is not None
    assert tight.tier.begin_compact() is None  # one at a time
    job.run()
    tight.tier.finish_compact(job)
    assert tight.tier.health == "full"  # until something is written
    tight.clock.advance(5.0)
    assert len(tight.put(4)) == 1
    assert len(tight.put(4)) == 4
    assert tight.tier.health == "ok"
    assert tight.tier.begin_compact() is None  # as the disk is no limit now
    tight.clock.advance(10 * LOOK_S)
    assert tight.tier.begin_compact() is None


@pytest.mark.parametrize("n_segments", [5, 8, 16])
def test_no_more_goes_than_twice_what_comes(tight: Tight, n_segments: int) -> None:
    """Somebody's temporary file takes the rest of the disk. What is there turns over at most twice as fast."""
    tight.fill(n_segments)
    tight.no_room()
    n_before, evicted_before, n_came = len(tight.rig.known), tight.n_evicted, 0
    for _ in range(100):
        came = len(tight.put(4))
        n_came += came
        tight.clock.advance(0.1)
        assert tight.n_evicted - evicted_before <= 2 * n_came + 8
        tight.tier.check()
    assert n_came > 100
    n_most = tight.tier._ledger.n_most(3)
    assert len(tight.rig.known) >= min(n_most, n_before) - 8
    assert len(tight.rig.known) <= max(n_most, n_before)
    assert tight.tier.health == "ok"


def test_nothing_is_asked_for_to_get_below_a_limit_that_has_shrunk(tight: Tight) -> None:
    tight.fill(8)
    while tight.tier.free_slots(3 * PAGE):
        tight.put(1)
        if tight.tier.stats()["segments"] > 8:
            break
    tight.no_room()
    n_live = len(tight.rig.known)
    assert tight.tier._ledger.n_most(3) < n_live
    assert tight.tier.short_of(3 * PAGE, 2) <= 2


def test_the_disk_is_only_looked_at_in_jobs(tight: Tight) -> None:
    """A file system may be stuck: then nobody may be kept who needs nothing from it."""
    tight.fill(6)
    tier, rig = tight.tier, tight.rig
    for _ in range(40):
        tight.disk.looking_is_allowed = False
        tight.clock.advance(LOOK_S)
        if short := tier.short_of(3 * PAGE, 8):
            rig.free(list(rig.known)[:short])
        tier.free_slots(3 * PAGE)
        keys = [rig.new_key() for _ in range(8)]
        pending = rig.begin(keys, [b"r" * 16] * 8, 3)
        compaction = tier.begin_compact()
        tier.stats()
        tight.disk.looking_is_allowed = True
        for job in (pending.job.write, pending.job.name, compaction.run if compaction else lambda: None):
            job()
        tight.disk.looking_is_allowed = False
        rig.finish(pending)
        if compaction is not None:
            tier.finish_compact(compaction)
    tight.disk.looking_is_allowed = True
    tier.check()


def test_files_are_removed_in_jobs(rig: Any) -> None:
    """Of a segment that was cut, once nothing in it counts any more; a file that can't be removed keeps its room."""
    keys = rig.put(25, chain=False)
    number = int(rig.tier._ledger.table.segment[rig.slots(keys[:1])[0] & 0xFFFFFFFF])
    cut = rig.directory / f"segment-{number:08d}"
    rig.tier.close()
    with cut.open("r+b") as file:
        file.truncate(20 * PAGE)
    rig.open()
    found = rig.take_recovered()
    mine = rig.tier._ledger.table.segment[rig.slots(found) & 0xFFFFFFFF] == number
    rig.free([key for key, here in zip(found, mine.tolist(), strict=True) if here])
    rig.put(1)  # takes their names out
    assert len(found) < len(keys)
    assert cut.exists()
    n_files = rig.tier.stats()["segments"]
    job = rig.tier.begin_compact()
    assert job is not None
    rig.tier._files.remove(cut.name)
    cut.mkdir()  # in the way
    job.run()
    rig.tier.finish_compact(job)
    assert rig.tier.stats()["segments"] == n_files
    assert rig.tier.begin_compact() is None
    cut.rmdir()
    rig.free(list(rig.known))
    rig.put(1)
    rig.compact()
    assert rig.tier.stats()["segments"] < n_files
    rig.tier.check()


class Watched(dict[int, Any]):
    """Segments by number. Going through all of them is counted."""

    n_walks = 0

    def __iter__(self) -> Iterator[int]:
        self.n_walks += 1
        return super().__iter__()

    def values(self) -> Any:
        self.n_walks += 1
        return super().values()

    def items(self) -> Any:
        self.n_walks += 1
        return super().items()


def test_no_call_goes_through_all_segments(rig: Any) -> None:
    segments = rig.tier._segments
    segments.all = watched = Watched(segments.all)
    for _ in range(60):
        while short := rig.tier.short_of(3 * PAGE, 8):
            keys = list(rig.known)
            rig.free([keys[i] for i in rig.rng.permutation(len(keys))[:short]])
        rig.tier.free_slots(3 * PAGE)
        rig.compact()
        rig.put(8, chain=False)
        rig.read(list(rig.known)[:3])
        rig.tier.stats()
    assert rig.tier.stats()["moved_frames"] > 20
    assert watched.n_walks == 0
    rig.tier.check()
    assert watched.n_walks > 0


def test_the_list_of_what_may_be_moved_stays_small(rig: Any) -> None:
    """Reads and evictions change it all the time, though nothing has to be moved."""
    keys = rig.put(20, chain=False)
    rng = np.random.default_rng(0)
    for _ in range(300):
        rig.read([keys[i] for i in rng.permutation(len(keys))[:3]])
        gone = keys.pop(int(rng.integers(len(keys))))
        rig.free([gone])
        keys += rig.put(1, chain=False)
    assert len(rig.tier._segments._by_charge) <= 2 * 24 + 64
    rig.tier.check()


def test_a_file_system_that_does_not_say_changes_nothing(tight: Tight) -> None:
    tight.fill(4)
    tight.clock.advance(LOOK_S)
    disk = tight.tier._segments._disk
    before = disk.free_bytes
    tight.disk.is_mute = True
    disk.look()
    assert disk.free_bytes == before > 0
    assert len(tight.put(5)) == 5
