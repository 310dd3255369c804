"""Directories that somebody else had hands on: what is intact is served, or the start is refused with a way out."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.errors import ConfigError
from kvstore.tiers.nvme.catalog import CatalogError
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.tiers.nvme.names import NO_RECORDS
from kvstore.tiers.nvme.tier import NvmeTier

PAGE = 4096


def in_use(rig: Any, n: int = 40) -> None:
    """Write, free and move for a while."""
    for _ in range(n):
        while short := rig.tier.short_of(3 * PAGE, 5):
            keys = list(rig.known)
            rig.free([keys[i] for i in rig.rng.permutation(len(keys))[:short]])
        rig.compact()
        assert rig.put(5, chain=False)
    rig.tier.check()


def opened_again(rig: Any, keys: list[bytes]) -> None:
    """The tier opens, has these, and works."""
    rig.open()
    assert set(rig.take_recovered()) == set(keys)
    assert rig.read(keys) == [True] * len(keys)
    in_use(rig)
    assert set(rig.reopen()) == set(rig.known)


# Segments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE])
def test_a_segment_that_can_not_be_opened_refuses_the_start_and_loses_nothing(rig: Any, code: int) -> None:
    keys = rig.put(25)
    rig.tier.close()
    files = FaultyFiles(DirectFiles(rig.directory))
    files.fail("open", code, after=1)
    before = {path.name: path.read_bytes() for path in rig.directory.glob("segment-*")}
    with pytest.raises(ConfigError, match=r"nothing was changed.*ulimit -n.*move the file away"):
        rig.open(files=files)
    assert {path.name: path.read_bytes() for path in rig.directory.glob("segment-*")} == before
    opened_again(rig, keys)


@pytest.mark.parametrize("what", ["folder", "link", "dangling link", "pipe"])
def test_what_is_no_file_but_has_the_name_of_one_is_passed_over(rig: Any, tmp_path: Path, what: str) -> None:
    keys = rig.put(25)
    rig.tier.close()
    (tmp_path / "elsewhere").write_bytes(b"mine")
    for number in range(3, 60, 2):
        path = rig.directory / f"segment-{number:08d}"
        if path.exists():
            continue
        if what == "folder":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(tmp_path / ("elsewhere" if what == "link" else "nowhere"))
    opened_again(rig, keys)
    assert rig.tier.stats()["segments"] > 15
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_name_that_is_taken_while_it_runs_costs_one_attempt(tmp_path: Path, rig_at: Callable[..., Any]) -> None:
    rig = rig_at(tmp_path / "nvme", clock=(clock := ManualClock()))
    n_there = len(list(rig.directory.glob("segment-*")))
    for number in range(n_there, n_there + 3):
        (rig.directory / f"segment-{number:08d}").mkdir()
    failures = 0
    while rig.tier.stats()["segments"] < 8:
        if not rig.put(10, chain=False):
            failures += 1
            assert rig.tier.health == "failing"
            clock.advance(5.0)
    assert failures == 3
    in_use(rig)


@pytest.mark.parametrize("number", [23, 4095, 99_999_999])
def test_a_copy_of_a_segment_under_another_number_is_nobodys(rig: Any, number: int) -> None:
    keys = rig.put(25)
    rig.tier.close()
    shutil.copy(rig.directory / "segment-00000001", rig.directory / f"segment-{number:08d}")
    opened_again(rig, keys)


@pytest.mark.parametrize("divisor", [2, 0.5])
def test_segments_of_another_size_count_with_what_they_take(rig: Any, divisor: float) -> None:
    """Somebody changed ``segment_bytes``: the frames are there, and the capacity holds."""
    keys = rig.put(25)
    rig.tier.close()
    path = rig.directory / "kvstore.json"
    fields = json.loads(path.read_text())
    fields["segment_bytes"] = int(fields["segment_bytes"] / divisor)
    path.write_text(json.dumps(fields))
    rig.open()
    found = rig.take_recovered()
    assert set(found) <= set(keys)
    assert len(found) == len(keys) or divisor < 1  # a larger index covers the first frames
    assert {path.stat().st_size for path in rig.directory.glob("segment-*")} > {fields["segment_bytes"]}
    for _ in range(30):
        in_use(rig, 3)  # checks the capacity
    rig.free(list(rig.known))
    in_use(rig)
    assert {path.stat().st_size for path in rig.directory.glob("segment-*")} == {fields["segment_bytes"]}


# Small files ---------------------------------------------------------------------------------------

DEEP = b"[" * 200_000


def replace(path: Path, how: str, elsewhere: Path) -> None:
    """Put something odd in the place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        elsewhere.mkdir()
        path.symlink_to(elsewhere)
    elif how == "file":
        path.write_bytes(b"x")
    elif how == "deep":
        path.write_bytes(DEEP)
    elif how == "infinity":
        path.write_bytes(b'[[Infinity,"00000000000000000000000000000000",""]]')
    elif how == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)


