"""Which slot has a key: open addressing over numpy arrays, many keys at a time, 8 to 16 bytes a key.

Keys are hashes, so their own bits choose the place. The keys themselves lie in the slot table. When a table gets
full, another takes its place and the old one is moved over a little at a time, so that no call takes long.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Keys = NDArray[np.uint8]

# Places hold a row + 1. Fresh memory is EMPTY and costs nothing until it is used.
_EMPTY, _GONE = 0, -1
_MOVED_LEAST = 1024
"""Places that are moved by each call at least."""


class KeyLookup:
    """From keys to the indexes of rows of ``keys`` (uint8 [n, 16]). A key may be there more than once."""

    def __init__(self, n_expected: int = 0) -> None:
        self._places = _table_for(n_expected)
        self._n_used = 0
        self._n_there = 0
        self._old: NDArray[np.int32] | None = None
        """What was the table before; its places below ``_n_moved`` are moved."""
        self._n_moved = 0

    def __len__(self) -> int:
        return self._n_there

    def add(self, keys: Keys, rows: Int64s) -> None:
        """Make rows known; ``keys`` is the whole array that rows index."""
        if 2 * (self._n_used + len(rows)) > len(self._places):
            self._move(keys, len(self._places))
            self._old, self._n_moved = self._places, 0
            self._places = _table_for(self._n_there + len(rows))
            self._n_used = 0
        self._put(keys, rows)
        self._n_there += len(rows)
        if self._old is not None:
            # Done before this table is full: it was made for four times as many as are in the old one.
            self._move(keys, _MOVED_LEAST + len(rows) * (-(-4 * len(self._old) // len(self._places))))

    def remove(self, keys: Keys, rows: Int64s) -> None:
        """Forget rows that are known."""
        missing = _take_out(self._places, keys, rows)
        if len(missing) and self._old is not None:
            _take_out(self._old, keys, missing)
        self._n_there -= len(rows)

    def find(self, keys: Keys, wanted: Keys) -> Int64s:
        """For each wanted key (uint8 [m, 16]) a row that has it, -1 where there is none; int64 [m]."""
        wanted = np.ascontiguousarray(wanted)
        rows = _find(self._places, keys, wanted)
        if self._old is not None:
            missing = np.flatnonzero(rows < 0)
            rows[missing] = _find(self._old, keys, wanted[missing])
        return rows

    def _move(self, keys: Keys, n_places: int) -> None:
        """Move what is in some more places of the old table."""
        if self._old is None:
            return
        start = self._n_moved
        self._n_moved = min(start + n_places, len(self._old))
        here = self._old[start : self._n_moved]
        self._put(keys, here[here > 0].astype(np.int64) - 1)
        here[here > 0] = _GONE
        if self._n_moved == len(self._old):
            self._old = None

    def _put(self, keys: Keys, rows: Int64s) -> None:
        mask = len(self._places) - 1
        at = _hashes(keys[rows]) & mask
        left = np.arange(len(rows))
        while len(left):
            before = self._places[at[left]]
            free = before <= 0
            self._places[at[left[free]]] = rows[left[free]] + 1
            # Several may have gone for one place; the last has it.
            has = free & (self._places[at[left]] == rows[left] + 1)
            self._n_used += int((before[has] == _EMPTY).sum())
            left = left[~has]
            at[left] = (at[left] + 1) & mask


def _find(places: NDArray[np.int32], keys: Keys, wanted: Keys) -> Int64s:
    mask = len(places) - 1
    pairs, all_pairs = wanted.view(np.uint64).reshape(-1, 2), keys.view(np.uint64).reshape(-1, 2)
    rows = np.full(len(wanted), -1, np.int64)
    at = _hashes(wanted) & mask
    left = np.arange(len(wanted))
    while len(left):
        here = places[at[left]]
        left, here = left[here != _EMPTY], here[here != _EMPTY]
        same = (all_pairs[np.maximum(here, 1) - 1] == pairs[left]).all(axis=1) & (here > 0)
        rows[left[same]] = here[same] - 1
        left = left[~same]
        at[left] = (at[left] + 1) & mask
    return rows


def _take_out(places: NDArray[np.int32], keys: Keys, rows: Int64s) -> Int64s:
    """Rows leave their places; returns those that have none here."""
    mask = len(places) - 1
    at = _hashes(keys[rows]) & mask
    left = np.arange(len(rows))
    missing = [left[:0]]
    while len(left):
        here = places[at[left]]
        places[at[left[here == rows[left] + 1]]] = _GONE
        missing.append(left[here == _EMPTY])
        left = left[(here != rows[left] + 1) & (here != _EMPTY)]
        at[left] = (at[left] + 1) & mask
    return rows[np.concatenate(missing)]


def _hashes(keys: Keys) -> Int64s:
    low = np.ascontiguousarray(keys[:, :8]).view(np.int64).reshape(-1)
    return low & np.int64(0x7FFFFFFFFFFFFFFF)


def _table_for(n: int) -> NDArray[np.int32]:
    """Room for twice as many keys at least. In plain pages: huge ones take long to be cleared on first use."""
    size = 1 << max(10, (4 * n).bit_length())
    return np.frombuffer(mmap.mmap(-1, 4 * size), np.int32)
