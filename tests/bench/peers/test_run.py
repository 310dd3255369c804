"""All systems in turn: a small real run with this store's daemons and plain files, and what comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvstore.bench.peers import catalog
from kvstore.bench.peers.catalog import ENTRIES, KEPT, Entry, chosen
from kvstore.bench.peers.driver import OPERATIONS
from kvstore.bench.peers.environments import Environment, Place
from kvstore.bench.peers.figures import Cell, PeersReport, Sample
from kvstore.bench.peers.picture import draw_peers
from kvstore.bench.peers.run import PeersOptions, Tools, run_peers
from kvstore.bench.peers.tables import peers_tables
from kvstore.bench.report import print_tables
from kvstore.cli.daemon_process import own_process
from kvstore.cli.nvme_place import room_for
from kvstore.errors import BadInputError, UnavailableError

MIB = 1 << 20
OPTIONS = PeersOptions(block_sizes=(64 << 10, MIB), rounds=3, batch_bytes=2 * MIB)
NOT_TO_BE_HAD = "there is no such thing here"


def run(folder: Path, entries: tuple[Entry, ...], kept: list[PeersReport] | None = None) -> PeersReport:
    def none(_: Environment) -> Place:
        raise UnavailableError(NOT_TO_BE_HAD)

    keep = kept.append if kept is not None else lambda _: None
    return run_peers(OPTIONS, entries, Tools(own_process, room_for, none, folder, keep=keep))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> PeersReport:
    """Everything but the peers that would have to be installed."""
    return run(tmp_path_factory.mktemp("peers"), ENTRIES)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_operation_of_every_system_is_measured_at_every_size(report: PeersReport) -> None:
    there = [entry for entry in ENTRIES if entry.environment is None]
    measured = {(c.name, c.operation, c.block_bytes) for c in report.cells}
    assert measured == {(e.name, o, s) for e in there for o in e.operations for s in OPTIONS.block_sizes}
    assert all(len(cell.samples) == OPTIONS.rounds for cell in report.cells)
    assert all(sample.seconds > 0 for cell in report.cells for sample in cell.samples)
    assert report.wrong_blocks == {}
    assert {entry.name for entry in there} == set(report.versions)


@pytest.mark.slow
def test_what_was_measured_is_handed_over_after_each_size(tmp_path: Path) -> None:
    kept: list[PeersReport] = []
    whole = run(tmp_path, chosen("file", ("dram",)), kept)
    assert [each.block_sizes for each in kept] == [[64 << 10], [64 << 10, MIB]]
    assert len(kept[0].cells) < len(kept[1].cells) == len(whole.cells)


@pytest.mark.slow
def test_a_peer_that_can_not_be_had_is_left_out_with_its_reason(report: PeersReport) -> None:
    installed = {entry.name for entry in ENTRIES if entry.environment is not None}
    assert {each.name for each in report.skipped} == installed
    assert {each.reason for each in report.skipped} == {NOT_TO_BE_HAD}


@pytest.mark.slow
def test_all_ways_of_this_store_are_compared_with_limit_and_peers(report: PeersReport) -> None:
    pairs = {(c.own, c.other) for c in report.comparisons()}
    dram = {("kvstore", "copy"), ("kvstore-embedded", "file-cached"), ("kvstore-grpc", "file-cached")}
    disk = {("kvstore-nvme", "disk"), ("kvstore-nvme", "file-durable"), ("kvstore-nvme", "file-direct")}
    assert pairs >= dram | disk
    assert not {("kvstore", "disk"), ("kvstore", "kvstore-grpc")} & pairs


@pytest.mark.slow
def test_the_report_can_be_read(report: PeersReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = json.loads(json.dumps(report.to_dict()))
    assert len(plain["cells"]) == len(report.cells)
    draw_peers(tmp_path / "p.png", report)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    print_tables(peers_tables(report))
    shown = capsys.readouterr().out
    for word in ("Redis, raw RESP", NOT_TO_BE_HAD, "64 KiB", "kvstore, NVMe", "limit: the disk"):
        assert word in shown


def test_a_system_that_fails_is_out_at_that_size_only(tmp_path: Path) -> None:
    sound = next(entry for entry in ENTRIES if entry.name == "file-cached")
    limit = next(entry for entry in ENTRIES if entry.name == "copy")
    failing = Entry("failing", "failing", "dram", "peer", str(_failing(tmp_path).with_suffix("")), {"way": "cached"})
    report = run(tmp_path, (limit, sound, failing))
    assert {(e.name, e.block_bytes, e.reason) for e in report.skipped} == {
        ("failing", MIB, "put: OSError: blocks of 1048576 bytes are too large")
    }
    assert {c.block_bytes for c in report.cells if c.name == "failing"} == {64 << 10}
    assert {c.block_bytes for c in report.cells if c.name == "file-cached"} == {64 << 10, MIB}


def _failing(folder: Path) -> Path:
    path = folder / "failing.py"
    files = Path(catalog.__file__).parent / "systems" / "files.py"
    path.write_text(
        f"import runpy\nFiles = runpy.run_path({str(files)!r})['Files']\n"
        "class Failing(Files):\n"
        "    def put(self, batch, blocks):\n"
        "        if blocks.shape[1] > 65536:\n"
        "            raise OSError(f'blocks of {blocks.shape[1]} bytes are too large')\n"
        "        return super().put(batch, blocks)\n"
        "def open_system(setup):\n"
        "    return Failing(setup)\n"
    )
    return path


def cell(name: str, seconds: list[float], wrong: int = 0) -> Cell:
    samples = tuple(Sample(each, each / 2, wrong) for each in seconds)
    return Cell(name, "get", MIB, 1, samples)


@pytest.mark.parametrize(
    ("own", "other", "verdict"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.05], [2.0, 2.2, 1.8, 2.1, 2.0], "ahead"),
        ([2.0, 2.2, 1.8, 2.1, 2.0], [1.0, 1.1, 0.9, 1.0, 1.05], "behind"),
        ([1.0, 2.0, 1.0, 2.0, 1.5], [2.0, 1.0, 2.0, 1.0, 1.5], "level"),
    ],
)
def test_verdicts_follow_the_bounds(own: list[float], other: list[float], verdict: str) -> None:
    entries = tuple(entry for entry in ENTRIES if entry.name in ("kvstore", "file-cached"))
    report = PeersReport(entries, (cell("kvstore", own), cell("file-cached", other)), {}, (), 5, MIB)
    (comparison,) = report.comparisons()
    assert comparison.verdict == verdict
    ratios = np.array(other) / np.array(own)
    assert comparison.ratio.median == pytest.approx(float(np.median(ratios)))
    assert comparison.cpu_ratio.median == pytest.approx(comparison.ratio.median)
    assert ratios.min() <= comparison.ratio.low <= comparison.ratio.median <= comparison.ratio.high <= ratios.max()


def test_wrong_bytes_are_shown_by_system(capsys: pytest.CaptureFixture[str]) -> None:
    entries = tuple(entry for entry in ENTRIES if entry.name in ("kvstore", "file-cached"))
    cells = (cell("kvstore", [1.0, 1.0, 1.0]), cell("file-cached", [1.0, 1.0, 1.0], wrong=2))
    report = PeersReport(entries, cells, {"file-cached": "files"}, (), 3, MIB)
    assert report.wrong_blocks == {"file-cached": 6}
    print_tables(peers_tables(report))
    row = next(line for line in capsys.readouterr().out.splitlines() if "page cache" in line and "files" in line)
    assert " 6 " in row


def test_peers_are_chosen_by_name_or_by_family() -> None:
    names = {entry.name for entry in chosen("redis", ("dram",)) if entry.role == "peer"}
    assert names == {"redis-raw", "redis-py"}
    only = [entry.name for entry in chosen("lmcache-server", ("dram", "disk"))]
    assert "lmcache-server" in only
    assert "lmcache-process" not in only
    assert {"copy", "kvstore", "kvstore-nvme", "disk"} <= set(only)
    assert chosen(None, ("dram", "disk")) == ENTRIES
    with pytest.raises(BadInputError, match=r"'memcached'; known are .*mooncake-shm"):
        chosen("redis,memcached", ("dram",))


def test_options_that_can_not_work_are_refused() -> None:
    with pytest.raises(BadInputError, match="rounds is 2"):
        PeersOptions(rounds=2)
    with pytest.raises(BadInputError, match="multiples of 4096"):
        PeersOptions(block_sizes=(5000,))


def test_the_catalog_is_consistent() -> None:
    folder = Path(catalog.__file__).parent / "systems"
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    for tier in KEPT:
        assert [e.role for e in ENTRIES if e.tier == tier and e.reference] == ["own"]
        assert any(e.role == "limit" for e in ENTRIES if e.tier == tier)
    assert {f"{entry.module}.py" for entry in ENTRIES} == {p.name for p in folder.glob("*.py")} - {"__init__.py"}
    assert all(set(entry.operations) <= set(OPERATIONS) for entry in ENTRIES)
