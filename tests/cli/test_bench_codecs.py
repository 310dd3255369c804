"""``kvstore bench codecs``."""

from __future__ import annotations

import json

from tests.cli.test_cli import kvstore


def test_a_table_or_json() -> None:
    options = ("--batch", "1MiB", "--heads", "2", "--head-dim", "64", "--pairs", "1", "--codec", "q4-rotated")
    shown = kvstore("bench", "codecs", *options)
    assert shown.returncode == 0
    assert "q4-rotated" in shown.stdout
    told = kvstore("bench", "codecs", *options, "--backend", "numpy", "--json")
    (row,) = json.loads(told.stdout)["codecs"]
    assert row["backend"] == "numpy"
    assert round(row["ratio"], 1) == 3.5


def test_an_unknown_codec_is_named() -> None:
    done = kvstore("bench", "codecs", "--codec", "q3")
    assert done.returncode == 2
    assert "'q3'" in done.stderr
