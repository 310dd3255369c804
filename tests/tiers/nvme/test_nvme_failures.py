"""A disk that fails makes misses and a health state, for exactly the frames concerned; it recovers by itself."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles

PAGE = 4096
ROOT = b"r" * 16


def full(rig: Any) -> list[bytes]:
    """Fill a tier until no segment is left to open; returns what is live."""
    while not rig.tier._mover._is_low():
        live = list(rig.known)
        rig.free([live[i] for i in rig.rng.permutation(len(live))[: rig.tier.short_of(3 * PAGE, 10)]])
        rig.put(10, chain=False)
    return list(rig.known)


def is_frame(first_page: int) -> Callable[[str, Any], bool]:
    """Extents of frames that begin at or behind a page."""
    return lambda name, extent: name.startswith("segment-") and extent.offset >= first_page * PAGE


class Faulty:
    """A rig on a faulty disk, with a clock of its own."""

    def __init__(self, directory: Path, rig_at: Callable[..., Any]) -> None:
        directory.mkdir()
        self.files = FaultyFiles(DirectFiles(directory))
        self.clock = ManualClock()
        self.rig = rig_at(directory, files=self.files, clock=self.clock)
        self.tier = self.rig.tier


@pytest.fixture
def faulty(tmp_path: Path, rig_at: Callable[..., Any]) -> Faulty:
    return Faulty(tmp_path / "nvme", rig_at)


@pytest.mark.parametrize(("operation", "code", "health"), [
    ("write", errno.EIO, "failing"), ("write", errno.ENOSPC, "full"), ("sync", errno.EIO, "failing"),
    ("create", errno.ENOSPC, "full"), ("create", errno.EIO, "failing"), ("sync_directory", errno.EIO, "failing"),
    ("write_small", errno.ENOSPC, "full"),
])  # fmt: skip
def test_a_failed_write_is_a_miss_and_tried_again_later(faulty: Faulty, operation: str, code: int, health: str) -> None:
    rig, tier, files = faulty.rig, faulty.tier, faulty.files
    fault = files.fail(operation, code, times=None)
    delays = []
    for _ in range(8):
        assert rig.put(4) == []
        assert tier.health == health
        assert not tier.may_write
        assert len(tier.allocate(3 * PAGE, 4)) == tier.free_slots(3 * PAGE) == tier.short_of(3 * PAGE, 4) == 0
        waited = 0.0
        while not tier.may_write:
            faulty.clock.advance(0.05)
            waited += 0.05
        delays.append(waited)
        tier.check()
    assert fault.hits >= 8
    assert delays == sorted(delays)
    assert delays[0] <= 0.15
    assert 4.9 <= delays[-1] <= 5.1
    fault.stop()
    assert len(rig.put(4)) == 1  # one to try with
    assert tier.health == "ok"
    assert len(rig.put(4)) == 4
    assert tier.may_write
    tier.check()
    assert len(rig.reopen(files=None)) == 5


def test_reads_go_on_while_writes_fail(faulty: Faulty) -> None:
    keys = faulty.rig.put(5)
    faulty.files.fail("write", errno.EIO, times=None)
    assert faulty.rig.put(2) == []
    assert faulty.rig.read(keys) == [True] * 5


@pytest.mark.parametrize("kind", ["fail", "short"])
def test_exactly_the_frames_that_failed_are_missing(faulty: Faulty, kind: str) -> None:
    """A frame in the middle of a batch is not written; those before it, and those not below it, are there."""
    rig = faulty.rig
    keys = [rig.new_key() for _ in range(6)]
    parents = [ROOT, keys[0], keys[1], ROOT, keys[3], keys[4]]
    pending = rig.begin(keys, parents, 3)
    where = is_frame(2 + 3 * 1)  # the second frame of the segment
    if kind == "fail":
        faulty.files.fail("write", errno.EIO, where=where)
    else:
        faulty.files.shorten("write", where=where)
    pending.job.write()
    pending.job.name()
    assert rig.finish(pending) == [keys[0], *keys[3:]]
    assert faulty.tier.health == "failing"
    faulty.clock.advance(5)
    assert len(rig.put(3)) == 1
    bad = int(faulty.tier._ledger.table.segment[pending.slots[0] & 0xFFFFFFFF])
    other = rig.slots(rig.put(3))
    assert len(other) == 3
    assert bad not in faulty.tier._ledger.table.segment[other & 0xFFFFFFFF].tolist()
    faulty.tier.check()
    assert set(rig.reopen(files=None)) == set(rig.known)


@pytest.mark.parametrize("kind", ["fail", "short"])
def test_a_read_that_fails_is_a_miss_for_exactly_those(faulty: Faulty, kind: str) -> None:
    keys = faulty.rig.put(6)
    where = is_frame(2 + 3 * 2)
    if kind == "fail":
        faulty.files.fail("read", errno.EIO, times=2, where=where)
    else:
        faulty.files.shorten("read", times=2, where=where)
    assert faulty.rig.read(keys) == [True, True, False, False, True, True]
    assert faulty.tier.stats()["failed_reads"] == 2
    assert faulty.rig.read(keys) == [True] * 6


def test_a_name_that_can_not_be_written_is_not_live(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB fails in a commit; the names that were to be removed wait for the next one."""
    rig = faulty.rig
    keys = rig.put(4)
    rig.free(keys[3:])
    catalog = faulty.tier._opened.book.catalog
    data = rig.directory / "catalog" / "data.mdb"
    room = catalog._soft_bytes
    catalog.close()
    data.chmod(0o400)
    monkeypatch.setattr(catalog, "_path", rig.directory / "kvstore.json")  # not a folder: LMDB can't open it
    assert rig.put(2) == []
    assert faulty.tier.health == "failing"
    assert faulty.tier.stats()["names_to_remove"] == 1
    monkeypatch.undo()
    data.chmod(0o600)
    faulty.clock.advance(5)
    assert room == catalog._soft_bytes
    assert len(rig.put(2)) == 1
    assert faulty.tier.stats()["names_to_remove"] == 0
    faulty.tier.check()


