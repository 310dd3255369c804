"""Which blocks left a cache not long ago: by a hash of their keys, in arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WAYS = 8
_SETS_MIN = 128


class Ghosts:
    """A queue of the blocks that left last, as a table of sets with eight places each, by hash: where a set is full its
    oldest goes. Made with at least two places a block, so that few go before their time."""

    def __init__(self) -> None:
        self._hashes, self._numbers = _places(_SETS_MIN)
        self._first = self._end = 0
        """Numbers of those remembered: the oldest's, and the next one's."""
        self._alive: NDArray[np.bool_] = np.zeros(2 * _WAYS * _SETS_MIN, np.bool_)
        """By number, in a ring: still remembered."""
        self._n = 0

    def fit(self, n_blocks: int) -> None:
        """Have places for as many blocks; grows only."""
        n = len(self._hashes)
        if n * _WAYS >= 2 * n_blocks:
            return
        while n * _WAYS < 2 * n_blocks:
            n *= 2
        order = np.argsort(self._numbers, axis=None, kind="stable")
        order = order[self._numbers.reshape(-1)[order] >= 0]
        hashes, numbers = self._hashes.reshape(-1)[order], self._numbers.reshape(-1)[order]
        self._hashes, self._numbers = _places(n)
        span = np.arange(self._first, self._end)
        alive = self._alive[span % len(self._alive)]
        self._alive = np.zeros(2 * _WAYS * n, np.bool_)
        self._alive[span % len(self._alive)] = alive
        self._put(hashes, numbers)

    def add(self, keys: NDArray[np.uint8], most: int) -> None:
        """Blocks left, in this order; ``keys`` uint8 [n, 16]. Of all the ``most`` latest are remembered."""
        if not len(keys):
            return
        size = len(self._alive)
        while self._first < self._end and (self._n + len(keys) > most or self._end + len(keys) - self._first > size):
            self._n -= int(self._alive[self._first % size])
            self._first += 1
        keys = keys[-min(most, size) :] if most else keys[:0]
        numbers = np.arange(self._end, self._end + len(keys))
        self._alive[numbers % size] = True
        self._put(_hashes(keys), numbers)
        self._end += len(keys)
        self._n += len(keys)

    def take(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which of the blocks are remembered; they are not any more."""
        hashes = _hashes(keys)
        at = self._sets(hashes)
        found = (self._hashes[at] == hashes[:, None]) & (self._numbers[at] >= self._first)
        rows, ways = np.nonzero(found)
        self._alive[self._numbers[at[rows], ways] % len(self._alive)] = False
        self._n -= len(rows)
        self._numbers[at[rows], ways] = -1
        taken = np.zeros(len(keys), np.bool_)
        taken[rows] = True
        return taken

    def _put(self, hashes: NDArray[np.uint64], numbers: NDArray[np.int64]) -> None:
        sets = self._sets(hashes)
        if len(np.unique(sets)) == len(sets):
            ways = self._numbers[sets].argmin(axis=1)
            self._hashes[sets, ways], self._numbers[sets, ways] = hashes, numbers
            return
        for at, hashed, number in zip(sets.tolist(), hashes, numbers.tolist(), strict=True):
            way = int(self._numbers[at].argmin())
            self._hashes[at, way], self._numbers[at, way] = hashed, number

    def _sets(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        return (hashes & np.uint64(len(self._hashes) - 1)).astype(np.intp)


def _places(n_sets: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    return np.zeros((n_sets, _WAYS), np.uint64), np.full((n_sets, _WAYS), -1, np.int64)


def _hashes(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view("<u8")[:, 0]
