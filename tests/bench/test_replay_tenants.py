"""Replays of several tenants: whose the requests are, what each finds, and shares that hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.bench.generate import ConversationOptions, generate_trace
from kvstore.bench.replay import ReplayOptions, replay
from kvstore.bench.replay_dealing import dealt, tenant_of
from kvstore.bench.trace import Trace, TraceRequest
from kvstore.cli.main import main
from kvstore.client import Client
from kvstore.errors import BadInputError

CONVERSATIONS = ConversationOptions(sessions=24, mean_question_tokens=200, mean_answer_tokens=150, seed=5)
BLOCK_BYTES = 8192


def trace_of(*chats: tuple[int | None, int | None]) -> Trace:
    requests = tuple(TraceRequest(float(i), 1, 0, chat, parent) for i, (chat, parent) in enumerate(chats))
    return Trace("t", requests, np.arange(len(chats) + 1), np.arange(len(chats), dtype=np.uint64), 1)


def test_conversations_stay_together() -> None:
    trace = trace_of((0, -1), (1, -1), (2, 0), (3, -1), (4, 2), (5, 1), (6, -1))
    assert [list(dealt(trace, 2, number, 2)) for number in range(2)] == [[0, 2, 3, 4], [1, 5, 6]]
    assert [list(dealt(trace, 4, number, 2)) for number in range(4)] == [[0, 3], [1, 6], [2, 4], [5]]
    assert [tenant_of(number, 2) for number in range(4)] == ["t1", "t2", "t1", "t2"]
    unknown = trace_of(*[(None, None)] * 5)
    assert [list(dealt(unknown, 2, number, 2)) for number in range(2)] == [[0, 2, 4], [1, 3]]
    assert [list(dealt(trace, 2, number)) for number in range(2)] == [[0, 2, 4, 6], [1, 3, 5]]


def test_generated_turns_are_one_tenants() -> None:
    workload = generate_trace(CONVERSATIONS)
    shares = [{workload.requests[i].chat_id for i in dealt(workload, 3, number, 3)} for number in range(3)]
    assert sum(map(len, shares)) == len(set.union(*shares)) == len({each.chat_id for each in workload.requests})
    assert sorted(i for number in range(3) for i in dealt(workload, 3, number, 3)) == list(range(workload.n_requests))


def test_each_tenant_has_hits_and_blocks_of_its_own(start_daemon: Callable[[int], str]) -> None:
    workload = generate_trace(CONVERSATIONS)
    options = ReplayOptions(block_bytes=BLOCK_BYTES, capacity_blocks=workload.unique_blocks * 2, tenants=2, clients=4)
    connect = start_daemon(options.dram_bytes(workload) + (64 << 20))
    result = replay(workload, options, connect)
    assert (result.mismatches, result.unanswered, result.clients) == (0, 0, 4)
    assert list(result.tenants) == ["t1", "t2"]
    for field in ("requests", "block_accesses", "token_hits"):
        assert sum(getattr(each, field) for each in result.tenants.values()) == getattr(result.counts, field)
    assert all(0 < each.block_hit_ratio < 1 for each in result.tenants.values())
    with Client(connect, "t1") as client:
        held = {each.tenant: each.tiers[0].used_bytes for each in client.tenants(all_tenants=True)}
    assert set(held) == {"t1", "t2"}
    assert sum(held.values()) == result.bytes_written


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tenants": 0}, "tenants .* is 0"),
        ({"tenants": 3, "clients": 4}, "4 clients .* can't be dealt to 3 tenants"),
        ({"tenants": 2, "kill_at": 0.5, "nvme_percent": 50.0}, "leave out --tenants"),
    ],
)
def test_what_can_not_be_dealt(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        ReplayOptions(**given)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["replay", *arguments])
    said = capsys.readouterr()
    return int(str(end.value.code or 0)), said.out, said.err


def test_a_quota_is_the_daemons_and_of_one_tenant(capsys: pytest.CaptureFixture[str]) -> None:
    def hit_ratios(*arguments: str) -> list[float]:
        code, out, _ = run(
            capsys, "--tenants", "2", "--dram-percent", "100", "--limit", "60", "--block-bytes", "16KiB",
            "--block-tokens", "32", "--policy", "lru", "--json", *arguments,
        )  # fmt: skip
        assert code == 0
        return [each["block_hit_ratio"] for each in json.loads(out)["tenants"].values()]

    (first, second), (free, bound) = hit_ratios(), hit_ratios("--tenant-dram-max", "t2=1MiB")
    assert bound < second - 0.05
    assert free >= first - 0.01


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (("--tenants", "2", "--simulate"), "leave out --clients, --tenants"),
        (("--tenants", "2", "--compare"), "--compare simulates one tenant"),
        (("--tenant-weights", "t1=2", "--connect", "x"), "leave out --tenant-weights"),
        (("--tenants", "3", "--tenant-weights", "t9=2"), "names tenant 't9'; --tenants 3 has t1 to t3"),
        (("--tenants", "2", "--tenant-dram-max", "t1 1GiB"), "--tenant-dram-max has 't1 1GiB'"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2
        assert said in err
