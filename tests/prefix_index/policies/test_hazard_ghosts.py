"""What the memory of blocks that left says, against a plain dictionary."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ghosts import GhostRuns


def _keys(names: list[int]) -> NDArray[np.uint8]:
    """Keys of which many fall on the same rows."""
    keys = np.zeros((len(names), 16), np.uint8)
    keys[:, 0] = [name % 7 for name in names]
    keys[:, 1] = [name // 7 for name in names]
    return keys


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 120), max_size=40)), max_size=25), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_each_block_is_remembered_or_said_to_be_forgotten(steps: list[tuple[bool, set[int]]], grows: bool) -> None:
    ghosts = GhostRuns(16)
    runs: dict[int, int] = {}
    watched: Counter[int] = Counter()
    for number, (adds, names) in enumerate(steps):
        if adds:
            new = [name for name in sorted(names) if name not in runs]
            forgotten = ghosts.add(_keys(new), np.full(len(new), number))
            runs.update(dict.fromkeys(new, number))
            watched[number] += len(new)
        else:
            some = sorted(names)
            seen = ghosts.find(_keys(some))
            found = ghosts.take(_keys(some))
            assert ghosts.find(_keys(some)) is None
            assert (seen.tolist() if seen is not None else None) == (found.tolist() if found is not None else None)
            for name, run in zip(some, found.tolist() if found is not None else [-1] * len(some), strict=True):
                assert run in (-1, runs.get(name, -1))
                if run >= 0:
                    watched[run] -= 1
                    del runs[name]
            forgotten = ghosts.fit(32 if grows else 8)
        for run in forgotten.tolist():
            watched[run] -= 1
    left = ghosts.take(_keys(list(range(121))))
    assert Counter(left[left >= 0].tolist() if left is not None else []) == +watched
    assert ghosts.n_places in (16, 32)
