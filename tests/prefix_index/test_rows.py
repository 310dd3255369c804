"""Prompts as rows: what is taken without a copy, what is converted, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import BadInputError
from kvstore.prefix_index.rows import RowPath
from kvstore.types import ExtraKey


def test_full_rows_and_tail() -> None:
    path = RowPath.from_tokens(np.arange(10, dtype=np.uint32), 4)
    assert (path.n_full_rows, path.tail_tokens, path.n_rows) == (2, 2, 3)
    assert (path.row_bytes, path.unit_bytes, path.block_tokens) == (16, 4, 4)
    assert path.row(1) == np.array([4, 5, 6, 7], "<u4").tobytes()
    assert path.row(2) == np.array([8, 9], "<u4").tobytes()
    assert path.extra(0) is None  # noqa: S610
    assert path.keys(b"r" * 16).shape == (3, 16)
    assert path.keys(b"r" * 16).dtype == np.uint8


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([1, 2, 3], np.uint32).tobytes(),
        bytearray(np.array([1, 2, 3], np.uint32).tobytes()),
        memoryview(np.array([1, 2, 3], np.uint32).tobytes()),
        np.array([1, 2, 3], np.uint32).data,
        np.array([1, 2, 3], np.int64),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 2, 3], ">u4"),
        np.array([1, 9, 2, 9, 3, 9], np.uint32)[::2],
        [1, 2, 3],
        (1, 2, 3),
    ],
)
def test_every_form_of_the_same_tokens_is_the_same_path(tokens: Any) -> None:
    path = RowPath.from_tokens(tokens, 2)
    assert bytes(path.data) == np.array([1, 2, 3], "<u4").tobytes()
    assert path.tail_tokens == 1


@pytest.mark.parametrize("tokens", [b"", [], np.empty(0, np.uint32), np.empty(0, np.int64)])
def test_no_tokens_are_no_rows(tokens: Any) -> None:
    path = RowPath.from_tokens(tokens, 2)
    assert (path.n_rows, path.n_full_rows, path.tail_tokens) == (0, 0, 0)
    assert path.keys(b"r" * 16).shape == (0, 16)


def test_contiguous_uint32_is_not_copied() -> None:
    tokens = np.arange(8, dtype=np.uint32)
    path = RowPath.from_tokens(tokens, 4)
    assert np.shares_memory(np.frombuffer(path.data, np.uint8), tokens)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (b"12345", "5 bytes"),
        ([1, -1], "-1 is out of range"),
        ([1, 1 << 32], "4294967296 is out of range"),
        ([1, 1 << 70], "tokens"),
        ([1.0, 2.0], "float64"),
        (np.array([True]), "bool"),
        (np.zeros((2, 2), np.uint32), r"shape \(2, 2\)"),
        (np.uint32(7), r"shape \(\)"),
        ("hello", "tokenise it first"),
        (None, "shape"),
        ([[1], [1, 2]], "array of integers"),
        (memoryview(bytes(16))[::2], "gaps"),
        (np.zeros(4, np.float32).data, "format 'f'"),
        (np.zeros(4, ">u4").data, "format '>I'"),
        (np.zeros(4, np.uint64).data, "format 'L'"),
    ],
)
def test_other_tokens_are_refused_by_name(tokens: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        RowPath.from_tokens(tokens, 4)


@pytest.mark.parametrize("block_tokens", [0, -1, 1 << 17, 2.0, "16"])
def test_impossible_block_sizes_are_refused(block_tokens: Any) -> None:
    with pytest.raises(BadInputError, match="block_tokens"):
        RowPath.from_tokens([1], block_tokens)


def test_hashes_from_bytes_and_arrays() -> None:
    data = np.arange(24, dtype=np.uint8).reshape(3, 8)
    for form in (data, data.tobytes(), data.data):
        path = RowPath.from_hashes(form, 8)
        assert (path.n_rows, path.n_full_rows, path.tail_tokens) == (3, 3, 0)
        assert path.row(1) == bytes(range(8, 16))
        assert path.unit_bytes == path.row_bytes == 8
    assert RowPath.from_hashes(b"", 8).n_rows == 0
    assert RowPath.from_hashes(np.empty((0, 8), np.uint8), 8).n_rows == 0


@pytest.mark.parametrize(
    ("data", "hash_bytes", "message"),
    [
        (b"123", 2, "no multiple"),
        (np.zeros((2, 8), np.uint64), 8, "uint64"),
        (np.zeros((2, 4), np.uint8), 8, r"\(2, 4\)"),
        (np.zeros(8, np.uint8), 8, r"\(8,\)"),
        ([1, 2], 8, "list"),
        (np.zeros(2, np.uint32).data, 8, "format 'I'"),
        (b"", 0, "hash_bytes"),
        (b"", 65, "hash_bytes"),
    ],
)
def test_other_hashes_are_refused(data: Any, hash_bytes: int, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        RowPath.from_hashes(data, hash_bytes)


def test_extras_mark_the_rows_they_cover() -> None:
    path = RowPath.from_tokens(list(range(18)), 4, [ExtraKey(14, 9, b"b"), ExtraKey(3, 6, b"a")])
    firsts = [extra.first_covered if (extra := path.extra(i)) else None for i in range(path.n_rows)]  # noqa: S610
    assert firsts == [3, 0, 0, 2, 0]
    assert [path.run_end(i) for i in range(5)] == [0, 1, 2, 3, 4]
    assert path.open_part(0) == path.row(0)[:12]
    assert path.open_part(1) == b""
    digests = {extra.digest for i in range(5) if (extra := path.extra(i))}  # noqa: S610
    assert len(digests) == 5
    assert all(len(digest) == 16 for digest in digests)


def test_run_end_finds_the_next_covered_row() -> None:
    path = RowPath.from_tokens(list(range(26)), 4, [ExtraKey(9, 1, b"a"), ExtraKey(17, 1, b"b")])
    assert [path.run_end(i) for i in range(7)] == [2, 2, 2, 4, 4, 6, 6]


def test_order_of_extras_does_not_matter() -> None:
    extras = [ExtraKey(1, 2, b"a"), ExtraKey(3, 2, b"b"), ExtraKey(9, 1, b"c")]
    keys = {RowPath.from_tokens([7] * 12, 4, order).keys(b"r" * 16).tobytes() for order in (extras, extras[::-1])}
    assert len(keys) == 1


def test_extras_behind_the_end_are_ignored() -> None:
    plain = RowPath.from_tokens([7] * 8, 4).keys(b"r" * 16)
    covered = RowPath.from_tokens([7] * 8, 4, [ExtraKey(8, 100, b"a")]).keys(b"r" * 16)
    assert (plain == covered).all()


def test_overlapping_extras_are_refused() -> None:
    with pytest.raises(BadInputError, match="overlap at token 2"):
        RowPath.from_tokens([7] * 8, 4, [ExtraKey(1, 2, b"a"), ExtraKey(2, 2, b"b")])


def test_a_huge_extra_costs_no_more_than_the_prompt() -> None:
    path = RowPath.from_tokens([7] * 8, 4, [ExtraKey(0, (1 << 31) - 1, b"a")])
    assert [path.has_extra(i) for i in range(3)] == [True, True, False]
