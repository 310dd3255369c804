"""Recording requests through a real daemon, and what becomes of the recording as a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.bench.plan import PlanOptions, make_plan
from kvstore.bench.record import TraceLines
from kvstore.bench.trace import load_trace
from kvstore.client import Client
from kvstore.client.recording import RecordedRequest, RequestsLost
from kvstore.errors import UnavailableError
from kvstore.hints import Hints
from kvstore.prefix_index.rows import RowPath
from kvstore.server import record_handlers
from kvstore.store import request_log
from kvstore.store.request_log import REQUEST_BLOCKS_MAX, SLICE_BLOCKS
from kvstore.types import MAX_BLOCK_TOKENS, KVSpec, Namespace, Root, RowKind

BLOCK_BYTES = 4096
DaemonFactory = Callable[..., Any]


def namespace(tenant: str = "default") -> Namespace:
    return Namespace(model="m", spec=KVSpec.opaque(4, BLOCK_BYTES), tenant=tenant)


def ask(client: Client, *prompts: list[int], **more: Any) -> None:
    handle = client.open(namespace(client.tenant))
    for prompt in prompts:
        with handle.lease(prompt, **more):
            pass


def requests_of(seen: list[RecordedRequest | RequestsLost]) -> list[RecordedRequest]:
    assert all(isinstance(each, RecordedRequest) for each in seen)
    return [each for each in seen if isinstance(each, RecordedRequest)]


def test_a_recording_is_a_trace_that_can_be_planned_with(client: Client, tmp_path: Path) -> None:
    handle = client.open(namespace())
    recording = handle.record()
    lines = TraceLines(4)
    chat = {"hints": Hints(request_type="chat", turn=1, session_id="s")}
    ask(client, [1, 2, 3, 4, 5, 6, 7, 8, 9], **chat)
    handle.put([1, 2, 3, 4, 5, 6, 7, 8], np.zeros((2, BLOCK_BYTES), np.uint8))
    ask(client, [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 0, 0], **chat)
    ask(client, [1, 2, 3, 4], root=Root(salt="other"))
    handle.match([7, 7])
    path = tmp_path / "mine.jsonl"
    seen = requests_of(recording.poll())
    path.write_text("".join(map(lines.line, seen)))
    assert recording.poll() == []
    trace = load_trace(path)
    assert trace.block_tokens == 4
    assert [trace.ids(i).tolist() for i in range(4)] == [[0, 1, 2], [0, 1, 2], [0, 3], [4]]
    assert trace.chained
    assert trace.input_lengths.tolist() == [9, 9, 6, 4]
    assert [(each.parent_chat_id, each.type, each.turn) for each in trace.requests] == [
        (-1, "chat", 1), (0, "chat", 1), (1, "chat", 1), (-1, None, 0)
    ]  # fmt: skip
    assert trace.requests[0].timestamp_s == 0.0
    assert (lines.n_requests, lines.n_unique_blocks) == (4, trace.unique_blocks)
    options = PlanOptions(trace=path, policies=("lru",), percents=(100.0,))
    plan = make_plan(options.load(), options)
    assert plan.unique_blocks == 5


def test_of_other_tenants_nothing_is_told(start_daemon: DaemonFactory) -> None:
    daemon = start_daemon()
    with Client(daemon.config.socket_path) as mine, Client(daemon.config.socket_path, "b") as other:
        recording = mine.open(namespace()).record()
        ask(other, [1, 2, 3, 4])
        ask(mine, [1, 2, 3, 4])
        assert len(recording.poll()) == 1
        digest = namespace().digest()
        other_recording = other.open(namespace("b")).record()
        other_recording._ensure_open = lambda: digest
        with pytest.raises(Exception, match="tenant 'b' has no open namespace"):
            other_recording.poll()


def test_a_restart_and_losses_are_told(start_daemon: DaemonFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "REQUESTS_MAX", 2)
    daemon = start_daemon()
    with Client(daemon.config.socket_path) as client:
        recording = client.open(namespace()).record()
        ask(client, [1], [2], [3])
        lost, *rest = recording.poll()
        assert lost == RequestsLost(1)
        assert len(requests_of(rest)) == 2
        daemon.stop()
        with pytest.raises(UnavailableError):
            recording.poll()
        start_daemon(socket_path=daemon.config.socket_path)
        assert client.wait_healthy(20.0)
        assert recording.poll() == [RequestsLost(None)]
        ask(client, [4])
        assert len(requests_of(recording.poll())) == 1


def test_what_is_too_long_to_record_is_lost_and_the_rest_is_a_trace(client: Client, tmp_path: Path) -> None:
    space = Namespace("m", KVSpec.opaque(MAX_BLOCK_TOKENS, BLOCK_BYTES), row_kind=RowKind.HASHES, hash_bytes=8)
    handle = client.open(space)
    recording = handle.record()
    hashes = np.arange(REQUEST_BLOCKS_MAX + 1, dtype=np.uint64).view(np.uint8).reshape(-1, 8)
    handle.lease(hashes)
    handle.lease(hashes[:-1])
    seen: list[RecordedRequest | RequestsLost] = []
    while len(seen) < 2:
        seen += recording.poll()
    assert seen[0] == RequestsLost(1)
    (longest,) = requests_of(seen[1:])
    assert (longest.n_tokens, len(longest.keys)) == (1 << 30, REQUEST_BLOCKS_MAX)
    path = tmp_path / "mine.jsonl"
    path.write_text(TraceLines(MAX_BLOCK_TOKENS).line(longest))
    assert load_trace(path).input_lengths.tolist() == [1 << 30]


def test_a_reply_is_short_and_the_next_goes_on(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_handlers, "REQUESTS_PER_REPLY_MAX", 3)
    monkeypatch.setattr(record_handlers, "BLOCKS_PER_REPLY_MAX", 100)
    recording = client.open(namespace()).record()
    ask(client, *([i] for i in range(5)), list(range(1000)), [7])
    replies: list[int] = []
    while sum(replies) < 7:
        reply = recording._ask()
        recording._take(reply)
        replies.append(len(reply.types))
    assert replies == [3, 2, 1, 1]
    assert recording.poll() == []


def test_what_a_lookup_leaves_of_its_recording_follows_at_once(start_daemon: DaemonFactory, wait_until: Any) -> None:
    """Slice by slice, without further requests, and not as rarely as the daemon ticks."""
    daemon = start_daemon()
    prompt = np.arange(4 * REQUEST_BLOCKS_MAX, dtype=np.uint32)
    works: list[str] = []

    def counted(name: str, call: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            works.append(name)
            call()

        return both

    def count(the_daemon: Any) -> None:
        store = the_daemon.store
        store.tick = counted("tick", store.tick)
        store.requests.work = counted("work", store.requests.work)

    with Client(daemon.config.socket_path) as client:
        handle = client.open(namespace())
        recording = handle.record()
        daemon.call(count)
        handle.lease(prompt)
        wait_until(lambda: not daemon.call(lambda d: d.store.requests.has_work), "all keys are computed")
        slices = works[works.index("work") :]
        (found,) = requests_of(recording.poll())
    assert slices.count("work") >= REQUEST_BLOCKS_MAX / SLICE_BLOCKS > 2 * slices.count("tick")
    root_key = Root().key(namespace().digest())
    expected = RowPath.from_tokens(prompt, 4).keys(root_key).view(np.uint64)[:, 0]
    assert np.array_equal(found.keys, expected)


def test_a_trace_says_its_block_size_in_lines_of_json() -> None:
    lines = TraceLines(16)
    request = RecordedRequest(5.0, 20, 3, "", 0, 0, np.array([1 << 63, 7], np.uint64))
    plain = json.loads(lines.line(request))
    assert plain == {
        "chat_id": 0, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 20, "output_length": 3, "type": None,
        "turn": 0, "block_tokens": 16, "hash_ids": [0, 1],
    }  # fmt: skip
