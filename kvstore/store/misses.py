"""Counts lookups that were no whole hits by what became of the first block that they lack.

A lookup only notes the key of that block, and what the tree says of it. Whether and why such a block left is looked up
for all that was noted together, once a second at most, as one look through what is remembered takes as long for one key
as for some hundreds (see ``History``).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvstore.lease import Reservation
from kvstore.metrics import Counters
from kvstore.prefix_index.block_table import DRAM, At
from kvstore.prefix_index.history import Departure, Left
from kvstore.prefix_index.index import PrefixIndex
from kvstore.store.being_written import is_written
from kvstore.store.outcome import Outcome
from kvstore.store.requests import Prompt

NOTED_MAX = 256
"""So many lookups are looked into together; more of one second count as ``UNSAMPLED``."""
SETTLE_S = 1.0
RESERVATIONS_MAX = 256
"""Among more it is not looked for who writes the block."""


class Ending(StrEnum):
    """What ended a hit, if no block that had left (see ``Left``).

    Never stored as far as is remembered: NEW (nothing of the prompt is stored), DIFFERS (what is stored goes on
    otherwise) or LONGER (nothing stored goes on). BEING_WRITTEN: a client has reserved it. NOT_LOADED: the block is
    stored, and was not in DRAM in time. PARTS: the blocks are stored, what some groups of a hybrid model need is not.
    UNSAMPLED: there were too many, or too much, to look at.
    """

    NEW = "new"
    DIFFERS = "differs"
    LONGER = "longer"
    BEING_WRITTEN = "being_written"
    NOT_LOADED = "not_loaded"
    PARTS = "parts"
    UNSAMPLED = "unsampled"


class _Noted(NamedTuple):
    key: bytes
    otherwise: Ending
    at_s: float


def counter_of(ending: Ending | Left, tier: int = DRAM) -> str:
    """The name of its counter; of evicted blocks there is one for each tier."""
    if ending is Left.EVICTED:
        return f"missed_lookups_{ending}_{'dram' if tier == DRAM else 'nvme'}"
    return f"missed_lookups_{ending}"


class Misses:
    """Of one store. Called on its thread only."""

    def __init__(self, index: PrefixIndex, counters: Counters, reservations: Iterable[Reservation]) -> None:
        self._index = index
        self._counters = counters
        self._reservations = reservations
        self._noted: list[_Noted] = []
        self._settled_at_s = 0.0
        for ending in (*Ending, *Left):
            for tier in range(2 if ending is Left.EVICTED else 1):
                counters.add(counter_of(ending, tier), 0)

    def note(self, prompt: Prompt, ids: At, outcome: Outcome, now_s: float) -> None:
        """A prompt was looked up, whose leading blocks ``ids`` are stored. Some microseconds."""
        n = outcome.n_blocks
        if n >= outcome.n_rows or outcome.n_tokens >= prompt.n_tokens:
            return
        if outcome.n_unused:
            self._count(Ending.NOT_LOADED)
        elif not 0 < outcome.max_blocks <= n:
            self._look(prompt, ids, n, now_s)

    def settle(self, now_s: float, *, at_once: bool = False) -> None:
        """Look into what was noted, if that is a second ago or ``at_once``. Up to a millisecond or so."""
        if not self._noted or (now_s - self._settled_at_s < SETTLE_S and not at_once):
            return
        self._settled_at_s = now_s
        noted, self._noted = self._noted, []
        keys = np.frombuffer(b"".join(each.key for each in noted), np.uint8).reshape(len(noted), -1)
        for each, departure in zip(noted, self._index.history.of(keys), strict=True):
            if departure is None or self._is_later(departure, each, now_s):
                self._count(each.otherwise)
            else:
                self._counters.add(counter_of(departure.left, departure.tier))

    def _look(self, prompt: Prompt, ids: At, n: int, now_s: float) -> None:
        if len(ids) > n:
            self._count(Ending.PARTS)
        elif self._index.hints.has_ttl and len(self._index.match(prompt.root_key, prompt.path).ids) > n:
            self._counters.add(counter_of(Left.EXPIRED))
        elif len(self._noted) >= NOTED_MAX:
            self._count(Ending.UNSAMPLED)
        elif (written := self._is_written(prompt, n)) is not False:
            self._count(Ending.BEING_WRITTEN if written else Ending.UNSAMPLED)
        else:
            parent_key = self._index.table.key[ids[n - 1]].tobytes() if n else prompt.root_key
            key = prompt.path.chain(parent_key, n, n + 1)[0].tobytes()
            self._noted.append(_Noted(key, self._never_stored(ids, n), now_s))

    def _never_stored(self, ids: At, n: int) -> Ending:
        if not n:
            return Ending.NEW
        return Ending.DIFFERS if self._index.table.n_followers(int(ids[n - 1])) else Ending.LONGER

    def _is_written(self, prompt: Prompt, row: int) -> bool | None:
        reservations = list(islice(self._reservations, RESERVATIONS_MAX + 1))
        return len(reservations) <= RESERVATIONS_MAX and is_written(reservations, prompt, row)

    @staticmethod
    def _is_later(departure: Departure, noted: _Noted, now_s: float) -> bool:
        """Whether the block left after the lookup, which had stored it then."""
        return now_s - departure.ago_s > noted.at_s

    def _count(self, ending: Ending) -> None:
        self._counters.add(counter_of(ending))
