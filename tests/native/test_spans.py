"""Copies that hash on the way: the same bytes and checksums in C and in numpy, whatever the spans."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.native import row_addresses, spans
from kvstore.native.library import library
from kvstore.native.spans import CheckedCopy, backend

WAYS = ["fused", "passes"]
FLAT_BYTES = 400_000


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen = str(request.param)
    if chosen == "passes":
        monkeypatch.setattr(spans, "_native", None)
    elif spans._native is None:
        pytest.skip("the C part or xxhash lacks what it takes here")
    assert backend() == chosen
    return chosen


def sums_of(blocks: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(row.tobytes()) for row in blocks]


@pytest.mark.usefixtures("way")
def test_spans_of_any_cut_bring_the_bytes_and_the_checksums() -> None:
    sizes = st.one_of(st.integers(1, 600), st.integers(32_700, 32_800), st.integers(65_000, 140_000))

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(block_bytes=sizes, cuts=st.lists(st.integers(0, FLAT_BYTES), max_size=6), new=st.booleans())
    def run(block_bytes: int, cuts: list[int], new: bool) -> None:
        n_blocks = FLAT_BYTES // block_bytes
        n_bytes = n_blocks * block_bytes
        rng = np.random.default_rng(block_bytes)
        source = rng.integers(0, 256, (n_blocks, block_bytes), dtype=np.uint8)
        out, order = np.zeros_like(source), rng.permutation(n_blocks)  # blocks lie anywhere
        gathering = CheckedCopy(row_addresses(source)[order], block_bytes)
        scattering = CheckedCopy(row_addresses(out)[order], block_bytes)
        gathered, scattered = [], []
        for begin, end in pairwise([0, *sorted({cut for cut in cuts if 0 < cut < n_bytes}), n_bytes]):
            flat = np.zeros(end - begin + 2, np.uint8)
            if new:  # what the spans before brought is in the memory of the blocks only
                gathering = CheckedCopy(row_addresses(source)[order], block_bytes)
                scattering = CheckedCopy(row_addresses(out)[order], block_bytes)
            gathered += gathering.gather(begin, end - begin, flat.ctypes.data + 1).tolist()
            np.testing.assert_array_equal(flat[1:-1], source[order].reshape(-1)[begin:end])
            assert flat[0] == flat[-1] == 0
            scattered += scattering.scatter(begin, end - begin, flat.ctypes.data + 1).tolist()
        np.testing.assert_array_equal(out, source)
        assert gathered == scattered == sums_of(source[order])

    run()


@pytest.mark.usefixtures("way")
def test_a_checksum_is_of_what_came_and_not_of_what_was_there() -> None:
    """A block in two spans, the first of which is done again with other bytes."""
    out = np.zeros((1, 100_000), np.uint8)
    first, other, second = (np.random.default_rng(i).integers(0, 256, 50_000, dtype=np.uint8) for i in range(3))
    copying = CheckedCopy(row_addresses(out), 100_000)
    assert not len(copying.scatter(0, 50_000, first.ctypes.data))
    assert not len(copying.scatter(0, 50_000, other.ctypes.data))
    sums = copying.scatter(50_000, 50_000, second.ctypes.data)
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(other.tobytes() + second.tobytes())]


@pytest.mark.usefixtures("way")
def test_a_span_of_nothing_copies_nothing() -> None:
    block = np.ones((1, 10), np.uint8)
    assert not len(CheckedCopy(row_addresses(block), 10).gather(0, 0, 0))


@pytest.mark.usefixtures("way")
def test_a_span_of_nothing_within_a_block_leaves_what_follows_as_it_is() -> None:
    source = np.random.default_rng(3).integers(0, 256, (1, 200_000), dtype=np.uint8)
    flat = np.zeros(200_000, np.uint8)
    copy = CheckedCopy(row_addresses(source), 200_000)
    assert not len(copy.gather(100_000, 0, flat.ctypes.data))
    assert copy.gather(100_000, 100_000, flat.ctypes.data + 100_000).tolist() == sums_of(source)
    np.testing.assert_array_equal(flat[100_000:], source[0, 100_000:])


def test_the_fast_way_is_used_where_there_is_one() -> None:
    """On Linux, with the wheels of xxhash and the C part built: a change there would go unnoticed."""
    if not sys.platform.startswith("linux") or library() is None:
        pytest.skip("only known for Linux with the C part")
    assert backend() == "fused"
