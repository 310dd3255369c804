"""The generator: the same seed gives the same requests, and they are conversations."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.bench.generate import (
    ConversationOptions,
    TokenRequest,
    generate,
    generate_trace,
    to_json_lines,
    to_trace,
)
from kvstore.bench.trace import load_trace
from kvstore.errors import BadInputError

OPTIONS = ConversationOptions(sessions=30, mean_question_tokens=60, mean_answer_tokens=40, seed=7)


@pytest.fixture(scope="module")
def requests() -> list[TokenRequest]:
    return list(generate(OPTIONS))


def test_the_same_seed_gives_the_same_requests(requests: list[TokenRequest]) -> None:
    again = list(generate(OPTIONS))
    assert len(again) == len(requests)
    for left, right in zip(requests, again, strict=True):
        assert (left.timestamp_s, left.chat_id, left.turn, left.output_length) == (
            right.timestamp_s,
            right.chat_id,
            right.turn,
            right.output_length,
        )
        assert np.array_equal(left.tokens, right.tokens)


def test_another_seed_gives_other_tokens(requests: list[TokenRequest]) -> None:
    other = next(iter(generate(ConversationOptions(sessions=1, seed=8))))
    assert not np.array_equal(other.tokens[:880], requests[0].tokens[:880])


def test_requests_come_in_order_of_time(requests: list[TokenRequest]) -> None:
    times = [r.timestamp_s for r in requests]
    assert times == sorted(times)
    # Turns of different conversations mix; otherwise there would be nothing to evict.
    chats = [r.chat_id for r in requests]
    assert any(a > b for a, b in itertools.pairwise(chats))


def test_every_prompt_starts_with_the_system_prompt(requests: list[TokenRequest]) -> None:
    assert {r.tokens[:880].tobytes() for r in requests} == {requests[0].tokens[:880].tobytes()}
    assert len({r.tokens[880:881].tobytes() for r in requests if r.turn == 1}) > 25


def test_a_turn_extends_the_one_before_by_its_answer_and_a_question(requests: list[TokenRequest]) -> None:
    chats: dict[int, list[TokenRequest]] = defaultdict(list)
    for request in requests:
        chats[request.chat_id].append(request)
    assert sorted(chats) == list(range(30))
    assert max(map(len, chats.values())) > 1
    for turns in chats.values():
        assert [r.turn for r in turns] == list(range(1, len(turns) + 1))
        for before, after in itertools.pairwise(turns):
            assert after.input_length > before.input_length + before.output_length
            assert np.array_equal(after.tokens[: before.input_length], before.tokens)


def test_tokens_are_unsigned_words_in_the_vocabulary_and_read_only(requests: list[TokenRequest]) -> None:
    for request in requests:
        assert request.tokens.dtype == np.uint32
        assert not request.tokens.flags.writeable
        assert request.tokens.max() < OPTIONS.vocabulary


def test_means_are_near_what_was_asked_for() -> None:
    options = ConversationOptions(
        sessions=2000, mean_turns=3, system_tokens=0, mean_question_tokens=20, mean_answer_tokens=10, seed=1
    )
    trace = generate_trace(options)
    starts = np.array([r.timestamp_s for r in trace.requests if r.turn == 1])
    firsts = np.array([r.input_length for r in trace.requests if r.turn == 1])
    assert trace.n_requests / 2000 == pytest.approx(3, rel=0.1)
    assert firsts.mean() == pytest.approx(20, rel=0.1)
    assert np.mean([r.output_length for r in trace.requests]) == pytest.approx(10, rel=0.1)
    gaps = np.diff(starts)
    # A Poisson process: gaps with mean and standard deviation 1.
    assert gaps.mean() == pytest.approx(1, rel=0.1)
    assert gaps.std() == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("block_tokens", [16, 512])
def test_block_ids_are_equal_exactly_when_the_prefixes_are(requests: list[TokenRequest], block_tokens: int) -> None:
    trace = to_trace(requests, block_tokens)
    prefixes: dict[bytes, int] = {}
    for index, request in enumerate(requests):
        ids = trace.ids(index).tolist()
        ends = [*range(block_tokens, request.input_length, block_tokens), request.input_length]
        assert len(ids) == len(ends)
        for block_id, end in zip(ids, ends, strict=True):
            assert prefixes.setdefault(request.tokens[:end].tobytes(), block_id) == block_id
    assert len(set(prefixes.values())) == len(prefixes) == trace.unique_blocks
    assert trace.chained


def test_limit_cuts_after_that_many_requests(requests: list[TokenRequest]) -> None:
    trace = generate_trace(OPTIONS, limit=5)
    assert trace.n_requests == 5
    assert np.array_equal(trace.requests[4].tokens, requests[4].tokens)


def test_a_written_trace_reads_back(requests: list[TokenRequest], tmp_path: Path) -> None:
    trace = to_trace(requests, 16)
    path = tmp_path / "generated.jsonl"
    path.write_text("".join(to_json_lines(trace)))
    back = load_trace(path)
    assert back.block_tokens == 16
    assert np.array_equal(back.hash_ids, trace.hash_ids)
    assert np.array_equal(back.offsets, trace.offsets)
    assert back.requests[3] == trace.requests[3]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sessions", 0),
        ("mean_turns", 0.5),
        ("system_tokens", -1),
        ("block_tokens", 0),
        ("vocabulary", 1 << 33),
    ],
)
def test_an_impossible_option_is_named(option: str, value: Any) -> None:
    with pytest.raises(BadInputError, match=f"{option} is {value}"):
        ConversationOptions(**{option: value})
