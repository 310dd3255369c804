"""Summaries of pages bit by bit, and their scores, against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.device.kernels import VALUE_BYTES
from kvstore.device.page_kernels import KeyPages, PageSummaries, score_pages, summarize_pages
from kvstore.errors import BadInputError
from tests.device.kernels import references
from tests.device.kernels.arena import Arena
from tests.device.kernels.references import BITS, Bits, to_bits, to_float

DTYPES = sorted(VALUE_BYTES)
HEADS_AND_DIMS = [(2, 64), (3, 80), (2, 128), (1, 256), (1, 576), (2, 5), (1, 12), (2, 1)]
GROUPS = [1, 2, 3, 4, 7, 8, 16]


def same(got: Bits, wanted: Bits, dtype: str) -> bool:
    """Whether all bits are the same; any NaN is like any other."""
    both_nan = np.isnan(to_float(got, dtype)) & np.isnan(to_float(wanted, dtype))
    return bool(np.all((got == wanted) | both_nan))


def drawn_keys(data: st.DataObject, dtype: str, shape: tuple[int, ...]) -> Bits:
    """Any bits at all, NaN and subnormal ones included, or values as keys have them."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    if data.draw(st.booleans()):
        bits = BITS[dtype]
        return rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)
    return to_bits(rng.normal(size=shape).astype(np.float32) * 3, dtype)


