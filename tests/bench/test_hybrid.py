"""Hybrid models in the benchmark: what the engine that is played stores, and what comes back of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.bench import hybrid
from kvstore.bench.generate import ConversationOptions, TokenTrace
from kvstore.bench.hybrid import MODELS, Engine, HybridOptions, run_hybrid, simulate_by_group
from kvstore.bench.report import hybrid_table
from kvstore.cli.main import main
from kvstore.client import Client
from kvstore.errors import BadInputError
from kvstore.hybrid import parts_of
from kvstore.types import GroupKind

README = Path(__file__).parents[2] / "README.md"
CONVERSATIONS = ConversationOptions(sessions=12, system_tokens=100, block_tokens=16, mean_question_tokens=60, seed=3)


def options(model: str, **more: Any) -> HybridOptions:
    return HybridOptions(model, **{"conversations": CONVERSATIONS, "dram_percent": 100.0, **more})


def naive_token_hits(engine: Engine, checkpoint_blocks: int) -> int:
    """Of a store that forgets nothing: sets of what was stored, group by group, and each prompt tried from its end."""
    spec, stored, hits = engine.spec, set[tuple[int, bytes]](), 0
    width = spec.block_tokens
    for request in engine.workload.requests:
        blocks = [request.tokens[: (i + 1) * width].tobytes() for i in range(len(request.tokens) // width)]

        def last(n: int, group: int, blocks: list[bytes] = blocks) -> list[bytes]:
            kind, window = spec.groups[group].kind, spec.groups[group].window_tokens or 0
            if kind is GroupKind.FULL:
                return blocks[:n]
            n_last = 1 if kind is GroupKind.STATE else -(-window // width)
            return blocks[max(n - n_last, 0) : n]

        groups = range(len(spec.groups))
        n_hit = next(
            (n for n in range(len(blocks), 0, -1) if all((g, b) in stored for g in groups for b in last(n, g))), 0
        )
        hits += n_hit * width
        every = range(checkpoint_blocks, len(blocks), checkpoint_blocks) if checkpoint_blocks else ()
        for end in [*(end for end in every if end > n_hit), len(blocks)]:
            if end > n_hit:
                stored.update((group, block) for group in groups for block in last(end, group))
    return hits


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("checkpoint_blocks", [0, 1, 5])
def test_the_simulation_finds_what_sets_of_groups_say(model: str, checkpoint_blocks: int) -> None:
    chosen = options(model, checkpoint_blocks=checkpoint_blocks)
    engine = Engine(chosen, chosen.load())
    counts = simulate_by_group(engine, 1 << 40)
    assert counts.token_hits == naive_token_hits(engine, checkpoint_blocks) > 0
    assert counts.evicted == 0


def test_within_the_same_bytes_groups_by_themselves_find_more() -> None:
    small = options("qwen3-next", dram_percent=10.0)
    report = run_hybrid(small, small.load())
    assert report.by_group.evicted > 0
    assert report.by_group.token_hit_ratio > 1.2 * report.whole.token_hit_ratio


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_daemon_gives_back_the_bytes_of_every_group(
    model: str, start_daemon: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(model)
    workload = chosen.load()
    connect = start_daemon(2 * chosen.dram_bytes(workload) + (48 << 20))
    report = run_hybrid(chosen, workload, connect=connect)
    assert (report.mismatches, report.skipped_blocks) == (0, 0)
    assert report.daemon is not None
    assert report.daemon.token_hits == report.by_group.token_hits
    assert report.bytes_read > 0
    monkeypatch.setattr(HybridOptions, "namespace", chosen.namespace)
    other_bytes = replace(chosen, conversations=replace(CONVERSATIONS, seed=4))
    wrong = run_hybrid(other_bytes, workload, connect=connect)
    assert wrong.mismatches > 0, "the comparison sees other bytes"


def test_a_full_daemon_gives_back_no_wrong_byte(start_daemon: Callable[..., str]) -> None:
    small = options("gpt-oss", conversations=replace(CONVERSATIONS, sessions=40), dram_percent=20.0)
    workload = small.load()
    connect = start_daemon(max(small.dram_bytes(workload), 1 << 20))
    report = run_hybrid(small, workload, connect=connect)
    assert report.mismatches == 0
    assert report.daemon is not None
    assert report.daemon.token_hits > 0
    with Client(connect, timeout_s=5.0) as client:
        assert int(client.stats()["evicted_blocks"]) > 0


def test_what_comes_from_nvme_is_what_was_stored(
    start_daemon: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What waits to be written is held in DRAM: that is what one request has stored at most, and the longest fits. So
    # nothing is skipped, however slow the disk is.
    monkeypatch.setattr(hybrid, "DURABLE_EVERY", 1)
    chosen = options("gpt-oss", dram_percent=30.0, nvme_percent=100.0)
    workload = chosen.load()
    connect = start_daemon(max(chosen.dram_bytes(workload), 1 << 20), nvme_dir=tmp_path / "nvme", nvme_bytes=128 << 20)
    report = run_hybrid(chosen, workload, connect=connect)
    assert (report.mismatches, report.skipped_blocks) == (0, 0)
    assert report.daemon is not None
    assert report.daemon.nvme_block_hits > 0
    assert report.daemon.token_hits > report.by_group.token_hits


def test_runs_are_what_a_hit_may_need_later() -> None:
    chosen = options("gpt-oss", checkpoint_blocks=20)
    workload = TokenTrace("one", (), 16)
    engine = Engine(chosen, workload)
    full, sliding = engine.parts
    assert sliding.window_blocks == 8
    assert list(engine.runs(full, 3, 50)) == [(3, 50)]
    assert list(engine.runs(sliding, 3, 50)) == [(12, 20), (32, 40), (42, 50)]
    assert list(engine.runs(sliding, 15, 50)) == [(15, 20), (32, 40), (42, 50)]
    assert list(engine.runs(sliding, 30, 45)) == [(32, 45)]
    assert list(engine.runs(full, 5, 5)) == list(engine.runs(sliding, 5, 5)) == []


def test_what_was_not_stored_is_explained() -> None:
    chosen = options("gpt-oss")
    report = run_hybrid(chosen, workload := chosen.load())
    assert report.longest_blocks == max(len(request.tokens) for request in workload.requests) // 16
    report.daemon = report.by_group
    assert hybrid_table(report).caption is None
    report.skipped_blocks = 7
    caption = str(hybrid_table(report).caption)
    assert "found DRAM full of what was in use" in caption
    assert f"the longest prompt has {report.longest_blocks}. Give more --dram-percent" in caption


def test_the_example_of_the_readme_shows_what_groups_are_worth() -> None:
    example = re.search(r"bench hybrid --model (\S+) --sessions (\d+) --dram-percent (\d+)$", README.read_text(), re.M)
    assert example is not None
    conversations = ConversationOptions(sessions=int(example[2]), block_tokens=64)
    chosen = HybridOptions(example[1], conversations, float(example[3]))
    report = run_hybrid(chosen, chosen.load())
    assert report.by_group.token_hit_ratio > report.whole.token_hit_ratio


def test_what_a_model_looks_like_and_what_can_not_be() -> None:
    for name in MODELS:
        assert len(parts_of(HybridOptions(name).spec)) == 2
    with pytest.raises(BadInputError, match="known are gemma3, gpt-oss, qwen3-next"):
        HybridOptions("gpt-9")
    with pytest.raises(BadInputError, match="--dram-percent"):
        HybridOptions(dram_percent=0.0)
    assert np.isclose(HybridOptions("gemma3").spec.block_bytes, 62 * 64 * 32)


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "hybrid", "--simulate", "--json", "--sessions", "5", "--model", "gpt-oss", "--seed", "2"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["mode"], report["model"]) == ("hybrid", "gpt-oss")
    assert 0 < report["token_hit_ratio_by_group"] <= 1
