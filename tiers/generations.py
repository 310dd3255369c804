"""A counter per slot that readers see: it moves whenever a slot is handed out or given up.

A reader that copied a slot compares the counter before and after; the two differ when the bytes may have
been another block's. The counters lie in one memfd of their own, sparse, which clients can map read-only
(enforced by the kernel). A counter never goes back, also when its place serves a slot of another region.
"""

from __future__ import annotations

import os
from bisect import insort

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.native import Mapping
from kvstore.tiers import memfd

_COUNTER_BYTES = 8


class RangeSpace:
    """First-fit ranges of ``[0, limit)``; free neighbours join again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[tuple[int, int]] = [(0, limit)]

    def take(self, n: int) -> int:
        """Start of the lowest free range of ``n``. Raises IntegrityError when there is none."""
        for i, (start, length) in enumerate(self._free):
            if length >= n:
                if length == n:
                    del self._free[i]
                else:
                    self._free[i] = (start + n, length - n)
                return start
        raise IntegrityError(f"no {n} places in a row are free of {self.limit}; ranges were not given back")

    def give(self, start: int, n: int) -> None:
        """Free a taken range."""
        insort(self._free, (start, n))
        joined: list[tuple[int, int]] = []
        for begin, length in self._free:
            if joined and joined[-1][0] + joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((begin, length))
        self._free = joined

    @property
    def free(self) -> int:
        """Places not taken."""
        return sum(length for _, length in self._free)


class Generations:
    """The counters of all slots. ``values`` is uint64 ``[n]``, the daemon's own mapping."""

    def __init__(self, most_slots: int) -> None:
        """Room for ``most_slots`` slots at once, in ranges of any length.

        First fit never needs more than ``most * (2 + log2(longest))`` places (Robson 1977); the file is
        sparse, so that unused room costs nothing.
        """
        n_places = most_slots * (2 + most_slots.bit_length())
        size_bytes = -(-n_places * _COUNTER_BYTES // memfd.PAGE_BYTES) * memfd.PAGE_BYTES
        self.ranges = RangeSpace(n_places)
        self.fd = memfd.create("kvstore-generations", size_bytes)
        self.size_bytes = size_bytes
        try:
            mapping = Mapping(self.fd, size_bytes, writable=True, inherit=False)
            self.values: NDArray[np.uint64] = mapping.array().view(np.uint64)
            memfd.seal_read_only(self.fd)
        except OSError:
            os.close(self.fd)
            raise
        self._closed = False

    def bump(self, places: NDArray[np.int64]) -> None:
        """Move these counters on; ``places`` has no place twice."""
        self.values[places] += np.uint64(1)

    def close(self) -> None:
        """Close the descriptor and unmap. Idempotent."""
        if not self._closed:
            self._closed = True
            self.values = np.zeros(0, np.uint64)
            os.close(self.fd)
