"""To which run the blocks belonged that have left the table: by a hash of their keys, in arrays of bounded size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ages import Ints

_WAYS = 4
_NONE = 0  # so that untouched room takes no memory; runs are kept as one more


class GhostRuns:
    """A hash table of places in rows of four. What finds no free place takes the oldest of its row, and who is
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

    def take(self, keys: NDArray[np.uint8]) -> Ints:
        """The runs of these blocks, -1 where none is remembered; they are forgotten."""
        hashes = _hashes(keys)
        rows = self._rows(hashes)
        found = (self._hashes[rows] == hashes[:, None]) & (self._runs[rows] != _NONE)
        way = found.argmax(axis=1)
        known = found.any(axis=1)
        runs: Ints = np.where(known, self._runs[rows, way].astype(np.int64) - 1, -1)
        self._runs[rows[known], way[known]] = _NONE
        return runs

    def _make(self, n_places: int) -> None:
        shape = (n_places // _WAYS, _WAYS)
        self._hashes: NDArray[np.uint64] = np.zeros(shape, np.uint64)
        self._runs: NDArray[np.int32] = np.zeros(shape, np.int32)
        self._numbers: NDArray[np.int64] = np.zeros(shape, np.int64)

    def _put(self, hashes: NDArray[np.uint64], runs: Ints) -> Ints:
        forgotten: list[Ints] = []
        while len(hashes):
            rows = self._rows(hashes)
            # One block a row in each round, so that no two of a call take the same place.
            _, first = np.unique(rows, return_index=True)
            now = rows[first]
            ages = np.where(self._runs[now] == _NONE, -1, self._numbers[now])
            way = ages.argmin(axis=1)
            old = self._runs[now, way]
            forgotten.append(old[old != _NONE].astype(np.int64) - 1)
            self._hashes[now, way], self._runs[now, way] = hashes[first], runs[first] + 1
            self._numbers[now, way] = self._n_added + np.arange(len(first))
            self._n_added += len(first)
            left = np.ones(len(hashes), np.bool_)
            left[first] = False
            hashes, runs = hashes[left], runs[left]
        return np.concatenate(forgotten) if forgotten else np.empty(0, np.int64)

    def _rows(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        return (hashes & np.uint64(len(self._runs) - 1)).astype(np.intp)


def _hashes(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view("<u8")[:, 0]