@pytest.mark.parametrize("how", ["pipe", "folder", "link", "deep", "huge"])
@pytest.mark.parametrize("recovery", ["normal", "none"])
def test_a_superblock_that_is_none_is_refused_at_once(rig: Any, tmp_path: Path, how: str, recovery: str) -> None:
    rig.put(5)
    rig.tier.close()
    replace(rig.directory / "kvstore.json", how, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="give another directory"):
        rig.open(recovery=recovery)


@pytest.mark.parametrize("how", ["pipe", "link", "deep", "infinity", "huge"])
def test_a_list_of_namespaces_that_is_none_is_made_anew(rig: Any, tmp_path: Path, how: str) -> None:
    keys = rig.put(25)
    rig.tier.close()
    replace(rig.directory / "namespaces.json", how, tmp_path / "elsewhere")
    opened_again(rig, keys)


def test_a_folder_in_the_place_of_the_list_of_namespaces_is_refused(rig: Any, tmp_path: Path) -> None:
    keys = rig.put(25)
    rig.tier.close()
    replace(rig.directory / "namespaces.json", "folder", tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"namespaces\.json.* remove it"):
        rig.open()
    (rig.directory / "namespaces.json").rmdir()
    opened_again(rig, keys)


@pytest.mark.parametrize("how", ["pipe", "link", "file", "folder"])
@pytest.mark.parametrize("name", ["catalog", "catalog/data.mdb", "catalog/new.mdb", "catalog/lock.mdb"])
def test_a_catalog_that_is_none_is_made_anew(rig: Any, tmp_path: Path, name: str, how: str) -> None:
    keys = rig.put(25)
    rig.tier.close()
    path = rig.directory / name
    path.touch()
    replace(path, how, tmp_path / "elsewhere")
    opened_again(rig, keys)
    assert not (rig.directory / "catalog").is_symlink()


