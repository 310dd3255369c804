"""The NVMe part of the bandwidth benchmark, small: complete, self-checking, reported, not fooled by warm blocks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvstore.bench.bandwidth import report_dict
from kvstore.bench.bandwidth_nvme import READ, WRITE, NvmeBench, NvmeOptions, NvmeReport, StartDaemon, run_nvme
from kvstore.bench.disk_limit import LimitFile
from kvstore.bench.pictures import draw_bandwidth
from kvstore.bench.report import bandwidth_tables, print_tables
from kvstore.cli.nvme_place import room_for
from kvstore.errors import BadInputError, KVStoreError

MIB = 1 << 20
SMALL = NvmeOptions(
    block_sizes=(64 << 10, 256 << 10), pairs=2, batch_bytes=2 * MIB, file_bytes=16 * MIB, depth=4, sync_bytes=MIB
)
RunningDaemon = Callable[..., AbstractContextManager[str]]


class NoDisk:
    """A limit that takes a second for everything."""

    name = "no disk"

    def write_s(self, n_bytes: int, block_bytes: int) -> float:  # noqa: ARG002
        return 1.0

    def read_s(self, n_bytes: int, block_bytes: int) -> float:  # noqa: ARG002
        return 1.0


def starter(daemon_context: RunningDaemon, folder: Path, dram_bytes: int = SMALL.dram_bytes) -> StartDaemon:
    @contextlib.contextmanager
    def start(block_bytes: int) -> Iterator[Path]:
        settings = {
            "nvme_dir": folder / f"nvme-{block_bytes}",
            "nvme_bytes": room_for(SMALL.data_set_blocks(block_bytes), SMALL.namespace(block_bytes)),
            "write_behind_bytes": SMALL.write_behind_bytes,
        }
        with daemon_context(dram_bytes, **settings) as socket:
            yield Path(socket)

    return start


@pytest.fixture(scope="module")
def report(daemon_context: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> NvmeReport:
    folder = tmp_path_factory.mktemp("bandwidth")
    try:
        LimitFile(folder, 8 * MIB).close()
    except BadInputError as error:
        pytest.skip(f"the temporary directory has no direct I/O: {error}")
    steps: list[str] = []
    done = run_nvme(SMALL, starter(daemon_context, folder), folder, steps.append)
    assert len(steps) == 1 + len(SMALL.block_sizes)
    assert not (folder / "disk-limit.dat").exists()
    return done


def test_every_size_is_written_and_read_beside_the_disk(report: NvmeReport) -> None:
    assert [(row.name, row.block_bytes) for row in report.rows] == [
        (name, size) for size in SMALL.block_sizes for name in (WRITE, READ)
    ]
    assert report.mismatches == 0
    assert all(row.gb_per_s > 0 and row.limit_gb_per_s > 0 and row.ratio > 0 for row in report.rows)
    assert report.limit.startswith(("fio", "plain"))
    assert report.facts.get("offload_skipped_blocks", 0) == 0
    # Every batch was written once; those that can't be in DRAM were read once, and once more for a pair.
    batch_blocks = SMALL.batch_bytes // SMALL.block_sizes[-1]
    assert report.facts["offloaded_blocks"] == SMALL.batches * batch_blocks
    assert report.facts["onboarded_blocks"] == (SMALL.cold_batches + SMALL.pairs) * batch_blocks


def test_the_report_can_be_written(
    report: NvmeReport, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plain = json.loads(json.dumps(report_dict(None, report)))
    assert plain["mode"] == "bandwidth"
    assert plain["mismatches"] == 0
    assert plain["nvme"]["rows"][0]["ratio_of_medians"] > 0
    draw_bandwidth(tmp_path / "b.png", None, report)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    print_tables(bandwidth_tables(None, report))
    shown = capsys.readouterr().out
    for words in (WRITE, READ, report.limit.split(",")[0], "mismatching blocks"):
        assert words in shown


def test_bytes_that_differ_are_counted(daemon_context: RunningDaemon, tmp_path: Path) -> None:
    size = SMALL.block_sizes[0]
    with starter(daemon_context, tmp_path)(size) as socket, NvmeBench(str(socket), SMALL, size, NoDisk()) as bench:
        for number in range(SMALL.batches):
            bench._write_s(number)
        bench._read_s(0)
        assert bench.mismatches == 0
        bench._source[[3, 7], -1] ^= 1
        bench._read_s(1)
        assert bench.mismatches == 2


def test_blocks_that_are_in_dram_are_no_cold_read(daemon_context: RunningDaemon, tmp_path: Path) -> None:
    size = SMALL.block_sizes[0]
    with starter(daemon_context, tmp_path)(size) as socket, NvmeBench(str(socket), SMALL, size, NoDisk()) as bench:
        bench._write_s(0)
        with pytest.raises(KVStoreError, match="0 of 32 blocks of 65536 bytes were read from NVMe"):
            bench._read_s(0)


def test_without_an_nvme_tier_nothing_is_durable(daemon_context: RunningDaemon) -> None:
    size = SMALL.block_sizes[0]
    with (
        daemon_context(SMALL.dram_bytes) as socket,
        NvmeBench(socket, SMALL, size, NoDisk()) as bench,
        pytest.raises(KVStoreError, match="0 of 32 blocks of 65536 bytes are durable"),
    ):
        bench._write_s(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": 0}, "pairs is 0"),
        ({"file_bytes": 500 * MIB}, "two batches"),
        ({"block_sizes": (1000,)}, "multiples of 4096"),
        ({"block_sizes": (3 * 4096,)}, "whole blocks"),
    ],
)
def test_impossible_options_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        NvmeOptions(**changes)  # type: ignore[arg-type]


def test_a_disk_without_room_is_named(daemon_context: RunningDaemon, tmp_path: Path) -> None:
    huge = NvmeOptions(batch_bytes=1 << 50, file_bytes=1 << 52)
    with pytest.raises(BadInputError, match="choose an --nvme-dir on a larger disk"):
        run_nvme(huge, starter(daemon_context, tmp_path), tmp_path)


def test_the_command_measures_nvme_and_leaves_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "kvstore.cli", "bench", "bandwidth", "--tier", "nvme", "--nvme-pairs", "2",
        "--nvme-batch", "2MiB", "--nvme-file", "16MiB", "--block-sizes", "64KiB", "--output", str(tmp_path), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    assert [row["name"] for row in plain["nvme"]["rows"]] == [WRITE, READ]
    assert plain["mismatches"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["picture.png", "report.json"]


def test_sigterm_leaves_no_file_and_no_daemon(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "kvstore.cli", "bench", "bandwidth", "--tier", "nvme", "--nvme-batch", "8MiB",
        "--nvme-file", "64MiB", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    while b"serving" not in (line := process.stderr.readline()):
        assert line, "it ended before it had started a daemon"
    assert len(list((tmp_path / "out").iterdir())) == 1
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert list((tmp_path / "out").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
