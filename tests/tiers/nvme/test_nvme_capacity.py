"""A cap is a cap: the directory never takes more, whatever is written; and a disk with less room is no failure."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.native import aligned_bytes
from kvstore.tiers.nvme.tier import NvmeTier

PAGE = 4096
MIB = 1 << 20


def allocated_bytes(directory: Path) -> int:
    """What the file system gives to a directory and all below it."""
    total = os.lstat(directory).st_blocks
    for folder, folders, files in os.walk(directory):
        for name in folders + files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(Path(folder) / name).st_blocks
    return 512 * total


class Writer:
    """Writes frames whose bytes follow from their number, evicts the oldest, moves what has to be moved."""

    def __init__(self, tier: NvmeTier) -> None:
        self.tier = tier
        self.number = tier.name_namespace(b"namespace-digest", "{}")
        self.noise = np.random.default_rng(0).integers(0, 256, 2 * MIB, dtype=np.uint8)
        self.live: dict[int, tuple[int, int]] = {}  # number -> slot, bytes
        self.n = 0
        self.written_bytes = 0

    def fill(self, memory: Any, number: int) -> None:
        memory[:PAGE] = number % 251
        memory[PAGE:] = self.noise[number % MIB : number % MIB + len(memory) - PAGE]

    def begin(self, frame_bytes: int, n: int) -> Any:
        tier = self.tier
        while (short := tier.short_of(frame_bytes, n)) > 0 and self.live:
            gone = list(self.live)[: max(short, 1)]
            tier.free(np.array([self.live.pop(number)[0] for number in gone], np.int64))
        slots = tier.allocate(frame_bytes, n)
        if not len(slots):
            return None
        memory = aligned_bytes(len(slots) * frame_bytes).reshape(len(slots), frame_bytes)
        numbers = list(range(self.n, self.n + len(slots)))
        self.n += len(slots)
        for row, number in zip(memory, numbers, strict=True):
            self.fill(row, number)
        keys = np.random.default_rng(numbers).integers(0, 256, (len(slots), 16), dtype=np.uint8)
        job = tier.begin_write(
            slots, keys, np.ones((len(slots), 16), np.uint8), np.full(len(slots), self.number, np.uint32),
            np.full(len(slots), frame_bytes - PAGE, np.uint32),
            [((int(row.ctypes.data), frame_bytes),) for row in memory],
        )  # fmt: skip
        return job, numbers, slots, frame_bytes, memory

    def finish(self, begun: Any) -> None:
        job, numbers, slots, frame_bytes, _ = begun
        for number, slot, live in zip(numbers, slots.tolist(), self.tier.finish_write(job).tolist(), strict=True):
            if live:
                self.live[number] = (slot, frame_bytes)
                self.written_bytes += frame_bytes

    def read(self, numbers: list[int]) -> int:
        """How many of these arrive; fails if one has other bytes than were written."""
        n = 0
        for number in numbers:
            slot, frame_bytes = self.live[number]
            memory, expected = aligned_bytes(frame_bytes), aligned_bytes(frame_bytes)
            at = np.array([memory.ctypes.data], np.uint64)
            job = self.tier.begin_read(np.array([slot]), at, at + np.uint64(PAGE), PAGE, frame_bytes - PAGE)
            job.run()
            if self.tier.finish_read(job)[0]:
                self.fill(expected, number)
                assert (memory == expected).all()
                n += 1
        return n


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_gigabyte_through_a_hundred_megabytes(tmp_path: Path) -> None:
    """Frames of 32 KiB to 1 MiB, two writes and a compaction under way at a time."""
    capacity_bytes, directory = 100_000_000, tmp_path / "nvme"
    rng = np.random.default_rng(1)
    with NvmeTier(directory, capacity_bytes, lambda _: None) as tier:
        writer = Writer(tier)

        def run(step: Callable[[], object]) -> None:
            step()
            assert allocated_bytes(directory) <= capacity_bytes

        most_used = 0.0
        while writer.written_bytes < 1_000_000_000:
            compaction = tier.begin_compact()
            begun = []
            for _ in range(2):
                frame_bytes = PAGE + (32 << 10 << int(rng.integers(0, 6)))
                new = writer.begin(frame_bytes, max(1, int(rng.integers(1, 8 * MIB)) // frame_bytes))
                begun += [new] if new is not None else []
            assert begun or compaction is not None, "neither written nor made room"
            for new in begun:
                run(new[0].write)
            if compaction is not None:
                run(compaction.run)
            for new in begun:
                run(new[0].name)
                writer.finish(new)
            if compaction is not None:
                assert not len(tier.finish_compact(compaction))
            most_used = max(most_used, sum(size for _, size in writer.live.values()) / capacity_bytes)
        tier.check()
        assert tier.health == "ok"
        assert most_used > 0.6
        picked = [list(writer.live)[i] for i in rng.permutation(len(writer.live))[:60]]
        assert writer.read(picked) == len(picked)
        slots = {slot for slot, _ in writer.live.values()}
        stats = tier.stats()
        assert float(stats["moved_bytes"]) < 2 * float(stats["written_bytes"])
    assert allocated_bytes(directory) <= capacity_bytes
    with NvmeTier(directory, capacity_bytes, lambda _: None) as tier:
        assert len(tier.recovered().slots) == len(slots)
        assert allocated_bytes(directory) <= capacity_bytes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB of its own."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(48 * MIB)
    mkfs, mount, umount = (shutil.which(name) for name in ("mkfs.ext4", "mount", "umount"))
    if not (mkfs and mount and umount):
        pytest.skip("mkfs.ext4 and mount are needed to make a small file system")
    subprocess.run([mkfs, "-q", "-F", "-m", "0", str(image)], check=True)
    done = subprocess.run([mount, "-o", "loop", str(image), str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a loop mount isn't permitted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([umount, str(folder)], check=True)


def cycle(writer: Writer, n: int = 8) -> int:
    """Write as many of ``n`` frames as there is room for; returns how many became live."""
    tier = writer.tier
    compaction = tier.begin_compact()
    if compaction is not None:
        compaction.run()
        tier.finish_compact(compaction)
    first = writer.n
    begun = writer.begin(64 << 10, n)
    if begun is not None:
        begun[0].write()
        begun[0].name()
        writer.finish(begun)
    return sum(number >= first for number in writer.live)


def test_a_file_system_smaller_than_the_capacity(small_disk: Path) -> None:
    """What room there is gets used; old frames make place for new ones; health stays fine."""
    with NvmeTier(small_disk / "nvme", 200 * MIB, lambda _: None, segment_bytes=2 * MIB) as tier:
        writer = Writer(tier)
        assert all(cycle(writer) for _ in range(150))
        assert tier.health == "ok"
        assert writer.written_bytes > 70 * MIB
        assert sum(size for _, size in writer.live.values()) > 20 * MIB
        assert writer.read(list(writer.live)) == len(writer.live)
        tier.check()


def fill_disk(hog: Path) -> None:
    """Take all that is left of a file system."""
    with hog.open("wb") as file:
        for piece_bytes in (MIB, PAGE):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), bytes(piece_bytes))


def test_a_full_file_system_skips_writes_and_recovers_by_itself(small_disk: Path) -> None:
    """Somebody else fills the disk: reads go on, writes go on in the room that is ours, and grow again later."""
    clock, directory, hog = ManualClock(), small_disk / "nvme", small_disk / "hog"
    with NvmeTier(directory, 40 * MIB, lambda _: None, segment_bytes=MIB, clock=clock) as tier:
        writer = Writer(tier)
        while len(writer.live) < 100:
            assert cycle(writer) == 8
        fill_disk(hog)
        assert os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize < 2 * PAGE
        before_bytes = writer.written_bytes
        for _ in range(60):
            cycle(writer)
            clock.advance(1.0)
            tier.check()
        n_full = len(writer.live)
        assert writer.written_bytes > before_bytes + 10 * MIB
        assert writer.read(list(writer.live)) == n_full > 0
        assert tier.health in ("ok", "full")
    with NvmeTier(directory, 40 * MIB, lambda _: None, segment_bytes=MIB, clock=clock) as tier:
        assert len(tier.recovered().slots) == n_full  # a full disk is no reason not to start
        hog.unlink()
        clock.advance(10.0)
        writer = Writer(tier)
        for _ in range(60):
            cycle(writer)
        assert tier.health == "ok"
        assert len(writer.live) > 300
        assert writer.read(list(writer.live)) == len(writer.live)
        tier.check()


def test_a_file_system_that_is_full_from_the_start(small_disk: Path) -> None:
    """The tier opens, holds nothing and says so; once there is room it works."""
    clock = ManualClock()
    (small_disk / "nvme").mkdir()
    hog = small_disk / "hog"
    hog.write_bytes(bytes(38 * MIB))
    with NvmeTier(small_disk / "nvme", 40 * MIB, lambda _: None, segment_bytes=2 * MIB, clock=clock) as tier:
        writer = Writer(tier)
        n_live = [cycle(writer) for _ in range(5)][-1]
        assert n_live <= 100
        hog.unlink()
        clock.advance(10.0)
        assert [cycle(writer) for _ in range(5)] == [1, 8, 8, 8, 8]
        assert tier.health == "ok"
