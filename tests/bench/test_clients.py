"""Many clients, and what routers ask, on small daemons: complete, and they find what is wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.bench import clients, overlap
from kvstore.bench.client_process import Phase, Prompts, Rounds, fill
from kvstore.bench.clients import ClientsOptions, ClientsReport, _Crowd, _Measured
from kvstore.bench.clients_report import clients_tables, draw_clients
from kvstore.bench.crowd_echo import CrowdEcho, EchoCaller
from kvstore.bench.overlap import OverlapOptions
from kvstore.bench.processes import ChildWatch, memory_of, processor_s
from kvstore.bench.report import overlap_table, print_tables
from kvstore.errors import BadInputError, KVStoreError, UnavailableError

StartDaemon = Callable[..., str]
KIB, MIB = 1 << 10, 1 << 20
SMALL = ClientsOptions(clients=3, blocks=200, seconds=0.5, prompt_blocks=4, seed=5)
FEW = OverlapOptions(pairs=2, calls=4, prompts=6, blocks_max=8, block_bytes=16 * KIB, loads=12, learnt_after=6)


@pytest.fixture(scope="module")
def report(daemon_context: Any) -> ClientsReport:
    with daemon_context(SMALL.dram_bytes) as address:
        return clients.run(SMALL, address, os.getpid())


def test_every_client_takes_part_and_all_figures_are_there(report: ClientsReport) -> None:
    plain = json.loads(json.dumps(report.to_dict()))
    assert len(plain["rounds_by_client"]) == 3
    assert min(plain["rounds_by_client"]) > 0
    for name in ("daemon", "echo"):
        side = plain[name]
        assert side["n_lost"] == 0
        assert {call: times["n"] for call, times in side["by_call"].items()} == dict.fromkeys(
            ("match", "lease", "release"), side["n_rounds"]
        )
        assert 0 < side["fairness"] <= 1
        assert side["gap_s_max"] > 0
        assert side["by_call"]["match"]["p50_us"] <= side["by_call"]["match"]["p99_us"]
        assert side["by_call"]["match"]["p99_us"] <= side["by_call"]["match"]["max_us"]
    assert plain["ratio"] == pytest.approx(plain["daemon"]["rounds_per_s"] / plain["echo"]["rounds_per_s"])
    assert plain["memory"]["before"]["own_bytes"] > 0
    assert sum(rate for rate, _ in plain["timeline"]) / len(plain["timeline"]) == pytest.approx(
        plain["daemon"]["rounds_per_s"], rel=0.01
    )


def test_a_report_can_be_shown(report: ClientsReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(clients_tables(report))
    shown = capsys.readouterr().out
    assert "3 clients, 200 blocks, 0.5 s" in shown
    assert "longest time a client finished no round" in shown
    draw_clients(tmp_path / "picture.png", report)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_calls_that_find_something_else_are_counted(start_daemon: StartDaemon, tmp_path: Path) -> None:
    address = start_daemon(SMALL.dram_bytes)
    fill(address, Prompts(10, 4, 64, SMALL.seed), lambda _: None)  # a fifth of what the clients look for
    phase = Phase(address, is_echo=False, seconds=0.3)
    with _Crowd(SMALL, [phase]).running() as crowd:
        served = crowd.phase(os.getpid()).served()
    assert 0.5 * served.n_rounds < served.n_lost < 2 * served.n_rounds


def test_clients_that_can_not_connect_are_an_error_in_words(tmp_path: Path) -> None:
    phase = Phase(str(tmp_path / "nobody.sock"), is_echo=False, seconds=0.3)
    with (
        _Crowd(SMALL, [phase]).running() as crowd,
        pytest.raises(UnavailableError, match=r"could not all take part: .*nobody"),
    ):
        crowd.phase(os.getpid())


def test_a_client_that_waits_shows_as_a_gap_and_unfair() -> None:
    busy = Rounds(np.arange(101.0, 111.0, 0.1), np.full((100, 3), 0.01), 0, 1.0)
    starved = Rounds(np.array([103.0, 108.0]), np.full((2, 3), 0.01), 0, 1.0)
    silent = Rounds(np.empty(0), np.empty((0, 3)), 0, 0.0)
    served = _Measured([busy, starved], 100.0, 11.0, 5.5, None, None).served()
    assert [served.gap_s_max, served.fairness] == pytest.approx([5.0, 0.02])
    assert [served.server_share, served.rounds_per_s] == pytest.approx([0.5, 102 / 11])
    none = _Measured([silent, silent], 100.0, 11.0, 0.0, None, None).served()
    assert [none.gap_s_max, none.fairness, none.n_rounds] == pytest.approx([11.0, 0, 0])


def test_matches_beside_working_children_are_told_from_the_others() -> None:
    ends_s = np.arange(1.0, 11.0)
    seconds = np.repeat(np.where((ends_s >= 4) & (ends_s <= 6), 0.030, 0.001)[:, None], 3, axis=1)
    beside = _Measured([Rounds(ends_s, seconds, 0, 0.0)], 0.0, 11.0, 0.0, None, None).beside([(3.5, 6.5)])
    assert (beside.n_spans, beside.busy.latency.n, beside.idle.latency.n) == (1, 3, 7)
    assert beside.p99_ratio == pytest.approx(30.0)
    assert _Measured([Rounds(ends_s, seconds, 0, 0.0)], 0.0, 11.0, 0.0, None, None).beside([]).p99_ratio is None


def test_a_child_that_works_is_noticed_and_one_that_sleeps_is_not() -> None:
    context = multiprocessing.get_context("spawn")
    for work, n_spans in ((_work_for, 1), (time.sleep, 0)):
        child = context.Process(target=work, args=(60.0,))
        with ChildWatch(os.getpid()) as watch:
            child.start()
            until_s = time.monotonic() + 60
            while n_spans and not watch.spans_s and time.monotonic() < until_s:
                time.sleep(0.01)
            assert processor_s(child.pid or 0) >= 0
        if n_spans:
            assert watch.spans_s
        child.kill()
        child.join()
        assert processor_s(child.pid or 0) == 0.0


def _work_for(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def test_memory_is_what_the_process_has() -> None:
    before = memory_of(os.getpid())
    kept = np.ones(64 * MIB, np.uint8)
    assert memory_of(os.getpid()).own_bytes - before.own_bytes > 0.9 * len(kept)
    with pytest.raises(OSError, match="No such"):
        memory_of(1 << 30)


def test_echoes_are_as_long_as_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "echo.sock"
    with CrowdEcho(path):
        for caller in [EchoCaller(str(path)) for _ in range(3)]:
            caller.call(100_000, 50_000)
            caller.call(10, 0)
            caller.call(1, 1)
            caller.close()
        late = EchoCaller(str(path))
        late.call(5, 5)
    with pytest.raises((UnavailableError, OSError)):
        late.call(5, 5)
    late.close()


def test_too_little_room_is_an_error(start_daemon: StartDaemon) -> None:
    with pytest.raises(KVStoreError, match="were not stored"):
        fill(start_daemon(8 * MIB), Prompts(1, 5000, 64), lambda _: None)


def test_hints_are_measured_beside_matches_and_loads(
    start_daemon: StartDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = start_daemon(2 * MIB, nvme_dir=tmp_path / "nvme", nvme_bytes=256 * MIB)
    figures = overlap.run(FEW, Path(address))
    for name in ("all_told_to_took", "all_off_by", "first_off_by", "overlap_to_match", "overlap_in_batch_to_match"):
        assert figures[name] > 0, name
    assert figures["loads"] == 12
    print_tables([overlap_table(figures)])
    assert "overlap to match" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (ClientsOptions, "clients", 0),
        (ClientsOptions, "seconds", 0),
        (ClientsOptions, "block_bytes", 5000),
        (ClientsOptions, "blocks", 3),
        (OverlapOptions, "pairs", 0),
        (OverlapOptions, "blocks_max", 1),
        (OverlapOptions, "loads", 30),
    ],
)
def test_options_that_measure_nothing_are_refused(make: Any, name: str, value: Any) -> None:
    with pytest.raises(BadInputError, match=f"{name} is {value}"):
        make(**{name: value})
