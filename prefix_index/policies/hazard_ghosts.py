"""To which run the blocks belonged that have left the table: by a hash of their keys, in arrays of bounded size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ages import Ints

_WAYS = 8
_NONE, _NEVER = 0, 0  # so that untouched room takes no memory; runs are kept as one more


class GhostRuns:
    """A hash table of places in rows of eight. What finds no free place takes the oldest of its row, and who is
    forgotten that way is told, so that nothing is thought to be watched that isn't."""

    def __init__(self, n_places: int = 1 << 17) -> None:
        self._make(n_places)
        self._n_added = 0

    @property
    def n_places(self) -> int:
        """Most blocks remembered."""
        return self._runs.size

    def fit(self, n_places: int) -> Ints:
        """Have at least so many places; grows only. Returns the runs of those forgotten by it, one entry a block."""
        n = self.n_places
        if n >= n_places:
            return np.empty(0, np.int64)
        while n < n_places:
            n *= 2
        held = np.flatnonzero(self._runs.ravel() != _NONE)
        held = held[np.argsort(self._numbers.ravel()[held], kind="stable")]
        hashes, runs = self._hashes.ravel()[held], self._runs.ravel()[held]
        self._make(n)
        return self._put(hashes, runs.astype(np.int64) - 1)

    def add(self, keys: NDArray[np.uint8], runs: Ints) -> Ints:
        """Blocks left, ``keys`` uint8 [n, 16], of these runs. Returns the runs of those forgotten, an entry a block."""
        return self._put(_hashes(keys), runs)

    def find(self, keys: NDArray[np.uint8]) -> Ints | None:
        """The runs of these blocks, -1 where none is remembered; None if none is at all."""
        found = self._find(keys)
        return None if found is None else found[0]

    def take(self, keys: NDArray[np.uint8]) -> Ints | None:
        """As ``find``, and they are forgotten."""
        found = self._find(keys)
        if found is None:
            return None
        runs, at = found
        taken = at[runs >= 0]
        self._runs.ravel()[taken], self._numbers.ravel()[taken] = _NONE, _NEVER
        return runs

    def _find(self, keys: NDArray[np.uint8]) -> tuple[Ints, NDArray[np.intp]] | None:
        """Runs, and places where there is a run."""
        hashes = _hashes(keys)
        rows = self._rows(hashes)
        found = self._hashes[rows] == hashes[:, None]
        if not found.any():
            return None
        found &= self._runs[rows] != _NONE
        at = rows * _WAYS + found.argmax(axis=1)
        known = found.any(axis=1)
        if not known.any():
            return None
        runs: Ints = np.where(known, self._runs.ravel()[at].astype(np.int64) - 1, -1)
        return runs, at

    def _make(self, n_places: int) -> None:
        shape = (n_places // _WAYS, _WAYS)
        self._hashes: NDArray[np.uint64] = np.zeros(shape, np.uint64)
        self._runs: NDArray[np.int32] = np.zeros(shape, np.int32)
        self._numbers: NDArray[np.int64] = np.zeros(shape, np.int64)

    def _put(self, hashes: NDArray[np.uint64], runs: Ints) -> Ints:
        """Each takes the free or oldest place of its row; where several want the same, one after another."""
        forgotten = []
        hash_places, run_places, numbers = self._hashes.ravel(), self._runs.ravel(), self._numbers.ravel()
        while len(hashes):
            rows = self._rows(hashes)
            at = rows * _WAYS + self._numbers[rows].argmin(axis=1)
            old = run_places[at]
            mine = np.arange(self._n_added + 1, self._n_added + 1 + len(at))
            numbers[at] = mine
            waits = numbers[at] != mine
            if waits.any():
                has = ~waits
                at, old = at[has], old[has]
                hash_places[at], run_places[at] = hashes[has], runs[has] + 1
            else:
                hash_places[at], run_places[at] = hashes, runs + 1
            self._n_added += len(mine)
            forgotten.append(old[old != _NONE].astype(np.int64) - 1)
            hashes, runs = hashes[waits], runs[waits]
        return np.concatenate(forgotten) if forgotten else np.empty(0, np.int64)

    def _rows(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        return (hashes & np.uint64(len(self._runs) - 1)).astype(np.intp)


def _hashes(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view("<u8")[:, 0]
