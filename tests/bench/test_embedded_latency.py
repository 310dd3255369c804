"""The benchmark of embedded stores on a small daemon: complete, and it finds wrong bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.bench.embedded_latency import DRAM_BYTES, EmbeddedBenchOptions, _Side, run
from kvstore.bench.report import embedded_table, print_tables
from kvstore.client import Client
from kvstore.errors import BadInputError, IntegrityError

SMALL = EmbeddedBenchOptions(pairs=2, calls=3, n_blocks=4, block_bytes=4096)
StartDaemon = Callable[..., str]


def test_every_figure_is_there_and_can_be_shown(start_daemon: StartDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(SMALL, Path(start_daemon(DRAM_BYTES)))
    wanted = {
        f"{call}_{what}" for call in ("match", "lease", "get_into") for what in ("embedded_us", "socket_us", "ratio")
    }
    assert wanted | {"pairs"} == set(figures)
    assert all(value > 0 for value in figures.values())
    print_tables([embedded_table(figures)])
    assert "get into ratio" in capsys.readouterr().out


def test_wrong_bytes_are_found(start_daemon: StartDaemon) -> None:
    with Client(start_daemon(DRAM_BYTES), timeout_s=20.0) as client:
        side = _Side(client, SMALL)
        with pytest.raises(IntegrityError, match="other bytes"):
            side.compare()
        side.burst_s("get_into")
        side.compare()
        side._blocks = np.zeros_like(side._blocks)
        with pytest.raises(IntegrityError, match="other bytes"):
            side.compare()


@pytest.mark.parametrize(("name", "value"), [("pairs", 0), ("calls", 0), ("n_blocks", 1 << 20)])
def test_options_that_measure_nothing_are_refused(name: str, value: int) -> None:
    with pytest.raises(BadInputError, match=f"{name} is {value}|too many"):
        EmbeddedBenchOptions(**{name: value})
