"""The lookup against a dict, with keys that collide."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.nvme.lookup import KeyLookup


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
