"""What a plan says: the same as simulations, bounded by OPT, in bytes and seconds where those can be known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvstore.bench.generate import ConversationOptions
from kvstore.bench.kv_sizes import MODELS, bytes_per_token
from kvstore.bench.plan import OPT, PlanOptions, make_plan
from kvstore.bench.plan_picture import draw_plan
from kvstore.bench.plan_report import plan_dict
from kvstore.bench.simulate import simulate
from kvstore.bench.textbook import simulate_textbook
from kvstore.cli.main import cli
from kvstore.errors import BadInputError

CONVERSATIONS = ConversationOptions(sessions=30, block_tokens=64, mean_question_tokens=150, mean_answer_tokens=100)
TOKEN_BYTES = 1000


def options(**more: object) -> PlanOptions:
    given = {"conversations": CONVERSATIONS, "policies": ("lru", "lfu"), "percents": (5.0, 20.0, 100.0)} | more
    return PlanOptions(**given)  # type: ignore[arg-type]


def test_policies_are_simulated_and_none_beats_opt() -> None:
    asked = options()
    trace = asked.load()
    steps: list[int] = []
    plan = make_plan(trace, asked, steps.append)
    assert sum(steps) == asked.steps(trace) == 3 * trace.n_requests
    assert [curve.policy for curve in plan.compared] == ["lru", "lfu", OPT]
    best = plan.compared[-1]
    for curve in plan.compared[:-1]:
        for point, top in zip(curve.points, best.points, strict=True):
            simulated = simulate(trace, curve.policy, point.capacity_blocks)
            assert point.counts.block_hits == simulated.block_hits <= top.counts.block_hits
            assert point.counts.token_hits == simulated.token_hits
        ratios = [point.counts.block_hit_ratio for point in curve.points]
        assert ratios == sorted(ratios)
    assert best.points[-1].counts.block_hit_ratio == pytest.approx(trace.ideal_block_hit_ratio)
    assert plan.unlimited.token_hit_ratio == pytest.approx(trace.ideal_token_hit_ratio)
    assert all(len(curve.points) > 20 for curve in plan.smooth)


def test_sizes_are_blocks_of_that_many_tokens() -> None:
    asked = options(bytes_per_token=TOKEN_BYTES, capacity_bytes=(TOKEN_BYTES * 64 * 10, 1 << 60), policies=("fifo",))
    trace = asked.load()
    assert asked.capacities(trace) == [10, trace.unique_blocks]
    report = plan_dict(make_plan(trace, asked))
    assert report["policies"]["fifo"][0]["capacity_bytes"] == TOKEN_BYTES * 64 * 10


@pytest.mark.parametrize(
    "sizes", [{"capacity_bytes": (1 << 20, 4095)}, {"dram_bytes": 4095}, {"dram_bytes": 1 << 20, "nvme_bytes": 1}]
)
def test_room_for_not_one_block_is_not_rounded_up(sizes: dict[str, object]) -> None:
    asked = options(policies=("lru",), bytes_per_token=4096, **sizes)
    with pytest.raises(BadInputError, match="can't hold one block"):
        make_plan(asked.load(), asked)


def test_textbooks_know_single_blocks_only() -> None:
    asked = options(policies=("fifo",), percents=(10.0,), textbook=True)
    trace = asked.load()
    (point,) = make_plan(trace, asked).compared[0].points
    assert point.counts == simulate_textbook(trace, "fifo", point.capacity_blocks)
    assert point.counts.block_hits != simulate(trace, "fifo", point.capacity_blocks).block_hits


def test_two_tiers_are_simulated_together() -> None:
    asked = options(
        bytes_per_token=TOKEN_BYTES, dram_bytes=20 * 64 * TOKEN_BYTES, nvme_bytes=100 * 64 * TOKEN_BYTES,
        policies=("lru",), write_policy="back",
    )  # fmt: skip
    trace = asked.load()
    (tiers,) = make_plan(trace, asked).tiers
    assert tiers.counts == simulate(trace, "lru", 20, 100, "back")
    assert tiers.counts.nvme_block_hits > 0
    assert tiers.counts.dram_block_hits + tiers.counts.nvme_block_hits == tiers.counts.block_hits


def test_hits_save_prefill_at_its_rate() -> None:
    asked = options(prefill_tokens_per_s=500.0, policies=("lru",))
    report = plan_dict(make_plan(asked.load(), asked))
    for point in report["policies"]["lru"]:
        assert point["gpu_s_saved"] == pytest.approx(point["prefill_tokens_saved"] / 500)
        assert point["prefill_tokens_saved"] == pytest.approx(point["token_hit_ratio"] * report["prompt_tokens"])
        assert point["capacity_bytes"] is None


def test_sizes_of_models_are_what_is_published() -> None:
    assert bytes_per_token("llama-3.1-8b") == 128 << 10
    assert bytes_per_token("llama-3.1-70b") == 320 << 10
    assert bytes_per_token("deepseek-v3") == 61 * 576 * 2
    assert all(bytes_per_token(name) > 0 for name in MODELS)
    with pytest.raises(BadInputError, match="model is 'gpt-9'; known are"):
        bytes_per_token("gpt-9")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"policies": ("mru",)}, "policy is 'mru'"),
        ({"percents": (0.0,)}, "--percent must be above 0"),
        ({"capacity_bytes": (1 << 30,)}, "need --model or --bytes-per-token"),
        ({"nvme_bytes": 1 << 30, "bytes_per_token": 1}, "give --dram, too"),
        ({"prefill_tokens_per_s": float("nan")}, "can't be negative"),
        ({"write_policy": "around"}, "write_policy is 'around'"),
    ],
)
def test_what_can_not_be_planned_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        options(**wrong)


def test_the_command_writes_table_json_and_picture(tmp_path: Path) -> None:
    arguments = ["plan", "--limit", "60", "--policy", "s3fifo", "--percent", "10", "--model", "qwen2.5-7b"]
    done = CliRunner().invoke(cli, [*arguments, "--prefill-tokens-per-s", "8000", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "Token hit ratio over capacity" in done.output
    assert "GPU time saved" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["policies"]) == {"s3fifo", OPT}
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    again = CliRunner().invoke(cli, [*arguments, "--json"])
    assert json.loads(again.stdout)["policies"]["s3fifo"] == [
        point | {"gpu_s_saved": None} for point in report["policies"]["s3fifo"]
    ]


def test_a_picture_of_a_plan_without_sizes(tmp_path: Path) -> None:
    asked = options()
    draw_plan(tmp_path / "plan.png", make_plan(asked.load(), asked))
    assert np.frombuffer((tmp_path / "plan.png").read_bytes()[:4], np.uint8)[1:].tobytes() == b"PNG"
