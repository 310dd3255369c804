"""The lookup against a dict, with keys that collide."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.nvme import lookup as lookup_module
from kvstore.tiers.nvme.lookup import Int64s, KeyLookup, Keys
from kvstore.tiers.nvme.table import FrameTable


def make_keys(n: int, n_low: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Distinct keys of which many share the bits that choose the place."""
    keys = np.random.default_rng(seed).integers(0, 256, (n, 16), dtype=np.uint8)
    keys[:, :8] = 0
    keys[:, 0] = np.arange(n) % n_low
    return keys


STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 200), st.integers(0, 1 << 16)), max_size=15)


@settings(deadline=None, max_examples=40)
@given(STEPS, st.integers(20, 90))
def test_it_agrees_with_a_dict(steps: list[tuple[bool, int, int]], n_low: int) -> None:
    keys = make_keys(300, n_low, 1)
    lookup = KeyLookup()
    there: set[int] = set()
    for adding, n, seed in steps:
        rng = np.random.default_rng(seed)
        pool = sorted(set(range(len(keys))) - there if adding else there)
        rows = np.array([pool[i] for i in rng.permutation(len(pool))[:n]], np.int64)
        if adding:
            lookup.add(keys, rows)
            there |= set(rows.tolist())
        else:
            lookup.remove(keys, rows)
            there -= set(rows.tolist())
        assert len(lookup) == len(there)
        expected = np.array([row if row in there else -1 for row in range(len(keys))])
        assert (lookup.find(keys, keys) == expected).all()


def test_equal_keys_of_two_rows() -> None:
    """A frame written again while its predecessor dies: either is found as long as it is there."""
    keys = np.zeros((2, 16), np.uint8)
    lookup = KeyLookup()
    lookup.add(keys, np.array([0, 1]))
    lookup.remove(keys, np.array([0]))
    assert lookup.find(keys, keys[:1]).tolist() == [1]
    lookup.remove(keys, np.array([1]))
    assert lookup.find(keys, keys[:1]).tolist() == [-1]


def test_it_does_not_grow_by_coming_and_going() -> None:
    keys = np.random.default_rng(0).integers(0, 256, (100, 16), dtype=np.uint8)
    lookup = KeyLookup()
    for _ in range(200):
        lookup.add(keys, np.arange(100))
        lookup.remove(keys, np.arange(100))
    assert len(lookup._places) <= 4096


@pytest.mark.parametrize("seed", range(4))
def test_it_agrees_with_a_dict_while_it_is_moved(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is moved a little at a time; meanwhile keys come, go and are found in both."""
    monkeypatch.setattr(lookup_module, "_MOVED_LEAST", 1)
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 256, (12_000, 16), dtype=np.uint8)
    keys[:, 2:8] = 0  # places are shared
    lookup = KeyLookup()
    there = np.zeros(len(keys), np.bool_)
    n_moving = most_moved = 0
    for step in range(600):
        adding = rng.random() < (0.8 if step < 250 else 0.5)
        pool = np.flatnonzero(there != adding)
        rows = rng.permutation(pool)[: int(rng.integers(1, 60))]
        before, old = lookup._n_moved, lookup._old
        (lookup.add if adding else lookup.remove)(keys, rows)
        there[rows] = adding
        if lookup._old is not None and old is lookup._old:
            most_moved = max(most_moved, (lookup._n_moved - before) // max(len(rows), 1))
        n_moving += lookup._old is not None
        wanted = rng.integers(0, len(keys), 200)
        assert (lookup.find(keys, keys[wanted]) == np.where(there[wanted], wanted, -1)).all()
        assert len(lookup) == there.sum()
    assert n_moving > 20
    assert most_moved <= 64
    assert (lookup.find(keys, keys) == np.where(there, np.arange(len(keys)), -1)).all()


def test_no_call_moves_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it grows nor while keys come and go: nobody can be served meanwhile."""
    moved: list[int] = []
    put = KeyLookup._put

    def counted(self: KeyLookup, keys: Keys, rows: Int64s) -> None:
        moved.append(len(rows))
        put(self, keys, rows)

    monkeypatch.setattr(KeyLookup, "_put", counted)
    keys = np.random.default_rng(0).integers(0, 256, (200_000, 16), dtype=np.uint8)
    lookup = KeyLookup()
    for start in range(0, len(keys), 256):
        lookup.add(keys, np.arange(start, min(start + 256, len(keys))))
    for start in range(0, 4 * len(keys), 256):
        rows = np.arange(start, start + 256) % len(keys)
        lookup.remove(keys, rows)
        lookup.add(keys, rows)
    assert max(moved) <= 4096


def test_the_table_of_slots_grows_by_bounded_steps() -> None:
    table = FrameTable()
    sizes = [0]
    while sizes[-1] < 400_000:
        table.take(5000)
        sizes.append(len(table.state))
    assert max(b - a for a, b in pairwise(sizes)) <= 1 << 16
    table.check()
