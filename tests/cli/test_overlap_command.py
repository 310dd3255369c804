"""``kvstore overlap`` against a real daemon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.overlap import _plain
from kvstore.client import Client, Overlap
from tests.cli.test_operators import NAMESPACE, Command, prompt, store


def test_prompts_of_a_file_are_shown_by_tier(
    start_daemon: Callable[..., Any], nvme: dict[str, Any], tmp_path: Path
) -> None:
    daemon = start_daemon(**nvme)
    kvstore = Command(daemon, tmp_path)
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        store(client, NAMESPACE, 3, tag=1)
    tokens = kvstore.tokens("prompts.jsonl", prompt(5, 1), prompt(2, 9))
    found = kvstore.json("overlap", tokens)
    names = ("n_prompt_tokens", "n_tokens", "n_dram_tokens", "n_nvme_tokens", "n_loading_tokens")
    assert [[each[name] for name in names] for each in found] == [[20, 12, 12, 0, 0], [8, 0, 0, 0, 0]]
    assert found[0]["load_s"] > 0
    assert found[1]["load_s"] == 0
    assert len(kvstore.json("overlap", tokens, "--most", "1")) == 1
    shown = kvstore("overlap", tokens).stdout
    assert "on their way" in shown
    assert kvstore.json("overlap", tokens, "--salt", "another")[0]["n_tokens"] == 0
    kvstore("overlap", tokens, "--model", "nobody", code=2)


@pytest.mark.parametrize(("load_s", "shown"), [(0.25, 0.25), (float("inf"), None)])
def test_json_has_no_infinity(load_s: float, shown: float | None) -> None:
    assert _plain(8, Overlap(4, 4, 0, 0, load_s, 1.0))["load_s"] == shown
