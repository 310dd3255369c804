"""The disk's own limit: a real file, real direct I/O, every byte asked for moved."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.bench.disk_limit import Fio, LimitFile, PlainLoop, disk_limit
from kvstore.errors import BadInputError, KVStoreError

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LimitFile]:
    try:
        made = LimitFile(tmp_path, 16 * MIB)
    except BadInputError as error:
        pytest.skip(f"the temporary directory has no direct I/O: {error}")
    with made:
        yield made


def changed_pages(before: bytes, after: bytes) -> list[int]:
    return [at for at in range(0, len(after), 4096) if after[at : at + 4096] != before[at : at + 4096]]


def test_the_file_is_full_of_data_and_goes_away(tmp_path: Path) -> None:
    with LimitFile(tmp_path, 17 * MIB) as file:
        assert file.path.stat().st_size == 16 * MIB
        data = file.path.read_bytes()
        assert all(any(data[at : at + 4096]) for at in range(0, len(data), 4096))
    assert list(tmp_path.iterdir()) == []


def test_measurements_go_round_the_file(file: LimitFile) -> None:
    assert [file.part(6 * MIB) for _ in range(4)] == [0, 6 * MIB, 0, 6 * MIB]
    with pytest.raises(BadInputError, match="larger file"):
        file.part(17 * MIB)


@pytest.mark.parametrize("block_bytes", [64 << 10, MIB])
def test_the_plain_loop_writes_and_reads_every_byte(file: LimitFile, block_bytes: int) -> None:
    limit = PlainLoop(file, depth=3, sync_bytes=2 * MIB)
    before = file.path.read_bytes()
    assert limit.read_s(5 * MIB, block_bytes) > 0
    assert file.path.read_bytes() == before
    assert limit.write_s(5 * MIB, block_bytes) > 0
    after = file.path.read_bytes()
    assert changed_pages(before, after) == list(range(5 * MIB, 10 * MIB, 4096))


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_moves_what_it_is_asked_to(file: LimitFile) -> None:
    limit = disk_limit(file, depth=4, sync_bytes=2 * MIB)
    assert limit.name.startswith("fio")
    before = file.path.read_bytes()
    begin = file.part(0)
    assert limit.write_s(4 * MIB, 256 << 10) > 0
    after = file.path.read_bytes()
    assert changed_pages(before, after) == list(range(begin, begin + 4 * MIB, 4096))
    assert limit.read_s(4 * MIB, 256 << 10) > 0
    assert file.path.read_bytes() == after


def test_a_fio_that_fails_is_named(file: LimitFile, tmp_path: Path) -> None:
    program = tmp_path / "fio"
    program.write_text(f"#!{sys.executable}\nprint('no such engine')\n")
    program.chmod(0o755)
    with pytest.raises(KVStoreError, match="fio can't be used here: fio, io_uring"):
        Fio(str(program), file, 4, MIB)


def test_without_fio_the_plain_loop_says_so(file: LimitFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert disk_limit(file, 5, MIB).name == "plain O_DIRECT loop, 5 threads (fio is not installed)"


def test_a_place_that_cant_be_measured_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="choose another --nvme-dir"):
        LimitFile(tmp_path / "absent", MIB)
