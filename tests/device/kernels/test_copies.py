"""Copies by kernel against slices of the same memory, whatever the layouts, widths and alignments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.device.copy_kernels import CopyTable, PageSide, access_bytes, copy, table_of_pages, table_of_runs
from kvstore.device.seam import Addresses
from kvstore.errors import BadInputError
from tests.device.kernels.arena import Arena, Bytes

UNITS = [64 * 2, 80 * 2, 128 * 2, 256 * 2, 576 * 2, 64, 24, 12, 6, 5, 1]
"""Bytes of a unit: 16-bit values of the usual head dims and of an MLA latent, 8-bit ones, and odd ones."""

LAYOUTS = {"NHD": "lpthu", "HND": "lphtu", "page first": "plthu", "page first HND": "plhtu", "K beside V": "pthlu"}
"""Orders of plane, page, token, head and unit in memory."""

SKEWS = st.sampled_from([0, 0, 1, 2, 4, 8])
PLANE_BYTES = 4096


def check(arena: Arena, table: CopyTable, expected: Bytes, blocks: int = 2) -> None:
    """Makes the copy; all of the device's memory must look as expected then, and the table be as it was."""
    words = arena.put(table.words)
    rest = arena.picture()[len(expected) :]
    arena.upload()
    copy(arena.device, table, arena.address(words), arena.stream, blocks)
    assert np.array_equal(arena.result(), np.concatenate((expected, rest)))


def planes_at(address: int, count: int, stride: int) -> Addresses:
    return np.arange(count, dtype=np.uint64) * np.uint64(stride) + np.uint64(address)


@dataclass
class Paged:
    """Tokens of some planes in pages, somewhere in the arena."""

    begin: int
    strides: dict[str, int]
    page_tokens: int
    table: list[int]
    first_token: int

    @classmethod
    def drawn(cls, data: st.DataObject, arena: Arena, planes: int, heads: int, unit: int, n_tokens: int) -> Paged:
        draw = data.draw
        page_tokens = draw(st.sampled_from([1, 2, 3, 4, 16]))
        first_token = draw(st.integers(0, page_tokens + 1))
        needed = -(-(first_token + n_tokens) // page_tokens)
        pages = needed + draw(st.integers(0, 2))
        sizes = {"l": planes, "p": pages, "t": page_tokens, "h": heads, "u": unit}
        order = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
        memory = np.random.default_rng(unit).integers(0, 256, [sizes[letter] for letter in order], np.uint8)
        begin = arena.put(memory, skew_bytes=draw(SKEWS))
        table = draw(st.permutations(range(pages)))[:needed]
        return cls(begin, dict(zip(order, memory.strides, strict=True)), page_tokens, table, first_token)

    def side(self, address: int, planes: int) -> PageSide:
        starts = np.array(self.table, np.int64) * self.strides["p"]
        addresses = planes_at(address, planes, self.strides["l"])
        return PageSide(addresses, starts, self.page_tokens, self.strides["t"], self.strides["h"], self.first_token)

    def unit_at(self, plane: int, token: int, head: int) -> int:
        page, inside = divmod(token + self.first_token, self.page_tokens)
        steps = {"l": plane, "p": self.table[page], "t": inside, "h": head}
        return self.begin + sum(self.strides[letter] * count for letter, count in steps.items())


@settings(max_examples=60)
@given(data=st.data())
def test_any_layout_is_copied_to_any_other(arena: Arena, data: st.DataObject) -> None:
    draw = data.draw
    planes, heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 8]))
    unit, n_tokens = draw(st.sampled_from(UNITS)), draw(st.integers(1, 21))
    arena.clear()
    to, come_from = (Paged.drawn(data, arena, planes, heads, unit, n_tokens) for _ in range(2))
    table = table_of_pages(
        to.side(arena.address(to.begin), planes),
        come_from.side(arena.address(come_from.begin, on_host=draw(st.booleans())), planes),
        n_tokens,
        heads,
        unit,
    )
    assert table.moved_bytes == planes * n_tokens * heads * unit
    expected = arena.picture()
    for plane, token, head in np.ndindex(planes, n_tokens, heads):
        here, there = to.unit_at(plane, token, head), come_from.unit_at(plane, token, head)
        expected[here : here + unit] = expected[there : there + unit]
    check(arena, table, expected, draw(st.integers(1, 3)))


