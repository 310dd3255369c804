"""The trace reader: what it keeps, what it infers, and that a bad file is always a TraceError."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.bench.trace import TimeUnit, Trace, load_trace, read_trace
from kvstore.errors import TraceError

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"


def record(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]} | changes


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def test_mooncake_lines_are_packed_in_file_order(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        record(),
        "\n",
        record(timestamp=2500, input_length=0, hash_ids=[]),
        record(timestamp=3000, input_length=1025, hash_ids=[1, 7, 9]),
    )
    trace = load_trace(path)
    assert trace.name == "t.jsonl"
    assert trace.block_tokens == 512
    assert trace.offsets.tolist() == [0, 2, 2, 5]
    assert trace.hash_ids.tolist() == [1, 2, 1, 7, 9]
    assert [r.timestamp_s for r in trace.requests] == [1.0, 2.5, 3.0]
    assert trace.ids(2).tolist() == [1, 7, 9]
    assert trace.input_lengths.tolist() == [1000, 0, 1025]
    assert trace.requests[0].chat_id is None


def test_a_last_line_without_an_end_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", json.dumps(record()) + "\n" + json.dumps(record()))
    assert load_trace(path).n_requests == 2


def test_alibaba_fields_are_kept_and_time_is_in_seconds(tmp_path: Path) -> None:
    chat = {"chat_id": 159, "parent_chat_id": -1, "type": "text", "turn": 2}
    trace = load_trace(write(tmp_path / "t", record(timestamp=61.114, input_length=20, **chat)))
    request = trace.requests[0]
    assert (request.chat_id, request.parent_chat_id, request.type, request.turn) == (159, -1, "text", 2)
    assert request.timestamp_s == 61.114
    assert trace.block_tokens == 16


@pytest.mark.parametrize(("unit", "seconds"), [(TimeUnit.SECONDS, 1000.0), (TimeUnit.MILLISECONDS, 1.0)])
def test_the_unit_of_time_can_be_given(tmp_path: Path, unit: TimeUnit, seconds: float) -> None:
    trace = load_trace(write(tmp_path / "t", record(chat_id=1)), block_tokens=512, time_unit=unit)
    assert trace.requests[0].timestamp_s == seconds


@pytest.mark.parametrize("block_tokens", [16, 48, 64, 256, 512, 1024])
def test_the_block_size_is_inferred(tmp_path: Path, block_tokens: int) -> None:
    lengths = [block_tokens * 3, block_tokens * 7 + 1, block_tokens * 40 - 1]
    lines = [record(input_length=n, hash_ids=list(range(-(-n // block_tokens)))) for n in lengths]
    assert load_trace(write(tmp_path / "t", *lines)).block_tokens == block_tokens


def test_ids_of_whole_blocks_only_are_accepted(tmp_path: Path) -> None:
    lines = [record(input_length=n, hash_ids=list(range(n // 16))) for n in (33, 64, 160, 320, 16)]
    assert load_trace(write(tmp_path / "t", *lines), block_tokens=16).block_accesses == 2 + 4 + 10 + 20 + 1


def test_limit_stops_before_later_lines_are_looked_at(tmp_path: Path) -> None:
    path = write(tmp_path / "t", record(), record(), "not json\n")
    assert load_trace(path, limit=2).n_requests == 2
    with pytest.raises(TraceError, match="line 3"):
        load_trace(path, limit=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timestamp", "1"),
        ("timestamp", -1),
        ("timestamp", True),
        ("timestamp", float("nan")),
        ("timestamp", float("inf")),
        ("timestamp", 10**400),
        ("input_length", 1.5),
        ("input_length", -1),
        ("input_length", None),
        ("input_length", 1 << 40),
        ("output_length", "many"),
        ("output_length", True),
        ("hash_ids", 3),
        ("hash_ids", [1, -2]),
        ("hash_ids", [1, 2.0]),
        ("hash_ids", [2, True]),
        ("hash_ids", [1, 1 << 63]),
        ("hash_ids", []),
        ("chat_id", [1]),
        ("parent_chat_id", 1.5),
        ("type", 3),
        ("turn", -1),
    ],
)
def test_a_bad_field_is_named_with_line_and_value(tmp_path: Path, field: str, value: Any) -> None:
    path = write(tmp_path / "bad.jsonl", record(), record(**{field: value}))
    with pytest.raises(TraceError, match=rf"bad\.jsonl, line 2: {field} is ") as caught:
        load_trace(path)
    if value != []:
        shown = value[-1] if isinstance(value, list) else value
        assert repr(shown)[:40] in str(caught.value)


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    broken = record()
    del broken[field]
    with pytest.raises(TraceError, match=f"line 2: {field} is missing"):
        load_trace(write(tmp_path / "t", record(), broken))


@pytest.mark.parametrize("line", ["[1]\n", "3\n", "{\n", '"x"\n', "\x00\n", "[" * 100_000 + "\n"])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(TraceError, match="line 1: line is "):
        load_trace(write(tmp_path / "t", line))


def test_lengths_that_contradict_the_ids_are_named(tmp_path: Path) -> None:
    lines = [record(input_length=512 * n, hash_ids=list(range(n))) for n in range(1, 9)]
    path = write(tmp_path / "t", *lines, record(input_length=5000, hash_ids=[1, 2]))
    with pytest.raises(TraceError, match=r"line 9: hash_ids is 2 ids for an input_length of 5000"):
        load_trace(path)


def test_no_block_size_fits(tmp_path: Path) -> None:
    lines = [record(input_length=n, hash_ids=list(range(k))) for n, k in ((10, 9), (10_000, 2), (77, 5))]
    with pytest.raises(TraceError, match="give block_tokens"):
        load_trace(write(tmp_path / "t", *lines))


def test_empty_missing_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no requests"):
        load_trace(write(tmp_path / "empty", "\n \n"))
    with pytest.raises(TraceError, match="No such file"):
        load_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match="directory"):
        load_trace(tmp_path)


@pytest.mark.parametrize(("option", "value"), [("limit", 0), ("block_tokens", 0), ("block_tokens", 1 << 20)])
def test_impossible_options_are_named(tmp_path: Path, option: str, value: int) -> None:
    with pytest.raises(TraceError, match=f"{option} is {value}"):
        load_trace(write(tmp_path / "t", record()), **{option: value})  # type: ignore[arg-type]


def test_ids_per_content_become_ids_per_prefix(tmp_path: Path) -> None:
    ids = [[1, 2, 3], [2, 3], [1, 2, 2], [1, 2, 3]]
    lines = [record(input_length=16 * len(i), hash_ids=i, chat_id=0) for i in ids]
    trace = load_trace(write(tmp_path / "t", *lines))
    assert not trace.chained
    paths = [trace.path_ids[a:b].tolist() for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)]
    assert paths[0] == paths[3]
    assert paths[2][:2] == paths[0][:2]
    # 1, 1-2, 1-2-3, 2, 2-3, 1-2-2
    assert trace.unique_blocks == 6
    assert trace.ideal_block_hit_ratio == pytest.approx(5 / 11)


def test_chained_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    lines = [
        record(),
        record(input_length=1030, hash_ids=[1, 2, 4]),
        record(input_length=513, hash_ids=[1, 5]),
    ]
    trace = load_trace(write(tmp_path / "t", *lines))
    assert trace.chained
    assert trace.path_ids is trace.hash_ids
    assert trace.unique_blocks == 4
    assert trace.ideal_block_hit_ratio == pytest.approx(3 / 7)
    # Two of three blocks of the second prompt, one of two of the third.
    assert trace.ideal_token_hit_ratio == pytest.approx((1024 + 512) / (1000 + 1030 + 513))


def test_a_last_block_counts_what_is_left_of_the_prompt(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "t", record(), record()))
    assert trace.ideal_token_hit_ratio == pytest.approx(0.5)


def test_lines_longer_than_a_read_are_joined(tmp_path: Path) -> None:
    n = 400_000
    path = write(tmp_path / "t", record(input_length=n * 16, hash_ids=list(range(n))), record(input_length=32))
    trace = load_trace(path, block_tokens=16)
    assert path.stat().st_size > 2 << 20
    assert trace.offsets.tolist() == [0, n, n + 2]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)
FIELD_NAMES = [*record(), "chat_id", "type", "turn"]
RECORDS = st.dictionaries(st.sampled_from(FIELD_NAMES), JSON_VALUES) | st.fixed_dictionaries(
    {
        "timestamp": st.integers(0, 10**6) | st.floats(0, 1e6),
        "input_length": st.integers(0, 64),
        "output_length": st.integers(0, 5),
        "hash_ids": st.lists(st.integers(0, 5), max_size=5),
    }
)
FILES = st.binary(max_size=200) | st.lists(RECORDS.map(json.dumps), max_size=5).map(
    lambda lines: "\n".join(lines).encode()
)


def trace_or_none(path: Path) -> Trace | None:
    """None for a TraceError that names the file; anything else is let through and fails the test."""
    try:
        return asyncio.run(read_trace(path))
    except TraceError as error:
        return None if str(path) in str(error) else pytest.fail(f"the file is not named: {error}")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=FILES, cut=st.integers(0, 300))
def test_any_bytes_are_a_trace_or_a_trace_error(tmp_path: Path, data: bytes, cut: int) -> None:
    path = tmp_path / "fuzz"
    path.write_bytes(data[:cut] if cut < 250 else data)
    trace = trace_or_none(path)
    if trace is None:
        return
    assert isinstance(trace, Trace)
    assert trace.n_requests >= 1
    assert trace.offsets[-1] == len(trace.hash_ids) == len(trace.path_ids)
    assert 0 <= trace.ideal_block_hit_ratio <= 1
    assert 0 <= trace.ideal_token_hit_ratio <= 1


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize(
    ("name", "requests", "accesses", "unique", "block_hit", "token_hit"),
    [
        ("conversation", 12_031, 288_500, 182_790, 0.3664, 0.3736),
        ("synthetic", 3_993, 121_877, 43_924, 0.6396, 0.6512),
    ],
)
def test_the_published_traces(
    name: str, requests: int, accesses: int, unique: int, block_hit: float, token_hit: float
) -> None:
    trace = load_trace(SHARED / f"{name}_trace.jsonl")
    assert (trace.n_requests, trace.block_accesses, trace.unique_blocks) == (requests, accesses, unique)
    assert trace.chained
    assert trace.block_tokens == 512
    assert trace.ideal_block_hit_ratio == pytest.approx(block_hit, abs=5e-5)
    assert trace.ideal_token_hit_ratio == pytest.approx(token_hit, abs=5e-5)
    assert isinstance(trace.hash_ids, np.ndarray)
