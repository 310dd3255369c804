"""Replay over HBM, DRAM and NVMe: hits by tier as simulated, every byte read through a device and compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvstore.bench.generate import ConversationOptions, TokenTrace, generate_trace, to_trace
from kvstore.bench.replay import ReplayOptions
from kvstore.bench.replay_hbm import HbmReader
from kvstore.bench.replay_tables import replay_tables
from kvstore.bench.report import print_tables
from kvstore.bench.simulate import simulate
from kvstore.bench.simulation_report import run_simulation
from kvstore.bench.trace import Trace, TraceRequest
from kvstore.cli.main import cli
from kvstore.cli.replay import compared, replayed, with_tiers
from kvstore.errors import BadInputError

CONVERSATIONS = ConversationOptions(
    sessions=25, mean_turns=4, system_tokens=400, mean_question_tokens=150, mean_answer_tokens=100, seed=5
)
BLOCK_BYTES = 16384


@pytest.fixture(scope="module")
def tokens() -> TokenTrace:
    return generate_trace(CONVERSATIONS)


@pytest.fixture(scope="module")
def hashes(tokens: TokenTrace) -> Trace:
    return to_trace(tokens.requests, 16)


def options(**changes: Any) -> ReplayOptions:
    given: dict[str, Any] = {
        "block_bytes": BLOCK_BYTES,
        "capacity_percent": 30,
        "nvme_percent": 70,
        "hbm_percent": 8,
        "durable_every": 1,
        "policy": "lru",
    }
    return ReplayOptions(**given | changes)


@pytest.mark.parametrize(("policy", "clients"), [("lru", 1), ("hazard", 1), ("lru", 2)])
def test_three_tiers_find_what_their_simulation_finds(hashes: Trace, tmp_path: Path, policy: str, clients: int) -> None:
    chosen = options(policy=policy, clients=clients)
    result = replayed(hashes, chosen, None, near=tmp_path)
    expected = compared(hashes, chosen, result)
    assert result.mismatches == result.ended_leases == result.unanswered == 0
    assert result.hbm_capacity_blocks == chosen.hbm_capacity(hashes)
    counts, n = result.counts, result.counts.block_accesses
    assert counts.hbm_block_hits > 0.02 * n
    assert counts.hbm_block_hits + counts.dram_block_hits + counts.nvme_block_hits == counts.block_hits
    if clients == 1:
        assert result.skipped_blocks == 0
        assert abs(counts.block_hits - expected.block_hits) <= 0.005 * n
        assert abs(counts.hbm_block_hits - expected.hbm_block_hits) <= 0.005 * n
    hbm = result.tiers["hbm"]
    assert hbm["bytes_read"] == counts.hbm_block_hits * BLOCK_BYTES
    assert hbm["used_bytes"] <= hbm["capacity_bytes"]
    assert hbm["promoted_blocks"] >= hbm["blocks"] > 0


def test_a_copy_with_other_bytes_is_a_mismatch(hashes: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared is what the device has read, not what lies in DRAM."""
    whole = HbmReader.read

    def one_bit_off(self: HbmReader, *arguments: Any) -> Any:
        for at, row in whole(self, *arguments):
            row[17] ^= 1
            yield at, row

    monkeypatch.setattr(HbmReader, "read", one_bit_off)
    result = replayed(hashes, options(nvme_percent=None, durable_every=None), None, near=tmp_path)
    assert result.mismatches >= result.counts.hbm_block_hits > 0


def test_blocks_of_tokens_are_compared_in_part(tmp_path: Path) -> None:
    tokens = generate_trace(replace(CONVERSATIONS, block_tokens=16))
    result = replayed(tokens, options(nvme_percent=None, durable_every=None), None, near=tmp_path)
    assert result.mismatches == 0
    assert result.counts.hbm_block_hits > 0
    print_tables(replay_tables(result))


def test_hbm_changes_no_hit_and_only_moves_them_up(hashes: Trace) -> None:
    """With the other tiers under LRU: copies above them take nobody's place."""
    without = simulate(hashes, "lru", 300, hbm_blocks=None)
    counts = [simulate(hashes, "lru", 300, hbm_blocks=n) for n in (1, 50, 5000)]
    assert [each.block_hits for each in counts] == [without.block_hits] * 3
    assert without.hbm_block_hits == 0
    in_hbm = [each.hbm_block_hits for each in counts]
    assert in_hbm == sorted(in_hbm)
    assert all(each.hbm_block_hits + each.dram_block_hits == each.block_hits for each in counts)


