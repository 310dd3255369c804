"""Counters per slot, and the places they lie at."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import IntegrityError
from kvstore.native import Mapping
from kvstore.tiers.generations import Generations, RangeSpace


def test_ranges_are_lowest_first_and_join_again() -> None:
    space = RangeSpace(10)
    assert [space.take(3), space.take(2), space.take(5)] == [0, 3, 5]
    with pytest.raises(IntegrityError, match="no 1 places"):
        space.take(1)
    space.give(0, 3)
    space.give(5, 5)
    assert space.free == 8
    with pytest.raises(IntegrityError, match="no 6 places"):
        space.take(6)
    space.give(3, 2)
    assert space.take(10) == 0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 16)), max_size=80))
def test_taken_ranges_never_overlap_and_always_fit_within_the_bound(steps: list[tuple[bool, int]]) -> None:
    most = 32  # slots at once; Generations promises room for any ranges of them
    space = RangeSpace(most * (2 + most.bit_length()))
    taken: dict[int, int] = {}
    for take, n in steps:
        if take and sum(taken.values()) + n <= most:
            start = space.take(n)
            assert all(start + n <= other or other + length <= start for other, length in taken.items())
            assert start + n <= space.limit
            taken[start] = n
        elif taken:
            start = sorted(taken)[n % len(taken)]
            space.give(start, taken.pop(start))
        assert space.free == space.limit - sum(taken.values())


def test_clients_see_counters_move_and_cannot_move_them() -> None:
    generations = Generations(100)
    reader = Mapping(generations.fd, generations.size_bytes, writable=False).array().view(np.uint64)
    assert not reader[:100].any()
    generations.bump(np.array([3, 5], np.int64))
    generations.bump(np.array([5], np.int64))
    assert reader[[2, 3, 5]].tolist() == [0, 1, 2]
    with pytest.raises(PermissionError):
        mmap.mmap(generations.fd, 4096)
    generations.close()
    generations.close()
    assert reader[5] == 2  # a client's mapping outlives the daemon's


def test_the_file_is_sparse() -> None:
    generations = Generations((1 << 40) // 4096)
    generations.bump(np.array([0], np.int64))
    assert os.fstat(generations.fd).st_blocks * 512 <= 1 << 16
    generations.close()