def test_a_full_catalog_gives_up_the_dead_and_goes_on(tmp_path: Path, rig_at: Callable[..., Any]) -> None:
    """Names don't fit any more: the frames are not live, those freed meanwhile are gone, then others fit again."""
    rig = rig_at(tmp_path / "nvme", capacity_bytes=64 << 20, segment_bytes=2 << 20, clock=(clock := ManualClock()))
    catalog = rig.tier._opened.book.catalog
    catalog._env.set_mapsize(160 << 10)
    catalog._soft_bytes, catalog._hard_bytes = 160 << 10, 200 << 10
    live: list[bytes] = []
    while new := rig.put(50, pages=2, chain=False):
        live += new
    assert 100 < len(live) < 2000
    assert rig.tier.health == "full"
    for _ in range(10):
        rig.free(live[:150])
        live = live[150:]
        clock.advance(5)
        new = rig.put(50, pages=2, chain=False)
        live += new
        rig.tier.check()
    assert len(new) == 50
    assert rig.tier.health == "ok"
    assert (rig.directory / "catalog" / "data.mdb").stat().st_size <= 200 << 10
    assert set(rig.reopen()) == set(live)


def test_a_frame_that_can_not_be_moved_is_reported(tmp_path: Path, rig_at: Callable[..., Any]) -> None:
    faulty = Faulty(tmp_path / "nvme", rig_at)
    rig, tier = faulty.rig, faulty.tier
    keys = full(rig)
    segment_of = tier._ledger.table.segment[rig.slots(keys) & 0xFFFFFFFF]
    victim = int(segment_of[0])
    mine = [key for key, number in zip(keys, segment_of.tolist(), strict=True) if number == victim]
    rig.free(mine[2:-2])
    bad = rig.known[mine[1]]
    offset = int(tier._ledger.table.page[bad.slot & 0xFFFFFFFF]) * PAGE
    faulty.files.fail(
        "read",
        errno.EIO,
        times=None,
        where=lambda name, e: name == f"segment-{victim:08d}" and e is not None and e.offset == offset,
    )
    sequence = tier._segments.all[victim].log_seq
    job = tier.begin_compact()
    assert job is not None
    assert job.victim == victim
    job.run()
    lost = tier.finish_compact(job)
    assert lost.tolist() == [bad.slot]
    assert tier.stats()["unreadable_frames"] == 1
    tier.check()
    rest = [key for key in rig.known if key != mine[1]]
    assert rig.read(rest) == [True] * len(rest)
    rig.compact()  # leaves that segment alone
    tier.quarantine(lost)
    del rig.known[mine[1]]
    rig.compact()
    assert not tier._segments.all[victim].n_live or tier._segments.all[victim].log_seq != sequence
    tier.check()
    assert set(rig.reopen(files=None)) == set(rest)


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_move_that_fails_leaves_everything_where_it_was(faulty: Faulty, operation: str) -> None:
    rig, tier = faulty.rig, faulty.tier
    rig.free(full(rig)[::2])
    faulty.files.fail(operation, errno.EIO)
    job = tier.begin_compact()
    assert job is not None
    job.run()
    assert not len(tier.finish_compact(job))
    assert tier.health == "failing"
    assert tier.begin_compact() is None
    tier.check()
    assert rig.read(sorted(rig.known)) == [True] * len(rig.known)
    faulty.clock.advance(5)
    assert rig.compact() > 0
    assert len(rig.put(10, chain=False)) == 10
    tier.check()


def test_flipped_bits_on_the_disk_are_the_readers_to_find(faulty: Faulty) -> None:
    """The tier hands over what the disk gave; ``strict`` drops what doesn't verify, and all that is below it."""
    faulty.files.flip("write", where=is_frame(2 + 3 * 1 + 1))
    rig = faulty.rig
    first = rig.put(2)
    good = rig.put(3)
    kept = rig.reopen(files=None, recovery="strict")
    assert faulty.files.counts["write.flip"] == 1
    dropped = rig.tier.stats()["dropped_corrupt"]
    assert dropped == 1
    assert set(kept) <= {*first, *good}
    assert len(kept) < 5
    assert rig.read(kept) == [True] * len(kept)


def test_a_segment_under_read_is_not_reused(rig: Any) -> None:
    keys = rig.put(10)
    slots = rig.slots(keys)
    memory = np.zeros(4 * PAGE, np.uint8)
    at = np.array([-(-memory.ctypes.data // PAGE) * PAGE], np.uint64)
    job = rig.tier.begin_read(slots[:1], at, at + np.uint64(PAGE), PAGE, PAGE)
    number = int(rig.tier._ledger.table.segment[slots[0] & 0xFFFFFFFF])
    rig.free(keys)
    others = []
    while new := rig.put(10):
        others += new
        assert rig.tier._segments.all[number].n_readers == 1
    assert number not in rig.tier._ledger.table.segment[rig.slots(others) & 0xFFFFFFFF].tolist()
    job.run()
    assert rig.tier.finish_read(job).tolist() == [True]  # what it read is what lay there
    rig.free(others)
    numbers = set()
    for _ in range(40):  # now it is used again
        keys = rig.put(10)
        numbers |= set(rig.tier._ledger.table.segment[rig.slots(keys) & 0xFFFFFFFF].tolist())
        rig.free(keys)
        rig.compact()
    assert number in numbers