@settings(max_examples=60)
@given(data=st.data())
def test_runs_are_copied_as_the_table_says(arena: Arena, data: st.DataObject) -> None:
    draw = data.draw
    width, planes = draw(st.sampled_from([1, 2, 4, 8, 16])), draw(st.integers(1, 3))
    sizes, gaps, starts = (
        np.array(draw(st.lists(st.integers(0, most), min_size=6, max_size=6))) * width for most in (60, 3, 100)
    )
    to = np.cumsum(sizes + gaps) - sizes
    order = np.array(draw(st.permutations(range(6))))
    arena.clear()
    noise = np.random.default_rng(3).integers(0, 256, (planes, 2 * PLANE_BYTES), np.uint8)
    source, target = arena.put(noise), arena.put(noise[::-1])
    table = table_of_runs(
        planes_at(arena.address(target), planes, 2 * PLANE_BYTES),
        planes_at(arena.address(source, on_host=draw(st.booleans())), planes, 2 * PLANE_BYTES),
        to[order],
        starts[order],
        sizes[order].astype(np.uint64),
    )
    assert table.access_bytes >= width
    expected = arena.picture()
    for plane in range(planes):
        for here, there, size in zip(to.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            here, there = target + 2 * plane * PLANE_BYTES + here, source + 2 * plane * PLANE_BYTES + there
            expected[here : here + size] = expected[there : there + size]
    check(arena, table, expected)


@pytest.mark.parametrize("width", [16, 8, 4, 2, 1])
def test_each_width_of_access_copies_the_same(arena: Arena, width: int) -> None:
    arena.clear()
    source = arena.put(np.random.default_rng(1).integers(0, 256, 3000, np.uint8), skew_bytes=width % 16)
    target = arena.put_room((3000,), np.uint8)
    address = np.array([arena.address(0)], np.uint64)
    size = 2048 + width
    runs = np.array([target]), np.array([source]), np.array([size], np.uint64)
    table = table_of_runs(address, address, *runs)
    assert table.access_bytes == width
    expected = arena.picture()
    expected[target : target + size] = expected[source : source + size]
    check(arena, table, expected)


def test_one_long_run_among_many_short_ones_does_not_make_work_for_all(arena: Arena) -> None:
    arena.clear()
    source = arena.put(np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8))
    target = arena.put_room((1 << 20,), np.uint8)
    sizes = np.array([600_000, *[128] * 500], np.uint64)
    offsets = (np.cumsum(sizes) - sizes).astype(np.int64)
    table = table_of_runs(
        np.array([arena.address(target)], np.uint64),
        np.array([arena.address(source)], np.uint64),
        offsets,
        offsets,
        sizes,
    )
    assert table.n_pieces * table.lanes * table.access_bytes < 20 * int(sizes.sum())
    expected = arena.picture()
    total = int(sizes.sum())
    expected[target : target + total] = expected[source : source + total]
    check(arena, table, expected)


@settings(max_examples=200)
@given(sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 1 << 22)), min_size=1, max_size=30))
def test_a_table_has_at_most_twice_as_many_runs_as_were_given(sizes: list[int]) -> None:
    offsets = np.cumsum(sizes) - np.array(sizes)
    one = np.zeros(1, np.uint64)
    table = table_of_runs(one, one, offsets, offsets, np.array(sizes, np.uint64))
    assert table.words.nbytes <= 8 * (2 + 3 * 2 * len(sizes))
    assert table.moved_bytes == sum(sizes)


def test_nothing_to_copy_is_no_launch(arena: Arena) -> None:
    none, no_sizes = np.empty(0, np.int64), np.empty(0, np.uint64)
    one = np.array([arena.address(0)], np.uint64)
    side = PageSide(one, np.zeros(1, np.int64), 4, 16, 16)
    tables = [
        table_of_runs(one, one, none, none, no_sizes),
        table_of_runs(one[:0], one[:0], np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.uint64)),
        table_of_runs(one, one, np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.uint64)),
        table_of_pages(side, side, 0, 2, 16),
        table_of_pages(side, side, 4, 0, 16),
        table_of_pages(side, side, 4, 2, 0),
    ]
    for table in tables:
        arena.clear()
        assert table.moved_bytes == 0
        check(arena, table, arena.picture())


def test_strides_may_go_backwards(arena: Arena) -> None:
    arena.clear()
    source = arena.put(np.random.default_rng(1).integers(0, 256, (8, 32), np.uint8))
    target = arena.put_room((8, 32), np.uint8)
    zero = np.zeros(1, np.int64)
    to = PageSide(np.array([arena.address(target)], np.uint64), zero, 8, 32, 32)
    back = PageSide(np.array([arena.address(source) + 7 * 32], np.uint64), zero, 8, -32, 32)
    expected = arena.picture()
    rows = expected[source : source + 256].reshape(8, 32)[::-1].copy()
    expected[target : target + 256] = rows.ravel()
    check(arena, table_of_pages(to, back, 8, 1, 32), expected)


def test_the_widest_access_that_fits_is_found() -> None:
    assert access_bytes() == 16
    assert access_bytes(32, np.array([64, -48], np.int64)) == 16
    assert access_bytes(32, np.array([64, -40], np.int64)) == 8
    assert access_bytes(np.array([2**63 + 4], np.uint64)) == 4
    assert access_bytes(6) == 2
    assert access_bytes(0, -1) == 1


def test_what_does_not_fit_together_is_refused() -> None:
    planes, offsets, sizes = np.zeros(2, np.uint64), np.zeros(3, np.int64), np.ones(3, np.uint64)
    with pytest.raises(BadInputError, match="2 planes are given to copy to and 1"):
        table_of_runs(planes, planes[:1], offsets, offsets, sizes)
    with pytest.raises(BadInputError, match="3 and 2 offsets"):
        table_of_runs(planes, planes, offsets, offsets[:2], sizes)
    with pytest.raises(BadInputError, match="several copies"):
        table_of_runs(planes, planes, offsets, offsets, np.full(3, (1 << 40) + 1, np.uint64))
    side = PageSide(planes, offsets, 4, 16, 16)
    with pytest.raises(BadInputError, match="2 planes are given to copy to, and 1"):
        table_of_pages(side, side._replace(planes=planes[:1]), 4, 1, 16)
    with pytest.raises(BadInputError, match="can't hold 12 tokens from token 1 on"):
        table_of_pages(side, side._replace(first_token=1), 12, 1, 16)
    with pytest.raises(BadInputError, match="pages of 0 tokens"):
        table_of_pages(side._replace(page_tokens=0), side, 0, 1, 16)
