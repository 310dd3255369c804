"""Runs: blocks of one path that the same request used last and that have been used equally often, as arrays by run."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ages import Floats, Ints, age_buckets
from kvstore.prefix_index.policies.hazard_features import N_FEATURES
from kvstore.prefix_index.policies.hazard_model import Episodes, Model
from kvstore.prefix_index.policies.hazard_worth import WorthTable

_FIRST_ROOM = 4096
_TIE = 2.0**-40


class Runs:
    """A growable structure of arrays. Read a field afresh for each use: growing replaces the arrays.

    request   int64    number of the request that used the blocks last, ascending with time
    used_s    float64  policy time of that
    first_s   float64  when they were used first
    blocks    int64    how many are watched: in the table, or gone and remembered; 0 for a run that is free
    uses      int64    how often they have been used
    turn      int64    of the request in its conversation
    strata    int64
    features  int64    [., N_FEATURES]
    counts    bool     whether what becomes of it may be learnt from
    unbroken  bool     whether all before and in it would have been found under LRU
    thetas    float64  [2, .], of the present model
    """

    _FIELDS = (
        ("request", np.int64), ("used_s", np.float64), ("first_s", np.float64), ("blocks", np.int64),
        ("uses", np.int64), ("turn", np.int64), ("strata", np.int64), ("counts", np.bool_), ("unbroken", np.bool_),
    )  # fmt: skip

    request: Ints
    used_s: Floats
    first_s: Floats
    blocks: Ints
    uses: Ints
    turn: Ints
    strata: Ints
    counts: NDArray[np.bool_]
    unbroken: NDArray[np.bool_]

    def __init__(self) -> None:
        self._n = 0
        self._free = array("q")
        for name, dtype in self._FIELDS:
            setattr(self, name, np.zeros(0, dtype))
        self.features: Ints = np.zeros((0, N_FEATURES), np.int64)
        self.thetas: Floats = np.zeros((2, 0))

    @property
    def n(self) -> int:
        """Runs that are not free."""
        return self._n - len(self._free)

    def allocate(self, n: int) -> Ints:
        """``n`` free runs; the caller fills every field."""
        reused = min(n, len(self._free))
        at = np.empty(n, np.int64)
        if reused:
            at[:reused] = self._free[-reused:]
            del self._free[-reused:]
        fresh = n - reused
        if self._n + fresh > len(self.blocks):
            self._grow(max(_FIRST_ROOM, 2 * len(self.blocks), self._n + fresh))
        at[reused:] = np.arange(self._n, self._n + fresh)
        self._n += fresh
        return at

    def take_away(self, at: Ints, n_blocks: Ints) -> None:
        """So many blocks of these runs (distinct) are not of them any more; runs without blocks are free."""
        left = self.blocks[at] - n_blocks
        self.blocks[at] = left
        ended = at[left <= 0]
        if len(ended):
            self.blocks[ended] = 0
            self._free.frombytes(ended.tobytes())

    def live(self) -> Ints:
        """All runs that are not free."""
        return np.flatnonzero(self.blocks[: self._n])

    def worth(self, at: Ints, table: WorthTable, now_s: float) -> Floats:
        """Ranks of these runs; of equal worth the one used longer ago is below."""
        buckets = age_buckets(now_s - self.used_s[at])
        ranks: Floats = table.look_up(self.strata[at], self.thetas[:, at], buckets) + self.request[at] * _TIE
        return ranks

    def set_model(self, model: Model) -> None:
        """A new model's betas are in force."""
        self.thetas[:, : self._n] = model.thetas(self.features[: self._n])

    def until_now(self, now_s: float, most: int) -> Episodes:
        """All runs as they stand: not used up to their age. Of more than ``most`` every second, third, ..., which then
        stand for the others."""
        live = self.live()
        live = live[self.counts[live]]
        step = -(-len(live) // most)
        if step > 1:
            live = live[::step]
        return Episodes(
            self.strata[live].astype(np.uint8), self.features[live].astype(np.uint8),
            np.maximum(now_s - self.used_s[live], 0.0),
            np.asarray(self.blocks[live] * max(step, 1), np.float64), np.zeros(len(live), np.bool_),
        )  # fmt: skip

    def _grow(self, room: int) -> None:
        n = self._n
        for name, dtype in self._FIELDS:
            new = np.zeros(room, dtype)
            new[:n] = getattr(self, name)[:n]
            setattr(self, name, new)
        features, thetas = np.zeros((room, N_FEATURES), np.int64), np.zeros((2, room))
        features[:n], thetas[:, :n] = self.features[:n], self.thetas[:, :n]
        self.features, self.thetas = features, thetas
