"""Replay over DRAM and NVMe through a real daemon: hits by tier as simulated, durability waited for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.bench import workload as work
from kvstore.bench.generate import ConversationOptions, TokenTrace, generate_trace, to_trace
from kvstore.bench.pictures import draw_hit_ratio
from kvstore.bench.replay import ReplayOptions, ReplayResult, nvme_blocks_of, replay
from kvstore.bench.replay_tables import replay_tables
from kvstore.bench.report import print_tables
from kvstore.bench.simulate import HitCounts, simulate
from kvstore.bench.simulation_report import run_simulation
from kvstore.bench.trace import Trace
from kvstore.bench.workload import Workload
from kvstore.cli.nvme_place import room_for
from kvstore.compression.frame import FrameLayout
from kvstore.errors import BadInputError
from kvstore.tiers.nvme.tier import NvmeTier

CONVERSATIONS = ConversationOptions(
    sessions=40, mean_turns=3, system_tokens=400, mean_question_tokens=150, mean_answer_tokens=100, seed=5
)
BLOCK_BYTES = 65536


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
        "durable_every": 4,
        "policy": "lru",
    }
    return ReplayOptions(**given | changes)


def nvme_settings(workload: Workload, chosen: ReplayOptions, folder: Path) -> dict[str, Any]:
    blocks = chosen.nvme_capacity(workload)
    assert blocks is not None
    n_bytes = room_for(blocks, work.namespace(workload, chosen.block_bytes, "any"))
    return {"nvme_dir": folder / "nvme", "nvme_bytes": n_bytes, "write_policy": chosen.write_policy}


def replayed(workload: Workload, chosen: ReplayOptions, start_daemon: Callable[..., str], folder: Path) -> ReplayResult:
    socket = start_daemon(chosen.dram_bytes(workload), **nvme_settings(workload, chosen, folder))
    return replay(workload, chosen, socket)


def simulated(workload: Workload, chosen: ReplayOptions, nvme_blocks: int | None) -> HitCounts:
    capacity, policy = chosen.capacity(workload), chosen.write_policy
    return simulate(workload, "lru", capacity, nvme_blocks=nvme_blocks, write_policy=policy)


def test_hits_come_from_the_tiers_that_the_simulation_names(
    hashes: Trace, start_daemon: Callable[..., str], tmp_path: Path
) -> None:
    chosen = options()
    assert 2 * np.diff(hashes.offsets).max() <= chosen.capacity(hashes)
    result = replayed(hashes, chosen, start_daemon, tmp_path)
    expected = simulated(hashes, chosen, result.nvme_capacity_blocks)
    assert result.mismatches == result.unanswered == result.ended_leases == 0
    # A long prompt, and what still waits to be written, can pin most of so small a DRAM now and then; and a client
    # on a busy machine may be late to leave a region that a read needs.
    assert result.skipped_blocks + result.late_blocks < 0.005 * hashes.block_accesses
    assert result.counts.block_hit_ratio == pytest.approx(expected.block_hit_ratio, abs=0.005)
    assert expected.nvme_block_hits > 0.02 * expected.block_accesses
    assert result.counts.dram_block_hits + result.counts.nvme_block_hits == result.counts.block_hits
    # DRAM is handed out by the region, of which there are few here: DRAM may keep a little less than the policy says,
    # and then NVMe has to serve that, too.
    assert result.counts.dram_block_hits > 0.9 * expected.dram_block_hits
    assert result.counts.nvme_block_hits > 0.8 * expected.nvme_block_hits
    assert result.tiers["nvme"].get("offload_skipped_blocks", 0) == 0
    assert result.tiers["nvme"]["evicted_blocks"] > 0
    assert result.tiers["nvme"]["bytes_read"] == result.counts.nvme_block_hits * BLOCK_BYTES
    assert result.tiers["dram"]["bytes_read"] + result.tiers["nvme"]["bytes_read"] == result.bytes_read
    # Everything new was waited for, and nothing is counted twice.
    assert result.durable_blocks == hashes.unique_blocks


def test_several_clients_find_tokens_on_disk(start_daemon: Callable[..., str], tmp_path: Path) -> None:
    tokens = generate_trace(replace(CONVERSATIONS, block_tokens=16))
    chosen = options(clients=3, nvme_percent=100)
    result = replayed(tokens, chosen, start_daemon, tmp_path)
    assert result.counts.requests == tokens.n_requests
    assert result.mismatches == result.unanswered == result.ended_leases == 0
    assert result.counts.nvme_block_hits > 0
    assert result.durable_blocks > 0


def test_the_report_names_tiers_and_durability(
    hashes: Trace, start_daemon: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = options(limit=None)
    result = replayed(hashes, chosen, start_daemon, tmp_path)
    plain = json.loads(json.dumps(result.to_dict()))
    asked = chosen.nvme_capacity(hashes)
    assert asked is not None
    assert asked <= plain["nvme_capacity_blocks"] < 1.05 * asked
    assert plain["write_policy"] == "through"
    assert plain["durable_every"] == 4
    assert plain["nvme_overhead"] > 0
    assert plain["operations"]["persist"]["n"] == hashes.n_requests
    assert plain["crash"] is plain["simulated"] is None
    print_tables(replay_tables(result))
    shown = capsys.readouterr().out
    for words in ("NVMe", "acknowledged durable", "write policy through", "every 4 requests"):
        assert words in shown
    report = run_simulation(hashes, chosen)
    draw_hit_ratio(tmp_path / "p.png", hashes, report, result)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("block_bytes", [256, 64 << 10])
def test_as_many_blocks_are_simulated_on_nvme_as_there_fit(hashes: Trace, tmp_path: Path, block_bytes: int) -> None:
    """Of small blocks the catalog has room for fewer names than segments have for frames."""
    namespace = work.namespace(hashes, block_bytes, "any")
    frame_bytes = FrameLayout.of(namespace.spec, namespace.row_bytes, namespace.digest()).frame_bytes
    with NvmeTier(tmp_path, 64 << 20, lambda _: None) as tier:
        stats = {f"nvme_{name}": value for name, value in tier.stats().items()}
        assert nvme_blocks_of(hashes, block_bytes, stats) == tier.free_slots(frame_bytes)


def test_without_waiting_nothing_is_acknowledged(
    hashes: Trace, start_daemon: Callable[..., str], tmp_path: Path
) -> None:
    result = replayed(hashes, options(durable_every=0), start_daemon, tmp_path)
    assert result.mismatches == result.durable_blocks == 0
    assert "persist" not in result.latencies


def test_without_an_nvme_tier_nothing_is_durable(hashes: Trace, start_daemon: Callable[..., str]) -> None:
    chosen = options(nvme_percent=None, durable_every=3)
    result = replay(hashes, chosen, start_daemon(chosen.dram_bytes(hashes)))
    assert result.durable_blocks == result.mismatches == 0
    assert result.latencies["persist"].n == hashes.n_requests
    assert result.nvme_capacity_blocks is None


@pytest.mark.parametrize("policy", ["back", "selective"])
def test_other_write_policies_lose_no_byte(
    hashes: Trace, start_daemon: Callable[..., str], tmp_path: Path, policy: str
) -> None:
    result = replayed(hashes, options(write_policy=policy, durable_every=0), start_daemon, tmp_path)
    assert result.mismatches == result.unanswered == 0
    assert result.counts.nvme_block_hits > 0
    assert np.isfinite(result.tiers["nvme"]["offloaded_blocks"])
    assert result.tiers["nvme"]["offloaded_blocks"] > 0


def test_capacity_on_nvme_is_a_share_or_a_number(hashes: Trace) -> None:
    assert options(nvme_percent=50).nvme_capacity(hashes) == hashes.unique_blocks // 2
    assert options(nvme_percent=None, nvme_blocks=7).nvme_capacity(hashes) == 7
    assert options(nvme_percent=None).nvme_capacity(hashes) is None


def test_clients_with_nvme_are_paced_unless_told_otherwise() -> None:
    assert options(durable_every=None).waits_every == 16
    assert options(durable_every=0).waits_every == 0
    assert options(nvme_percent=None, durable_every=None).waits_every == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nvme_blocks": 5}, "not both"),
        ({"nvme_percent": 101}, "capacity percent is 101"),
        ({"nvme_percent": None, "nvme_blocks": 0}, "nvme_blocks is 0"),
        ({"write_policy": "around"}, "write_policy is 'around'"),
        ({"durable_every": -1}, "durable_every is -1"),
        ({"kill_at": 1.0}, r"kill_at \(--kill-at\) is 1.0"),
        ({"kill_at": 0.5, "nvme_percent": None}, "--nvme-percent"),
        ({"kill_at": 0.5, "durable_every": 0}, "--durable-every 1 or more"),
        ({"kill_at": 0.5, "policy": "mru"}, "--policy lru"),
    ],
)
def test_impossible_tiers_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        options(**changes)


def test_killing_needs_a_daemon_of_the_replay_s_own(hashes: Trace, start_daemon: Callable[..., str]) -> None:
    with pytest.raises(BadInputError, match="started for the replay"):
        replay(hashes, options(kill_at=0.5), start_daemon(1 << 20))
