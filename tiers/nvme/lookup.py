"""Which slot has a key: open addressing over numpy arrays, many keys at a time, 8 to 16 bytes a key.

Keys are hashes, so their own bits choose the place. The keys themselves lie in the slot table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Keys = NDArray[np.uint8]

_EMPTY, _GONE = -1, -2


class KeyLookup:
    """From keys to the indexes of rows of ``keys`` (uint8 [n, 16]). A key may be there more than once."""

    def __init__(self, n_expected: int = 0) -> None:
        self._places = np.full(_table_size(n_expected), _EMPTY, np.int32)
        self._n_used = 0
        self._n_there = 0

    def __len__(self) -> int:
        return self._n_there

    def add(self, keys: Keys, rows: Int64s) -> None:
        """Make rows known; ``keys`` is the whole array that rows index."""
        if 2 * (self._n_used + len(rows)) > len(self._places):
            there = self._places[self._places >= 0].astype(np.int64)
            self._places = np.full(_table_size(self._n_there + len(rows)), _EMPTY, np.int32)
            self._n_used = self._n_there = 0
            self._put(keys, there)
        self._put(keys, rows)

    def remove(self, keys: Keys, rows: Int64s) -> None:
        """Forget rows that are known."""
        mask = len(self._places) - 1
        at = _hashes(keys[rows]) & mask
        left = np.arange(len(rows))
        while len(left):
            found = self._places[at[left]] == rows[left]
            self._places[at[left[found]]] = _GONE
            left = left[~found]
            at[left] = (at[left] + 1) & mask
        self._n_there -= len(rows)

    def find(self, keys: Keys, wanted: Keys) -> Int64s:
        """For each wanted key (uint8 [m, 16]) a row that has it, -1 where there is none; int64 [m]."""
        mask = len(self._places) - 1
        wanted = np.ascontiguousarray(wanted)
        pairs, all_pairs = wanted.view(np.uint64).reshape(-1, 2), keys.view(np.uint64).reshape(-1, 2)
        rows = np.full(len(wanted), -1, np.int64)
        at = _hashes(wanted) & mask
        left = np.arange(len(wanted))
        while len(left):
            here = self._places[at[left]]
            left, here = left[here != _EMPTY], here[here != _EMPTY]
            same = (all_pairs[np.maximum(here, 0)] == pairs[left]).all(axis=1) & (here >= 0)
            rows[left[same]] = here[same]
            left = left[~same]
            at[left] = (at[left] + 1) & mask
        return rows

    def _put(self, keys: Keys, rows: Int64s) -> None:
        mask = len(self._places) - 1
        at = _hashes(keys[rows]) & mask
        left = np.arange(len(rows))
        while len(left):
            free = self._places[at[left]] == _EMPTY
            self._places[at[left[free]]] = rows[left[free]]
            # Several may have gone for one place; the last has it.
            has = free & (self._places[at[left]] == rows[left])
            left = left[~has]
            at[left] = (at[left] + 1) & mask
        self._n_used += len(rows)
        self._n_there += len(rows)


def _hashes(keys: Keys) -> Int64s:
    low = np.ascontiguousarray(keys[:, :8]).view(np.int64).reshape(-1)
    return low & np.int64(0x7FFFFFFFFFFFFFFF)


def _table_size(n: int) -> int:
    return 1 << max(10, (4 * n).bit_length())
