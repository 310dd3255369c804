"""The benchmark of metrics on small daemons: complete, and it finds wrong bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.bench.metrics_cost import MetricsCostOptions, _Side, run
from kvstore.bench.pictures import draw_metrics
from kvstore.bench.report import metrics_table, print_tables
from kvstore.cli.daemon_process import free_port
from kvstore.config import MetricsOptions
from kvstore.errors import BadInputError, IntegrityError

MIB = 1 << 20
SMALL = MetricsCostOptions(pairs=3, block_bytes=16 << 10, batch_bytes=MIB, reads=2, leases=5, scrape_every_s=0.02)
RATIOS = ("ratio", "ratio_low")
StartDaemon = Callable[..., str]


def test_every_figure_is_there_and_can_be_shown(
    start_daemon: StartDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    on = start_daemon(SMALL.dram_bytes, metrics=MetricsOptions(f"127.0.0.1:{port}"))
    figures = run(SMALL, on, start_daemon(SMALL.dram_bytes), port)
    wanted = {f"{what}_{name}" for what in ("read", "lease", "read_steady", "lease_steady") for name in RATIOS}
    wanted |= {"read_on_gb_per_s", "read_off_gb_per_s", "lease_on_us", "lease_off_us", "lease_on_p99_us"}
    assert wanted | {"lease_off_p99_us", "scrape_ms", "scrape_bytes", "observe_ns", "pairs"} == set(figures)
    assert all(value > 0 for value in json.loads(json.dumps(figures)).values())
    print_tables([metrics_table(figures)])
    assert "scrape ms" in capsys.readouterr().out
    draw_metrics(tmp_path / "picture.png", figures)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_bytes_are_found(start_daemon: StartDaemon) -> None:
    with _Side(start_daemon(SMALL.dram_bytes), SMALL) as side:
        assert side.measure_s("read", 2) > 0
        side._blocks = np.zeros_like(side._blocks)
        with pytest.raises(IntegrityError, match="other bytes"):
            side.measure_s("read", 2)


def test_options_that_measure_nothing_are_refused() -> None:
    with pytest.raises(BadInputError, match="pairs is 0"):
        MetricsCostOptions(pairs=0)
    with pytest.raises(BadInputError, match="scrape_every_s is 0"):
        MetricsCostOptions(scrape_every_s=0)


def test_too_few_pairs_are_refused_by_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "bench", "metrics", "--pairs", "5"],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "KVSTORE_CONFIG": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert "--pairs" in done.stderr
