"""Replay through a real daemon: hits as simulated, every byte compared, failures told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.bench.generate import ConversationOptions, TokenTrace, generate_trace, to_json_lines, to_trace
from kvstore.bench.payload import Payload
from kvstore.bench.replay import ReplayOptions, replay
from kvstore.bench.simulate import simulate
from kvstore.bench.trace import Trace, TraceRequest
from kvstore.config import DaemonConfig
from kvstore.errors import BadInputError, KVStoreError, TraceError, UnavailableError

MIB = 1 << 20
CONVERSATIONS = ConversationOptions(sessions=20, mean_question_tokens=200, mean_answer_tokens=150, seed=5)
BLOCK_BYTES = 8192


@pytest.fixture(scope="module")
def tokens() -> TokenTrace:
    return generate_trace(CONVERSATIONS)


@pytest.fixture(scope="module")
def hashes(tokens: TokenTrace) -> Trace:
    return to_trace(tokens.requests, 16)


def options(**changes: Any) -> ReplayOptions:
    given: dict[str, Any] = {"block_bytes": BLOCK_BYTES, "capacity_blocks": 1000, "policy": "lru"}
    return ReplayOptions(**given | changes)


def test_one_client_hits_what_the_simulation_hits(hashes: Trace, start_daemon: Callable[[int], str]) -> None:
    chosen = options(capacity_percent=50, capacity_blocks=None)
    assert np.diff(hashes.offsets).max() <= chosen.capacity(hashes)
    result = replay(hashes, chosen, start_daemon(chosen.dram_bytes(hashes)))
    simulated = simulate(hashes, "lru", chosen.capacity(hashes))
    assert simulated.evicted > 0
    assert result.counts.block_hit_ratio == pytest.approx(simulated.block_hit_ratio, abs=0.001)
    assert result.counts.token_hit_ratio == pytest.approx(simulated.token_hit_ratio, abs=0.001)
    assert result.mismatches == result.unanswered == result.ended_leases == result.skipped_blocks == 0
    assert result.bytes_read == result.counts.block_hits * BLOCK_BYTES
    assert result.bytes_written == (result.counts.block_accesses - result.counts.block_hits) * BLOCK_BYTES


def test_the_default_policy_hits_what_it_hits_in_the_simulation(start_daemon: Callable[..., str]) -> None:
    """Prompts that go on among as many that don't: new blocks that are worth less than what is there are not stored."""
    dice, requests = random.Random(2), []
    ids: list[list[int]] = []
    known: dict[tuple[int, ...], int] = {}
    for number in range(900):
        is_kept = number % 2 == 0
        rows = [number // 2 % 25, *range(6)] if is_kept else [1000 + number, *range(dice.randrange(12))]
        ids.append([known.setdefault(tuple(rows[: n + 1]), len(known)) for n in range(len(rows))])
        requests.append(TraceRequest(number * 2.0, 16 * len(rows) - dice.randrange(8), 20))
    offsets = np.concatenate(([0], np.cumsum([len(each) for each in ids])))
    trace = Trace("made", tuple(requests), offsets, np.array([at for each in ids for at in each], np.uint64), 16)
    chosen = options(capacity_blocks=200, policy="")
    assert chosen.policy == DaemonConfig(None).policy == "hazard"
    result = replay(trace, chosen, start_daemon(chosen.dram_bytes(trace), policy=chosen.policy))
    simulated, lru = simulate(trace, chosen.policy, 200), simulate(trace, "lru", 200)
    assert result.counts.block_hit_ratio == pytest.approx(simulated.block_hit_ratio, abs=0.005)
    assert result.counts.block_hits > lru.block_hits + 0.05 * trace.block_accesses
    assert result.mismatches == result.unanswered == result.ended_leases == 0
    assert result.skipped_blocks > 100


def test_tokens_are_found_to_the_token(tokens: TokenTrace, start_daemon: Callable[[int], str]) -> None:
    result = replay(tokens, options(), start_daemon(1000 * BLOCK_BYTES))
    simulated = simulate(tokens, "lru", 1000)
    assert result.counts.token_hits == simulated.token_hits
    assert result.counts.any_hits == simulated.any_hits == tokens.n_requests - 1
    assert result.mismatches == 0
    assert result.bytes_read == result.counts.token_hits * (BLOCK_BYTES // 512)


def test_several_clients_lose_nothing(hashes: Trace, start_daemon: Callable[[int], str]) -> None:
    done: list[int] = []
    n_blocks = hashes.unique_blocks * 2
    chosen = options(clients=3, capacity_blocks=n_blocks)
    result = replay(hashes, chosen, start_daemon(chosen.dram_bytes(hashes)), done.append)
    assert sum(done) == result.counts.requests == hashes.n_requests
    assert result.counts.block_accesses == hashes.block_accesses
    assert result.mismatches == result.unanswered == result.skipped_blocks == 0
    # Room for all, but another order than the file's: a block is missed by those who ask before it is put.
    assert 0.8 * hashes.ideal_block_hit_ratio < result.counts.block_hit_ratio <= hashes.ideal_block_hit_ratio


def test_more_clients_than_requests_and_an_empty_prompt(start_daemon: Callable[[int], str]) -> None:
    requests = (TraceRequest(0.0, 0, 1), TraceRequest(1.0, 20, 1))
    trace = Trace("tiny", requests, np.array([0, 0, 2]), np.array([1, 2], dtype=np.uint64), 16)
    socket = start_daemon(MIB)
    for clients in (1, 3):
        result = replay(trace, options(clients=clients), socket)
        assert result.counts.requests == 2
        assert result.mismatches == result.unanswered == 0
    # The first run put both blocks, the second found them.
    assert (result.counts.block_hits, result.counts.token_hits) == (2, 20)
    assert simulate(trace, "lru", 10).block_accesses == 2


def test_wrong_bytes_are_counted(
    hashes: Trace, start_daemon: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, corrupt = Payload.fill, {"left": 3}

    def fill_and_spoil(self: Payload, keys: Any, out: Any) -> None:
        fill(self, keys, out)
        if corrupt["left"] and len(out):
            corrupt["left"] -= 1
            out[0, -1] ^= 1

    monkeypatch.setattr(Payload, "fill", fill_and_spoil)
    result = replay(hashes, options(), start_daemon(1000 * BLOCK_BYTES))
    # The first block of all belongs to the system prompt: every later request reads it.
    assert result.mismatches >= hashes.n_requests - 1


def test_another_seed_is_another_model(hashes: Trace, start_daemon: Callable[[int], str]) -> None:
    socket = start_daemon(2000 * BLOCK_BYTES)
    first = replay(hashes, options(seed=1), socket)
    second = replay(hashes, options(seed=2), socket)
    assert first.counts == second.counts
    assert second.mismatches == 0


def test_the_report_is_one_json_object(hashes: Trace, start_daemon: Callable[[int], str]) -> None:
    result = replay(hashes, options(), start_daemon(1000 * BLOCK_BYTES))
    plain = json.loads(json.dumps(result.to_dict()))
    for name in ("requests", "block_accesses", "unique_blocks", "block_hit_ratio", "token_hit_ratio"):
        assert plain[name] > 0
    assert plain["any_hit_ratio"] > 0.9
    assert plain["mismatches"] == 0
    assert plain["tiers"]["dram"]["bytes_read"] == result.bytes_read
    assert plain["tiers"]["dram"]["capacity_bytes"] == 1000 * BLOCK_BYTES
    assert set(plain["operations"]) == {"match", "lease", "verify", "release", "put"}
    assert plain["operations"]["match"]["n"] == hashes.n_requests
    assert plain["operations"]["lease"]["p50_us"] > 0


@pytest.mark.parametrize("clients", [1, 2])
def test_no_daemon_is_an_error_and_not_a_row_of_misses(hashes: Trace, tmp_path: Path, clients: int) -> None:
    with pytest.raises(UnavailableError):
        replay(hashes, options(clients=clients, timeout_s=0.5), str(tmp_path / "none.sock"))


def test_a_client_that_fails_ends_the_others(hashes: Trace, start_daemon: Callable[[int], str]) -> None:
    broken = Trace("broken", hashes.requests, hashes.offsets, hashes.hash_ids, hashes.block_tokens)
    object.__setattr__(broken, "requests", (*hashes.requests[:2], None, *hashes.requests[3:]))
    with pytest.raises(KVStoreError, match="a replay client failed: AttributeError"):
        replay(broken, options(clients=2), start_daemon(1000 * BLOCK_BYTES))


def test_a_file_is_loaded_up_to_the_limit(hashes: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(to_json_lines(hashes)))
    loaded = options(trace=path, limit=7).load()
    assert isinstance(loaded, Trace)
    assert np.array_equal(loaded.hash_ids, hashes.hash_ids[: loaded.block_accesses])
    assert loaded.n_requests == 7
    with pytest.raises(TraceError):
        options(trace=tmp_path / "absent").load()


def test_without_a_file_conversations_are_generated(tokens: TokenTrace) -> None:
    loaded = options(conversations=CONVERSATIONS, limit=5).load()
    assert isinstance(loaded, TokenTrace)
    assert np.array_equal(loaded.requests[4].tokens, tokens.requests[4].tokens)


def test_capacity_is_a_share_or_a_number(hashes: Trace) -> None:
    assert options().capacity(hashes) == 1000
    assert options().dram_bytes(hashes) == 1000 * BLOCK_BYTES
    with pytest.raises(BadInputError, match=r"127 blocks of 8192 bytes.*--capacity-blocks 128 or more"):
        options(capacity_blocks=127).dram_bytes(hashes)
    assert options(capacity_blocks=128).dram_bytes(hashes) == MIB
    share = options(capacity_blocks=None, capacity_percent=10)
    assert share.capacity(hashes) == hashes.unique_blocks // 10
    assert options(capacity_blocks=None).capacity(hashes) == max(int(hashes.unique_blocks * 0.05), 128)
    assert options(capacity_blocks=None).dram_bytes(hashes) >= MIB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity_percent": 5.0}, "not both"),
        ({"capacity_blocks": None, "capacity_percent": 0.0}, "capacity percent is 0"),
        ({"capacity_blocks": 0}, "capacity_blocks is 0"),
        ({"block_bytes": 0}, r"block_bytes \(--block-bytes\) is 0"),
        ({"clients": 0}, r"clients \(--clients\) is 0"),
        ({"clients": 1000}, r"clients \(--clients\) is 1000"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_impossible_options_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        options(**changes)


def test_token_payloads_need_words_per_token(tokens: TokenTrace, start_daemon: Callable[[int], str]) -> None:
    with pytest.raises(BadInputError, match="block_bytes is 4000"):
        replay(tokens, options(block_bytes=4000), start_daemon(MIB))
