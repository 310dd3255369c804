"""The bandwidth benchmark on a small daemon: complete, self-checking, and reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from kvstore.bench.bandwidth import BandwidthOptions, BandwidthReport, run_bandwidth
from kvstore.bench.bandwidth_copy import CopyBench
from kvstore.bench.pictures import draw_bandwidth
from kvstore.bench.report import bandwidth_tables, print_tables
from kvstore.errors import KVStoreError, UnavailableError

MIB = 1 << 20
SMALL = BandwidthOptions(
    block_sizes=(16 << 10, 64 << 10),
    threads=(1, 2),
    pairs=2,
    batch_bytes=MIB,
    dram_bytes=32 * MIB,
    lookup_blocks=16,
    lookups=50,
    lease_block_sizes=(4096, 8192),
)


@pytest.fixture(scope="module")
def report(daemon_context: Callable[[int], AbstractContextManager[str]]) -> BandwidthReport:
    with daemon_context(SMALL.dram_bytes) as socket:
        return run_bandwidth(SMALL, socket)


def test_every_operation_is_measured_at_every_size(report: BandwidthReport) -> None:
    measured = {(r.name, r.block_bytes, r.threads) for r in report.rows if not r.cold}
    operations = ("put", "get_into", "lease + copy out of views")
    assert measured == {(o, s, t) for o in operations for s in SMALL.block_sizes for t in SMALL.threads}
    assert [r.name for r in report.rows if r.cold] == ["put, first call", "get_into, first call"] * 2
    assert report.mismatches == 0
    assert all(r.gb_per_s > 0 and r.ratio > 0 for r in report.rows if not r.cold)


def test_lookups_cover_both_kinds_of_rows_and_sizes(report: BandwidthReport) -> None:
    assert [(r.name, r.rows, r.block_bytes) for r in report.lookups] == [
        *((name, "tokens", 4096) for name in ("match", "lease")),
        *((name, "hashes", 4096) for name in ("match", "lease")),
        ("lease", "tokens", 8192),
    ]
    for row in report.lookups:
        assert row.kv_bytes == 16 * row.block_bytes
        assert row.latency.n == 50
        assert row.echo_ratio == pytest.approx(row.latency.p50_us / row.echo.p50_us)


def test_the_report_can_be_written(report: BandwidthReport, tmp_path: Path) -> None:
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["mismatches"] == 0
    assert len(plain["rows"]) == len(report.rows)
    assert plain["limits"]["unix_echo_4k"]["p50_us"] > 0
    draw_bandwidth(tmp_path / "b.png", report)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    print_tables(bandwidth_tables(report))


def test_tables_name_what_was_measured(
    report: BandwidthReport, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    print_tables(bandwidth_tables(report))
    shown = capsys.readouterr().out
    for word in ("get_into", "64.0 KiB", "Unix-socket echo", "hashes", "mismatching blocks"):
        assert word in shown


def test_bytes_that_differ_are_counted(start_daemon: Callable[[int], str]) -> None:
    with CopyBench(start_daemon(SMALL.dram_bytes), SMALL, 64 << 10) as bench:
        number, _ = bench._timed_put(1)
        bench._timed_get(number, 1)
        assert bench.mismatches == 0
        bench._sources[number % 4][[2, 5], -1] ^= 1
        bench._timed_get(number, 1)
        assert bench.mismatches == 2


def test_batches_of_other_numbers_differ_in_every_block(start_daemon: Callable[[int], str]) -> None:
    with CopyBench(start_daemon(SMALL.dram_bytes), SMALL, 64 << 10) as bench:
        first = bench._stamped(1).copy()
        assert np.all(np.any(first != bench._stamped(5), axis=1))
        assert not np.array_equal(bench._tokens(1), bench._tokens(5))


def test_a_tier_that_keeps_nothing_is_an_error_and_not_a_speed(start_daemon: Callable[[int], str]) -> None:
    with CopyBench(start_daemon(2 * MIB), SMALL, 64 << 10) as bench:
        first, _ = bench._timed_put(1)
        for _ in range(3):
            bench._timed_put(1)
        with pytest.raises(KVStoreError, match="get_into found 0 of 16 blocks"):
            bench._timed_get(first, 1)


def test_no_daemon_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        CopyBench(str(tmp_path / "none.sock"), SMALL, 64 << 10)