def test_a_new_small_file_is_not_written_through_a_link(rig: Any, tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(b"theirs")
    (rig.directory / ".namespaces.json.new").symlink_to(tmp_path / "theirs")
    assert len(rig.put(2)) == 2
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


# The catalog ---------------------------------------------------------------------------------------

WORK = """
import sys
from pathlib import Path
import numpy as np
from kvstore.native import aligned_bytes
from kvstore.tiers.nvme.tier import NvmeTier
for directory in map(Path, sys.argv[1:]):
    rng = np.random.default_rng(1)
    with NvmeTier(directory, 16 << 20, lambda _: None) as tier:
        number = tier.name_namespace(b"n" * 16, "{}")
        live = tier.recovered().slots.tolist()
        memory = aligned_bytes(8192)
        memory[:] = 7
        for _ in range(6):
            slots = tier.allocate(8192, 60)
            keys = rng.integers(0, 256, (len(slots), 16), dtype=np.uint8)
            job = tier.begin_write(
                slots, keys, np.zeros_like(keys), np.full(len(slots), number, np.uint32),
                np.full(len(slots), 4096, np.uint32), [((int(memory.ctypes.data), 8192),)] * len(slots),
            )
            job.write()
            job.name()
            live += slots[tier.finish_write(job)].tolist()
            tier.free(np.array(live[:40], np.int64))
            live = live[40:]
        print(tier.n_live, len(live), tier.health)
"""


def test_no_damage_of_the_catalog_ends_the_process(tmp_path: Path) -> None:
    """Pages in each other's place, odd headers: LMDB ends the process that meets them while it writes."""
    base, n_cases = tmp_path / "base", 40

    def run(*directories: Path) -> list[str]:
        command = [sys.executable, "-c", WORK, *map(str, directories)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    for _ in range(2):
        run(base)
    whole = (base / "catalog" / "data.mdb").read_bytes()
    n_pages = len(whole) // PAGE
    cases = []
    for i in range(n_cases):
        rng = np.random.default_rng(i)
        bad = bytearray(whole)
        a, b = (int(at) * PAGE for at in rng.permutation(n_pages)[:2])
        if i % 2:
            bad[a : a + PAGE], bad[b : b + PAGE] = bad[b : b + PAGE], bad[a : a + PAGE]
        else:
            bad[a + int(rng.integers(0, 64))] = int(rng.integers(0, 256))
        cases.append(tmp_path / f"case-{i}")
        shutil.copytree(base, cases[-1])
        (cases[-1] / "catalog" / "data.mdb").write_bytes(bad)
    for line in run(*cases):
        n_live, n_expected, health = line.split()
        assert (n_live, health) == (n_expected, "ok")


def test_the_file_of_a_catalog_that_was_there_is_never_written_to(rig: Any) -> None:
    rig.put(5)
    rig.tier.close()
    data = rig.directory / "catalog" / "data.mdb"
    with data.open("rb") as old:
        before = old.read()
        rig.open()
        rig.take_recovered()
        assert len(rig.put(5)) == 5
        old.seek(0)
        assert old.read() == before
        assert os.fstat(old.fileno()).st_nlink == 0


def test_a_name_that_lacks_is_noticed(rig: Any) -> None:
    """A catalog from which a page of names has gone, with all else intact, is damaged."""
    keys = rig.put(200, pages=2, chain=False)
    rig.tier.close()
    data = rig.directory / "catalog" / "data.mdb"
    image = bytearray(data.read_bytes())
    leaves = [at for at in range(0, len(image), PAGE) if keys[0] in image[at : at + PAGE]]
    others = [at for at in range(0, len(image), PAGE) if keys[-1] in image[at : at + PAGE]]
    number = image[leaves[-1] : leaves[-1] + 8]
    image[leaves[-1] : leaves[-1] + PAGE] = image[others[-1] : others[-1] + PAGE]
    image[leaves[-1] : leaves[-1] + 8] = number
    data.write_bytes(image)
    rig.open()
    assert set(rig.take_recovered()) == set(keys)
    assert rig.tier.stats()["rebuilt"] == 1


def test_any_failure_of_the_catalog_is_one_of_the_transaction(rig: Any) -> None:
    class Broken:
        def begin(self, **_: object) -> None:
            raise SystemError("returned a result with an exception set")

        def close(self) -> None:
            pass

    catalog = rig.tier._opened.book.catalog
    catalog.close()
    catalog._env = Broken()
    with pytest.raises(CatalogError, match="exception set"):
        rig.tier._opened.book.commit(NO_RECORDS, [b"x" * 12])
    assert len(rig.put(3)) == 3


# The directory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["the directory", "its superblock"])
def test_nothing_is_live_that_no_start_would_find(tmp_path: Path, rig_at: Callable[..., Any], what: str) -> None:
    rig = rig_at(tmp_path / "nvme", clock=(clock := ManualClock()))
    keys = rig.put(5)
    path = rig.directory if what == "the directory" else rig.directory / "kvstore.json"
    path.rename(tmp_path / "away")
    if what == "the directory":
        rig.directory.mkdir()
    assert rig.put(5) == []
    assert rig.tier.health == "failing"
    assert rig.read(keys) == [True] * 5
    if what == "the directory":
        rig.directory.rmdir()
    (tmp_path / "away").rename(path)
    clock.advance(5.0)
    assert len(rig.put(1)) == 1
    assert len(rig.put(5)) == 5
    assert set(rig.reopen()) == set(rig.known)


def test_a_directory_in_use_is_refused_without_its_lock_file_too(rig: Any) -> None:
    rig.put(5)
    (rig.directory / "lock").unlink()
    with pytest.raises(ConfigError, match="in use"):
        NvmeTier(rig.directory, 3 << 20, lambda _: None)