@pytest.mark.parametrize("hits", [1, 2, 3])
def test_a_block_is_promoted_with_its_access_of_that_number(hits: int) -> None:
    ids = np.tile(np.arange(4, dtype=np.uint64), 5)
    requests = tuple(TraceRequest(float(i), 4 * 512, 1) for i in range(5))
    trace = Trace("again", requests, np.arange(6) * 4, ids, 512)
    counts = simulate(trace, "lru", None, hbm_blocks=100, promote_hits=hits)
    assert counts.hbm_block_hits == 4 * (4 - max(hits - 1, 1))


def test_reports_tell_of_hbm(hashes: Trace) -> None:
    report = run_simulation(hashes, options(), percents=(50.0,))
    plain = report.to_dict()
    assert plain["tiers"]["hbm"]["block_hits"] == report.counts.hbm_block_hits > 0
    assert plain["hbm_capacity_blocks"] == options().hbm_capacity(hashes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hbm_percent": 101}, "capacity percent is 101"),
        ({"hbm_percent": None, "hbm_blocks": 0}, "hbm_blocks is 0"),
        ({"hbm_blocks": 5}, "--hbm-percent or --hbm-blocks"),
        ({"kill_at": 0.5}, "HBM does not"),
    ],
)
def test_wrong_room_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        options(**changes)


def test_too_little_room_names_the_least() -> None:
    with pytest.raises(BadInputError, match="--hbm-blocks 64"):
        options(hbm_percent=None, hbm_blocks=3).hbm_bytes(generate_trace(CONVERSATIONS))


def test_room_that_nobody_names_is_enough_for_a_daemon() -> None:
    few = generate_trace(CONVERSATIONS, 20)
    asked = options(hbm=True, hbm_percent=None, hbm_blocks=None, block_bytes=60_000)
    blocks = asked.hbm_capacity(few)
    assert blocks == 18, "60,000 bytes take 15 pages"
    assert asked.hbm_bytes(few) >= 1 << 20
    assert options(hbm=True, hbm_percent=None, hbm_blocks=40).hbm_capacity(few) == 40


def test_tiers_have_room_of_their_own_unless_it_is_given() -> None:
    nothing = dict.fromkeys(("hbm_percent", "hbm_blocks", "nvme_percent", "nvme_blocks"))
    chosen = with_tiers(nothing, ("hbm", "dram", "nvme"))
    assert (chosen["hbm"], chosen["hbm_percent"], chosen["nvme_percent"]) == (True, None, 25.0)
    chosen = with_tiers({**nothing, "hbm_blocks": 7}, ("hbm", "dram"))
    assert "hbm" not in chosen
    assert (chosen["hbm_percent"], chosen["hbm_blocks"], chosen["nvme_percent"]) == (None, 7, None)
    with pytest.raises(BadInputError, match="--tiers leaves hbm out"):
        with_tiers({**nothing, "hbm_blocks": 7}, ("dram",))


def test_the_command_replays_three_tiers() -> None:
    arguments = ["replay", "--simulate", "--tiers", "hbm,dram,nvme", "--limit", "60", "--json", "--no-picture"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    plain = json.loads(done.stdout)
    assert plain["tiers"].keys() == {"hbm", "dram", "nvme"}
    done = CliRunner().invoke(cli, ["replay", "--tiers", "hbm,ssd"])
    assert done.exit_code == 2
    assert "hbm,dram,nvme" in done.output


def test_a_simulation_tells_of_each_tier_and_of_requests_that_there_are_not(tmp_path: Path) -> None:
    trace = tmp_path / "few.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(f"{json.dumps(line)}\n" * 4)
    arguments = ["replay", str(trace), "--simulate", "--tiers", "hbm,dram,nvme", "--limit", "9"]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "has 4 requests, fewer than --limit 9" in done.stderr
    (hbm,) = [row for row in done.stdout.splitlines() if row.startswith("│ HBM")]
    assert "room for 16 blocks; 0.5000 of the blocks found there" in hbm
    assert "│ NVMe" in done.stdout
    assert "fewer" not in CliRunner().invoke(cli, [*arguments[:-1], "4"], catch_exceptions=False).stderr
