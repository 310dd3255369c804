"""Runs: blocks of one path that the same request used last and that have been used equally often, as arrays by run."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ages import Floats, Ints, age_buckets
from kvstore.prefix_index.policies.hazard_features import Packed
from kvstore.prefix_index.policies.hazard_model import Episodes, Model
from kvstore.prefix_index.policies.hazard_worth import WorthTable, places

_FIRST_ROOM = 4096
TIE = 2.0**-40
"""What one request more adds to a rank: of equal worth the one used longer ago is below."""


class Runs:
    """A growable structure of arrays. Read a field afresh for each use: growing replaces the arrays.

    request   int64    number of the request that used the blocks last, ascending with time
    used_s    float64  policy time of that
    first_s   float64  when they were used first
    blocks    int64    how many are watched: in the table, or gone and remembered; 0 for a run that is free
    uses      int64    how often they have been used
    turn      int64    of the request in its conversation
    strata    uint8
    features  uint64   packed
    counts    bool     whether what becomes of it may be learnt from
    unbroken  bool     whether all before and in it would have been found under LRU
    priority  float64  that was said, 0 where none was
    cell      int64    its ``place`` among worths by the present model's betas,
    young     float64  the rest of their sum up to the model's split,
    old       float64  and of that beyond

    ``cells`` has the same fields as memoryviews, by which one run's are read and written ten times faster.
    """

    _FIELDS = (
        ("request", np.int64), ("used_s", np.float64), ("first_s", np.float64), ("blocks", np.int64),
        ("uses", np.int64), ("turn", np.int64), ("strata", np.uint8), ("features", np.uint64), ("counts", np.bool_),
        ("unbroken", np.bool_), ("priority", np.float64), ("cell", np.int64), ("young", np.float64),
        ("old", np.float64),
    )  # fmt: skip

    request: Ints
    used_s: Floats
    first_s: Floats
    blocks: Ints
    uses: Ints
    turn: Ints
    strata: NDArray[np.uint8]
    features: Packed
    counts: NDArray[np.bool_]
    unbroken: NDArray[np.bool_]
    priority: Floats
    cell: Ints
    young: Floats
    old: Floats

    def __init__(self) -> None:
        self._n = 0
        self._free = array("q")
        self.cells = SimpleNamespace()
        for name, dtype in self._FIELDS:
            self._set(name, np.zeros(0, dtype))

    @property
    def n_known(self) -> int:
        """Runs are below this number, free ones among them."""
        return self._n

    @property
    def n(self) -> int:
        """Runs that are not free."""
        return self._n - len(self._free)

    def reserve(self, n: int) -> None:
        """``allocate`` may be called ``n`` times without growing."""
        if self._n + n - len(self._free) > len(self.blocks):
            room = max(_FIRST_ROOM, 2 * len(self.blocks), self._n + n)
            for name, dtype in self._FIELDS:
                longer = np.zeros(room, dtype)
                longer[: self._n] = getattr(self, name)[: self._n]
                self._set(name, longer)

    def allocate(self) -> int:
        """A free run; the caller fills every field. There must be room: see ``reserve``."""
        if self._free:
            return self._free.pop()
        self._n += 1
        return self._n - 1

    def take_away(self, run: int, n_blocks: int) -> None:
        """So many blocks are not of this run any more; a run without blocks is free."""
        left = self.cells.blocks[run] - n_blocks
        self.cells.blocks[run] = max(left, 0)
        if left <= 0:
            self._free.append(run)

    def live(self) -> Ints:
        """All runs that are not free."""
        return np.flatnonzero(self.blocks[: self._n])

    def worth(self, at: Ints | slice, table: WorthTable, now_s: float) -> Floats:
        """Ranks of these runs; of equal worth the one used longer ago is below."""
        buckets = age_buckets(now_s - self.used_s[at])
        ranks = table.look_up(self.cell[at], self.young[at], self.old[at], buckets)
        ranks += self.request[at] * TIE
        return ranks

    def set_model(self, model: Model) -> None:
        """A new model's betas are in force."""
        known = slice(self._n)
        sums = model.thetas(self.features[known])
        self.cell[known], self.young[known], self.old[known] = places(self.strata[known], *sums)

    def until_now(self, now_s: float, most: int) -> Episodes:
        """All runs as they stand: not used up to their age. Of more than ``most`` every second, third, ..., which then
        stand for the others."""
        live = self.live()
        live = live[self.counts[live]]
        step = -(-len(live) // most)
        if step > 1:
            live = live[::step]
        return Episodes(
            self.strata[live], self.features[live], np.maximum(now_s - self.used_s[live], 0.0),
            np.asarray(self.blocks[live] * max(step, 1), np.float64), np.zeros(len(live), np.bool_),
        )  # fmt: skip

    def _set(self, name: str, column: NDArray[np.generic]) -> None:
        setattr(self, name, column)
        setattr(self.cells, name, column.data)