def put_keys(arena: Arena, keys: Bits, layout: str, table: list[int], skew_bytes: int) -> tuple[int, int, list[int]]:
    """Keys [page, token, head, dim] in a pool in this layout: strides of tokens and heads, and where each page is."""
    pool = np.zeros_like(keys[:1]).repeat(max(table) + 1, 0)
    pool[table] = keys
    stored = pool if layout == "NHD" else np.ascontiguousarray(pool.transpose(0, 2, 1, 3))
    begin = arena.put(stored, skew_bytes=skew_bytes)
    token, head = stored.strides[1:3] if layout == "NHD" else stored.strides[2:0:-1]
    return token, head, [begin + page * stored.strides[0] for page in table]


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_summaries_are_exact(arena: Arena, dtype: str, data: st.DataObject) -> None:
    draw = data.draw
    heads, dim = draw(st.sampled_from(HEADS_AND_DIMS))
    page_tokens, n_pages = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    rows = np.array(draw(st.lists(st.integers(0, page_tokens), min_size=n_pages, max_size=n_pages)), np.uint32)
    keys = drawn_keys(data, dtype, (n_pages, page_tokens, heads, dim))
    skew = draw(st.sampled_from([0, 0, 0, 8, 4]))
    arena.clear()
    table = draw(st.permutations(range(n_pages + 1)))[:n_pages]
    token, head, begins = put_keys(arena, keys, draw(st.sampled_from(["NHD", "HND"])), table, skew)
    on_host = draw(st.booleans())
    pages = arena.put(np.array([arena.address(begin, on_host=on_host) for begin in begins], np.uint64))
    row_table = arena.put(rows)
    shape = (n_pages, heads, dim)
    wanted = draw(st.sets(st.sampled_from(["low", "high", "mean"])))
    places = {name: arena.put_room(shape, BITS[dtype], skew_bytes=draw(st.sampled_from([0, 4]))) for name in wanted}
    given_keys = KeyPages(
        arena.address(pages), arena.address(row_table), n_pages, heads, dim, dtype, token, head, 16 if not skew else 4
    )
    before = arena.picture()
    arena.upload()
    summarize_pages(
        arena.device, given_keys, arena.stream, **{name: arena.address(place) for name, place in places.items()}
    )
    result = arena.result()
    expected = references.summaries(to_float(keys, dtype), rows)
    for name, values in zip(("low", "high", "mean"), expected, strict=True):
        if name in places:
            got = arena.array(result, places[name], shape, BITS[dtype])
            assert same(got[rows > 0], to_bits(values, dtype)[rows > 0], dtype), name
            arena.array(before, places[name], shape, BITS[dtype])[rows > 0] = got[rows > 0]
    assert np.array_equal(result, before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_value_is_read_and_rounded_right(arena: Arena, dtype: str) -> None:
    """A page of one row is its own mean; of two neighbours it is a tie, which goes to the even one."""
    every = np.arange(1 << 16, dtype=np.uint16).reshape(64, 1, 1, 1024)
    for keys in (every, np.concatenate((every, every + np.uint16(1)), axis=1)):
        arena.clear()
        token, head, begins = put_keys(arena, keys, "NHD", list(range(64)), 0)
        pages = arena.put(np.array([arena.address(begin) for begin in begins], np.uint64))
        rows = np.full(64, keys.shape[1], np.uint32)
        row_table = arena.put(rows)
        place = arena.put_room((64, 1, 1024), np.uint16)
        arena.upload()
        given_keys = KeyPages(arena.address(pages), arena.address(row_table), 64, 1, 1024, dtype, token, head)
        summarize_pages(arena.device, given_keys, arena.stream, mean=arena.address(place))
        got = arena.array(arena.result(), place, (64, 1, 1024), np.uint16)
        mean = references.summaries(to_float(keys, dtype), rows)[2]
        assert same(got, to_bits(mean, dtype), dtype)


def scored(arena: Arena, dtype: str, summaries: list[Bits], queries: Bits, *, add: bool) -> NDArray[np.float32]:
    """Scores [head, page] of queries [head, group, dim] by summaries [page, head, dim]; nothing else was written."""
    heads, group, dim = queries.shape
    n_pages = len(summaries[0])
    arena.clear()
    low, high, asked = (arena.put(each) for each in (*summaries, queries))
    place = arena.put_room((heads, n_pages), np.float32)
    before = arena.picture()
    arena.upload()
    pages = PageSummaries(arena.address(low), arena.address(high), n_pages, heads, dim, dtype)
    score_pages(arena.device, pages, arena.address(asked), group, arena.address(place), arena.stream, add=add)
    result = arena.result()
    got: NDArray[np.float32] = arena.array(result, place, (heads, n_pages), np.float32).copy()
    arena.array(before, place, (heads, n_pages), np.float32)[:] = got
    assert np.array_equal(result, before)
    return got


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_those_of_the_reference(arena: Arena, dtype: str, data: st.DataObject) -> None:
    draw = data.draw
    heads, dim = draw(st.sampled_from(HEADS_AND_DIMS))
    group, n_pages = draw(st.sampled_from(GROUPS)), draw(st.integers(1, 19))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    add = draw(st.booleans())
    keys = rng.normal(size=(n_pages, 3, heads, dim)).astype(np.float32)
    low, high = (to_bits(np.ascontiguousarray(each), dtype) for each in (keys.min(1), keys.max(1)))
    queries = to_bits(rng.normal(size=(heads, group, dim)).astype(np.float32), dtype)
    got = scored(arena, dtype, [low, high], queries, add=add)
    q, least, most = (to_float(each, dtype) for each in (queries, low, high))
    assert np.array_equal(got, references.scores(q, least, most, add=add))
    exact = references.scores_exactly(*(each.astype(np.float64) for each in (q, least, most)), add=add)
    size = references.scores_exactly(*(np.abs(each).astype(np.float64) for each in (q, least, most)), add=add)
    assert np.all(np.abs(got - exact) <= 1e-3 * np.maximum(np.abs(exact), 1e-2 * size))


@pytest.mark.parametrize("add", [False, True])
def test_many_queries_of_one_head_are_held_a_tile_at_a_time(arena: Arena, add: bool) -> None:
    """MLA: 128 queries of 576 channels are more than a block's shared memory."""
    rng = np.random.default_rng(5)
    mean = to_bits(rng.normal(size=(11, 1, 576)).astype(np.float32), "bfloat16")
    queries = to_bits(rng.normal(size=(1, 48, 576)).astype(np.float32), "bfloat16")
    got = scored(arena, "bfloat16", [mean, mean], queries, add=add)
    landmarks = to_float(mean, "bfloat16")
    assert np.array_equal(got, references.scores(to_float(queries, "bfloat16"), landmarks, landmarks, add=add))


def test_a_bound_is_never_below_the_score_of_a_key_of_the_page(arena: Arena) -> None:
    rng = np.random.default_rng(9)
    keys = rng.normal(size=(6, 16, 2, 64)).astype(np.float16)
    queries = rng.normal(size=(2, 4, 64)).astype(np.float16)
    low, high = keys.min(1).view(np.uint16), keys.max(1).view(np.uint16)
    got = scored(arena, "float16", [low, high], queries.view(np.uint16), add=False)
    true = np.einsum("hgd,pthd->hpgt", queries.astype(np.float64), keys.astype(np.float64)).max((2, 3))
    assert np.all(got >= true - 1e-3 * np.abs(true))


def test_what_cannot_be_scored_or_summarized_is_refused(arena: Arena) -> None:
    pages = PageSummaries(0, 0, 3, 1, 64, "float8_e4m3")
    with pytest.raises(BadInputError, match="'float8_e4m3' have no summaries; float16, bfloat16, float32 have"):
        score_pages(arena.device, pages, 0, 1, 0, arena.stream)
    pages = replace(pages, dtype="float16")
    with pytest.raises(BadInputError, match="head_dim is 20000"):
        score_pages(arena.device, replace(pages, head_dim=20_000), 0, 1, 0, arena.stream)
    with pytest.raises(BadInputError, match="queries_per_head is 0"):
        score_pages(arena.device, pages, 0, 0, 0, arena.stream)
    with pytest.raises(BadInputError, match="2147483649 pages are too many"):
        score_pages(arena.device, replace(pages, n_pages=2**31 + 1), 0, 1, 0, arena.stream)
    keys = KeyPages(0, 0, 2**30, 8, 64, "float16", 1024, 128)
    with pytest.raises(BadInputError, match="channels are too many for one launch"):
        summarize_pages(arena.device, keys, arena.stream)
    with pytest.raises(BadInputError, match="kv_page_score_float16 has a grid of"):
        score_pages(arena.device, replace(pages, heads=1 << 16), 0, 1, 0, arena.stream)
