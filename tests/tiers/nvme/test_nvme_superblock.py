"""Whose directory it is: foreign, damaged, newer or used ones are refused and stay as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.nvme.superblock import DirectoryLock, segment_numbers
from kvstore.tiers.nvme.tier import NvmeTier

MIB = 1 << 20


def open_tier(directory: Path, **settings: Any) -> NvmeTier:
    return NvmeTier(directory, 16 * MIB, lambda _: None, **settings)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("recovery", ["none", "normal", "strict"])
@pytest.mark.parametrize("name", ["data.txt", "folder", "segment-00000001", "catalog"])
def test_a_foreign_directory_is_refused(tmp_path: Path, name: str, recovery: str) -> None:
    if name in ("folder", "catalog"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=f"{name}.*give an empty directory"):
        open_tier(tmp_path, recovery=recovery)
    assert {**contents(tmp_path), str(tmp_path / "lock"): b""} == {**before, str(tmp_path / "lock"): b""}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"magic": "other"}', '{"magic": "kvstore-nvme", "version": 1}',
     '{"magic": "kvstore-nvme", "version": 1, "uuid": "zz", "segment_bytes": 65536}',
     '{"magic": "kvstore-nvme", "version": 1, "uuid": "00", "segment_bytes": 65536}',
     '{"magic": "kvstore-nvme", "version": 1, "uuid": "' + "0" * 32 + '", "segment_bytes": "1"}',
     '{"magic": "kvstore-nvme", "version": 1, "uuid": "' + "0" * 32 + '", "segment_bytes": 1}'],
)  # fmt: skip
def test_a_superblock_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "kvstore.json").write_text(text)
    with pytest.raises(ConfigError):
        open_tier(tmp_path)
    assert (tmp_path / "kvstore.json").read_text() == text


def test_another_format_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    fields = json.loads((tmp_path / "kvstore.json").read_text())
    fields["version"] = 2
    (tmp_path / "kvstore.json").write_text(json.dumps(fields))
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"version 2.*recovery 'none'"):
        open_tier(tmp_path)
    assert contents(tmp_path) == before
    open_tier(tmp_path, recovery="none").close()
    open_tier(tmp_path).close()


def test_none_removes_its_own_files_only(rig: Any) -> None:
    rig.put(5)
    rig.tier.close()
    (rig.directory / "notes.txt").write_text("mine")
    rig.open(recovery="none")
    assert rig.take_recovered() == []
    assert (rig.directory / "notes.txt").read_text() == "mine"
    assert rig.tier.namespaces() == {rig.number: (b"namespace-digest", "{}")}  # by this opening


def test_an_unknown_recovery_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none, normal, strict"):
        open_tier(tmp_path / "new", recovery="fast")


def test_a_directory_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from kvstore.tiers.nvme.superblock import DirectoryLock\n"
        f"lock = DirectoryLock(pathlib.Path({str(tmp_path)!r}))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="in use by another process"):
            open_tier(tmp_path)
        holder.kill()
    open_tier(tmp_path).close()  # the lock ends with the process


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be used"):
        open_tier(tmp_path / "file")


def test_segments_by_name() -> None:
    names = ["segment-00000002", "segment-00000010", "segment-1", "segment-0000001x", "segment-000000011", "other"]
    assert segment_numbers(names) == [2, 10]


def test_a_directory_is_free_once_it_is_released_whoever_else_has_the_descriptors(tmp_path: Path) -> None:
    """A child that was forked meanwhile has them, until it closes them: it does so, but not at once."""
    lock = DirectoryLock(tmp_path)
    inherited = [os.dup(fd) for fd in lock._fds]
    try:
        lock.release()
        lock.release()
        again = DirectoryLock(tmp_path)
        with pytest.raises(ConfigError, match="in use"):
            DirectoryLock(tmp_path)
        again.abandon()
    finally:
        for fd in inherited:
            os.close(fd)
