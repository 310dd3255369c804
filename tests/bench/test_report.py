"""Tables, JSON files and pictures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.bench.generate import ConversationOptions, TokenTrace, generate_trace
from kvstore.bench.measure import Latency
from kvstore.bench.pictures import draw_hit_ratio
from kvstore.bench.replay import ReplayOptions, ReplayResult
from kvstore.bench.replay_tables import replay_tables, simulation_tables
from kvstore.bench.report import print_tables, progress_bar, save
from kvstore.bench.simulate import HitCounts, simulate
from kvstore.bench.simulation_report import SimulationReport, run_simulation, simulation_steps
from kvstore.errors import BadInputError

PERCENTS = (5.0, 50.0, 100.0)
OPTIONS = ReplayOptions(capacity_percent=25, policy="lru")


@pytest.fixture(scope="module")
def tokens() -> TokenTrace:
    return generate_trace(ConversationOptions(sessions=15, seed=2))


@pytest.fixture(scope="module")
def simulated(tokens: TokenTrace) -> SimulationReport:
    return run_simulation(tokens, OPTIONS, PERCENTS)


@pytest.fixture
def replayed(simulated: SimulationReport) -> ReplayResult:
    return ReplayResult(
        name="generated",
        counts=simulated.counts,
        unique_blocks=simulated.unique_blocks,
        capacity_blocks=simulated.capacity_blocks,
        clients=1,
        block_bytes=65536,
        policy="lru",
        mismatches=0,
        skipped_blocks=0,
        unanswered=0,
        ended_leases=0,
        bytes_read=3 << 30,
        bytes_written=1 << 30,
        wall_s=2.0,
        read_gb_per_s=4.0,
        write_gb_per_s=3.0,
        latencies={"match": Latency(10, 50.0, 99.0)},
        tiers={"dram": {}},
    )


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_a_simulation_has_the_curve_and_both_ways_to_match(tokens: TokenTrace, simulated: SimulationReport) -> None:
    capacity = OPTIONS.capacity(tokens)
    assert simulated.counts == simulate(tokens, "lru", capacity)
    assert simulated.whole_block_counts == simulate(tokens, "lru", capacity, partial=False)
    assert [p.capacity_percent for p in simulated.points] == list(PERCENTS)
    assert simulated.points[0].counts.token_hits < simulated.points[-1].counts.token_hits


def test_steps_of_progress_add_up(tokens: TokenTrace) -> None:
    for workload in (tokens, tokens.block_view):
        done: list[int] = []
        run_simulation(workload, OPTIONS, PERCENTS, done.append)
        assert sum(done) == simulation_steps(workload, PERCENTS)


def test_hashes_have_one_way_to_match(tokens: TokenTrace) -> None:
    report = run_simulation(tokens.block_view, OPTIONS, PERCENTS)
    assert report.whole_block_counts is None
    assert report.to_dict()["whole_blocks_only"] is None


def test_a_simulation_has_the_keys_of_a_replay(simulated: SimulationReport, replayed: ReplayResult) -> None:
    names = {
        "requests",
        "block_accesses",
        "unique_blocks",
        "block_hit_ratio",
        "token_hit_ratio",
        "any_hit_ratio",
    }
    names |= {"tiers", "mismatches"}
    for report in (simulated, replayed):
        plain = json.loads(json.dumps(report.to_dict()))
        assert names <= plain.keys()
        assert plain["token_hit_ratio"] == simulated.counts.token_hit_ratio
    assert len(simulated.to_dict()["curve"]) == len(PERCENTS)


def test_files_are_written_with_a_line_about_each(
    tokens: TokenTrace, simulated: SimulationReport, replayed: ReplayResult, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "replay"
    lines = save(folder, replayed.to_dict(), lambda path: draw_hit_ratio(path, tokens, simulated, replayed))
    assert lines == [f"report: {folder / 'report.json'}", f"picture: {folder / 'picture.png'}"]
    assert json.loads((folder / "report.json").read_text())["requests"] == simulated.counts.requests
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in folder.iterdir()) == ["picture.png", "report.json"]


def test_hashes_are_drawn_too(tokens: TokenTrace, tmp_path: Path) -> None:
    report = run_simulation(tokens.block_view, OPTIONS, PERCENTS)
    draw_hit_ratio(tmp_path / "p.png", tokens.block_view, report)
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_without_matplotlib_the_picture_is_left_out(
    tokens: TokenTrace, simulated: SimulationReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lines = save(tmp_path, {"a": 1}, lambda path: draw_hit_ratio(path, tokens, simulated))
    assert lines[1] == "picture: left out, matplotlib is not installed (pip install '.[bench]' from a checkout)"
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": 1}
    assert not (tmp_path / "picture.png").exists()


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=r"file.*choose another --output"):
        save(tmp_path / "file" / "sub", {}, None)


def test_replay_tables(replayed: ReplayResult, capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(replay_tables(replayed))
    text = shown(capsys)
    assert f"{replayed.counts.block_hit_ratio:.4f}" in text
    assert "3.0 GiB" in text
    assert "mismatching blocks" in text
    assert "leases ended" not in text


def test_what_went_wrong_is_shown(replayed: ReplayResult, capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(replay_tables(replace(replayed, mismatches=12_345, unanswered=7, ended_leases=9)))
    text = shown(capsys)
    for word in ("12,345", "requests not answered", "7", "leases ended", "9"):
        assert word in text


def test_simulation_tables(simulated: SimulationReport, capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(simulation_tables(simulated))
    text = shown(capsys)
    assert simulated.whole_block_counts is not None
    assert f"{simulated.whole_block_counts.token_hit_ratio:.4f}" in text
    assert f"{simulated.points[0].counts.block_hit_ratio:.4f}" in text


def test_progress_goes_to_stderr_and_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("replay", 10) as progress:
        progress(10)
    silent = capsys.readouterr()
    assert silent.out == silent.err == ""
    with progress_bar("replay", 10, show=True) as progress:
        progress(10)
    loud = capsys.readouterr()
    assert loud.out == ""
    assert "replay" in loud.err


def test_counts_of_clients_add_up() -> None:
    total = HitCounts(1, 2, 3, 4, 5, 6, 7, 8)
    total.add(HitCounts(10, 20, 30, 40, 50, 60, 70, 80))
    assert total == HitCounts(11, 22, 33, 44, 55, 66, 77, 88)
