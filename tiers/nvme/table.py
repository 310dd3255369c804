"""What is known of every frame: where it lies, which block it is, in what state. One structure of arrays.

    FREE -> RESERVED              a place is set aside
    RESERVED -> WRITING -> LIVE   written, durable, named
    WRITING -> DOOMED -> DYING    freed while it was being written
    LIVE -> DYING -> FREE         dead; free once its name is out of the catalog
    RESERVED, WRITING -> FREE     never named

A slot is ``generation << 32 | index``: one that was freed is never mistaken for its successor.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.tiers.nvme.lookup import KeyLookup

Int64s = NDArray[np.int64]

_INDEX = np.int64(0xFFFFFFFF)
_GENERATION_BITS = 30
_GROW_LEAST, _GROW_MOST = 256, 1 << 16
"""Rows by which the table grows at a time: bounded, as nothing else happens meanwhile."""


class FrameState(IntEnum):
    """A slot's state; see the module."""

    FREE = 0
    RESERVED = 1
    WRITING = 2
    LIVE = 3
    DOOMED = 4
    DYING = 5


class FrameTable:
    """All slots. Arrays are indexed by ``rows``; columns of FREE slots have no meaning."""

    def __init__(self) -> None:
        self.state: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.generation: NDArray[np.int32] = np.zeros(0, np.int32)
        self.segment: NDArray[np.int32] = np.zeros(0, np.int32)
        self.page: NDArray[np.int32] = np.zeros(0, np.int32)
        self.pages: NDArray[np.int32] = np.zeros(0, np.int32)
        self.charge: Int64s = np.zeros(0, np.int64)
        self.log_seq: Int64s = np.zeros(0, np.int64)
        self.age: Int64s = np.zeros(0, np.int64)
        self.namespace: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.payload_bytes: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.first: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.until_s: NDArray[np.float64] = np.zeros(0, np.float64)
        self.is_renamed: NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Its name does not say ``until_s`` yet."""
        self.key: NDArray[np.uint8] = np.zeros((0, 16), np.uint8)
        self.parent: NDArray[np.uint8] = np.zeros((0, 16), np.uint8)
        self.counts = [0] * len(FrameState)
        self.n_in_namespace: Counter[int] = Counter()
        """Slots that aren't free, nor only reserved, by namespace."""
        self._free: Int64s = np.zeros(0, np.int64)
        self._n_free = 0
        self._lookup = KeyLookup()

    def take(self, n: int) -> Int64s:
        """Rows of ``n`` free slots, now reserved."""
        if n > self._n_free:
            self._grow(n - self._n_free)
        rows = self._free[self._n_free - n : self._n_free][::-1].copy()
        self._n_free -= n
        self.state[rows] = FrameState.RESERVED
        self.counts[FrameState.FREE] -= n
        self.counts[FrameState.RESERVED] += n
        return rows

    def give(self, rows: Int64s) -> None:
        """Slots are free; their handles mean nothing any more."""
        self._count_namespaces(rows[self.state[rows] != FrameState.RESERVED], -1)
        self._forget(rows)
        self.move(rows, FrameState.FREE)
        self.generation[rows] = (self.generation[rows] + 1) & ((1 << _GENERATION_BITS) - 1)
        self._free[self._n_free : self._n_free + len(rows)] = rows
        self._n_free += len(rows)

    def move(self, rows: Int64s, state: FrameState) -> None:
        """Give slots another state. Each row at most once."""
        for old, n in enumerate(np.bincount(self.state[rows], minlength=len(FrameState)).tolist()):
            self.counts[old] -= n
        self.state[rows] = state
        self.counts[state] += len(rows)

    def know(self, rows: Int64s) -> None:
        """Keys and namespaces of slots that are being written now are set: ``find`` finds them until they are dead."""
        self._count_namespaces(rows, 1)
        self._lookup.add(self.key, rows)

    def bury(self, rows: Int64s) -> None:
        """Slots are dead, their names are not yet: they aren't found any more."""
        self._forget(rows)
        self.move(rows, FrameState.DYING)

    def find(self, keys: NDArray[np.uint8]) -> Int64s:
        """Rows of slots being written or live with these keys (uint8 [m, 16]); -1 where there is none."""
        return self._lookup.find(self.key, keys)

    def handles(self, rows: Int64s) -> Int64s:
        """Slots by row."""
        return (self.generation[rows].astype(np.int64) << 32) | rows

    def current(self, slots: Int64s) -> NDArray[np.bool_]:
        """Which slots aren't free, and not an earlier use of their row."""
        rows = slots & _INDEX
        known = (slots >= 0) & (rows < len(self.state))
        safe = np.where(known, rows, 0)
        if not len(self.state):
            return known
        known &= (self.generation[safe] == slots >> 32) & (self.state[safe] != FrameState.FREE)
        return known

    def rows(self, slots: Int64s) -> Int64s:
        """Rows of slots, each given once. Raises IntegrityError for one that is free, unknown or given twice."""
        current = self.current(slots)
        if not current.all():
            raise IntegrityError(f"NVMe slot {int(slots[~current][0])} is free or was never given")
        rows = slots & _INDEX
        if len(rows) > 1 and len(np.unique(rows)) != len(rows):
            raise IntegrityError("an NVMe slot is given twice in one call")
        return rows

    def rows_in(self, slots: Int64s, *states: FrameState) -> Int64s:
        """As ``rows``; all slots must be in one of the states."""
        rows = self.rows(slots)
        fits = np.isin(self.state[rows], states)
        if not fits.all():
            bad = int(slots[~fits][0])
            state = FrameState(int(self.state[bad & 0xFFFFFFFF])).name
            raise IntegrityError(f"NVMe slot {bad} is {state}, not {' or '.join(s.name for s in states)}")
        return rows

    def check(self) -> None:
        """Raises IntegrityError when counts, free list or lookup contradict the states."""
        counts = np.bincount(self.state, minlength=len(FrameState)).tolist()
        if counts != self.counts:
            raise IntegrityError(f"NVMe slots by state are {counts}, counted {self.counts}")
        named = np.flatnonzero((self.state != FrameState.FREE) & (self.state != FrameState.RESERVED))
        if self.n_in_namespace != Counter(self.namespace[named].tolist()):
            raise IntegrityError(f"NVMe slots by namespace aren't {self.n_in_namespace}")
        free = self._free[: self._n_free]
        if len(np.unique(free)) != counts[FrameState.FREE] or (self.state[free] != FrameState.FREE).any():
            raise IntegrityError("the list of free NVMe slots isn't that of the states")
        known = np.flatnonzero(np.isin(self.state, (FrameState.WRITING, FrameState.LIVE, FrameState.DOOMED)))
        if len(known) != len(self._lookup):
            raise IntegrityError(f"{len(self._lookup)} keys can be found, but {len(known)} slots have one")
        found = self.find(self.key[known])
        if (found < 0).any() or (self.key[np.maximum(found, 0)] != self.key[known]).any():
            raise IntegrityError("a key on NVMe isn't found")

    def _forget(self, rows: Int64s) -> None:
        known = rows[np.isin(self.state[rows], (FrameState.WRITING, FrameState.LIVE, FrameState.DOOMED))]
        if len(known):
            self._lookup.remove(self.key, known)

    def _count_namespaces(self, rows: Int64s, sign: int) -> None:
        for number, n in zip(*np.unique(self.namespace[rows], return_counts=True), strict=True):
            self.n_in_namespace[int(number)] += sign * int(n)
            if not self.n_in_namespace[int(number)]:
                del self.n_in_namespace[int(number)]

    def _grow(self, least: int) -> None:
        old = len(self.state)
        more = max(least, min(max(old, _GROW_LEAST), _GROW_MOST))
        for column in vars(self).values():
            if isinstance(column, np.ndarray):
                # In place: large arrays are moved by page tables, not copied. Nobody keeps views of columns.
                column.resize((old + more, *column.shape[1:]), refcheck=False)
        self._free[self._n_free : self._n_free + more] = np.arange(old + more - 1, old - 1, -1)
        self._n_free += more
        self.counts[FrameState.FREE] += more
