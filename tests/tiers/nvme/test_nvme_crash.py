"""The power may go at any sync point: what was acknowledged is found again with its bytes, whole prefixes only."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.tiers.nvme.crash import Crashed, CrashFiles, Mode
from kvstore.tiers.nvme.direct import DirectFiles

PAGE = 4096
ROOT = b"r" * 16
SETTINGS = {"capacity_bytes": (1 << 20) + (160 << 10), "segment_bytes": 16 * PAGE}


class Workload:
    """Blocks come in chains, are evicted tails first when there is no room, and are moved; two writes overlap."""

    def __init__(self, rig: Any, seed: int) -> None:
        self.rig = rig
        self.rng = np.random.default_rng(seed)
        self.n_operations = 0

    def run(self, n_operations: int) -> None:
        while self.n_operations < n_operations:
            n, pages = int(self.rng.integers(1, 7)), int(self.rng.choice([2, 2, 3, 4]))
            self.evict(self.rig.tier.short_of(pages * PAGE, 2 * n))
            compaction = self.rig.tier.begin_compact()
            parents = [ROOT, *sorted(self.rig.known)]
            parent = parents[int(self.rng.integers(len(parents)))]
            writes = []
            for _ in range(2):
                keys = [self.rig.new_key() for _ in range(n)]
                pending = self.rig.begin(keys, [parent, *keys[:-1]], pages)
                if pending is None:
                    break
                writes.append(pending)
                parent = pending.keys[-1]
            for pending in reversed(writes):
                pending.job.write()
            if compaction is not None:
                compaction.run()
            for pending in writes:
                pending.job.name()
            for pending in writes:
                self.n_operations += len(self.rig.finish(pending))
            if compaction is not None:
                self.rig.tier.finish_compact(compaction)
                self.n_operations += 1

    def evict(self, n: int) -> None:
        while n > 0 and self.rig.known:
            parents = {known.parent for known in self.rig.known.values()}
            leaves = [key for key in self.rig.known if key not in parents]
            gone = leaves[: max(1, min(n, len(leaves) // 2))]
            self.rig.free(gone)
            self.n_operations += len(gone)
            n -= len(gone)


def watched(directory: Path, rig_at: Callable[..., Any], seed: int, judge: Callable[[int], None]) -> tuple[Any, Any]:
    """A rig on a crash device that calls ``judge`` at every sync point."""
    directory.mkdir()
    files = CrashFiles(directory, DirectFiles(directory), at_point=judge)
    files.set_catalog_copier(partial(shutil.copy, directory / "catalog" / "data.mdb"))
    return rig_at(directory, seed, files=files, **SETTINGS), files


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["drop_unsynced", "torn_last_write", "reordered"])
def test_a_power_cut_at_every_sync_point(tmp_path: Path, rig_at: Callable[..., Any], mode: Mode) -> None:
    n_found = n_judged = 0
    rig: Any = None
    files: Any = None

    def judge(point: int) -> None:
        nonlocal n_found, n_judged
        if rig is None:
            return
        target = tmp_path / f"cut-{point}"
        files.materialize(target, mode, seed=point)
        after = rig_at(target, **SETTINGS)
        rebuilt = after.tier.stats()["rebuilt"]
        assert not (rebuilt and rig.known), "the catalog of acknowledged blocks is lost"
        found = after.take_recovered()  # checks that every parent is there
        assert set(rig.known) <= set(found), f"acknowledged blocks are lost at point {point}"
        keys = sorted(rig.known) if rebuilt else found
        assert after.read(keys) == [True] * len(keys)  # compares every byte
        after.tier.check()
        after.tier.close()
        shutil.rmtree(target)
        n_found += len(found)
        n_judged += 1

    rig, files = watched(tmp_path / "nvme", rig_at, 1, judge)
    work = Workload(rig, 2)
    work.run(500)
    assert n_judged > 150
    assert n_found > 20 * n_judged
    assert rig.tier.stats()["moved_frames"] > 20
    rig.abandon()


@pytest.mark.parametrize("seed", range(3))
def test_work_goes_on_after_a_power_cut(tmp_path: Path, rig_at: Callable[..., Any], seed: int) -> None:
    """Cut, reopen, go on, cut again: what was acknowledged before either cut and not evicted is there."""
    directory = tmp_path / "nvme0"
    directory.mkdir()
    known: dict[bytes, Any] = {}
    for n_cut in range(6):
        files = CrashFiles(directory, DirectFiles(directory))
        files.set_catalog_copier(partial(shutil.copy, directory / "catalog" / "data.mdb"))
        rig = rig_at(directory, 10 * seed + n_cut, files=files, **SETTINGS)
        assert set(known) <= set(rig.take_recovered())
        assert rig.read(sorted(known)) == [True] * len(known)
        files.crash_at = len(files.points) + 23 + 2 * seed
        with pytest.raises(Crashed):
            Workload(rig, n_cut).run(10_000)
        known = rig.known
        rig.abandon()
        directory = tmp_path / f"nvme{n_cut + 1}"
        files.materialize(directory, "torn_last_write", seed=seed)
    assert known
