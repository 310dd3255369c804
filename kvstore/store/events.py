"""What comes to tiers and leaves them, in order and numbered, for whoever watches.

Nothing is recorded while nobody has asked for a while; a block then costs nothing. Else each change of the index adds
one batch of arrays to a ring of a bounded number of events: a watcher that falls behind is told how many it lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.copies import Loss
from kvstore.prefix_index.index import PrefixIndex

EVENTS_MAX = 1 << 16
"""Events that are kept: some 4 MiB."""
IDLE_S = 60.0
"""So long after the last question recording goes on."""


class Kind(StrEnum):
    """STORED: the block can be found from now on. MOVED: it has a copy in this tier too. REMOVED: it had one."""

    STORED = "stored"
    MOVED = "moved"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one moment and kind, numbered ``first_seq``, ``first_seq + 1``, ...; arrays ``[n]``.

    ``tier``: a number of the block table. ``keys`` and ``parents`` are uint8 [n, 16]; ``parents`` and ``row_bytes`` (0
    for a whole row) come with blocks that are stored or moved, ``last`` (the block has no copy left) with removals.
    """

    first_seq: int
    time_s: float
    kind: Kind
    tier: int
    reason: Loss | None
    namespaces: NDArray[np.uint32]
    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8] | None = None
    row_bytes: NDArray[np.uint32] | None = None
    last: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Events:
    """What follows a number: batches, of the first of which ``skip`` events are older, and where to go on.

    ``n_lost`` more came and were not kept; with ``gap`` others before them were not recorded at all.
    """

    batches: list[Batch]
    skip: int
    next_seq: int
    n_lost: int
    gap: bool


class EventLog:
    """The ring. Called on the store's thread only; see ``prefix_index.copies.Witness`` for what the index tells it."""

    def __init__(self, index: PrefixIndex, unix_s: Callable[[], float] = time.time) -> None:
        self._index = index
        self._unix_s = unix_s
        self._batches: deque[Batch] = deque()
        self._n_kept = 0
        self._next_seq = 1
        self._since_seq = 1
        """Recording began with this number."""
        self._asked_at_s = 0.0
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def recording(self) -> bool:
        """Whether somebody watches, or did a moment ago."""
        return self._index.witness is self

    @property
    def last_seq(self) -> int:
        """The number of the last event so far."""
        return self._next_seq - 1

    def watched(self, now_s: float) -> None:
        """Somebody asks: record from now on, for a while."""
        self._asked_at_s = now_s
        if not self.recording:
            self._index.witness = self
            self._next_seq += 1  # whoever has an older number has missed what nobody recorded
            self._since_seq = self._next_seq

    def tick(self, now_s: float) -> None:
        """Stop recording if nobody has asked for long enough, and nobody waits."""
        if self.recording and not self._waiting and now_s - self._asked_at_s > IDLE_S:
            self._index.witness = None
            self._batches.clear()
            self._n_kept = 0

    def after(self, seq: int, most: int) -> Events:
        """Up to about ``most`` events that follow number ``seq``, whole batches of them."""
        gap = seq < self._since_seq - 1 or seq > self.last_seq
        if seq > self.last_seq:  # of another daemon, or never given
            seq = self.last_seq
        seq = max(seq, self._since_seq - 1)
        oldest = self._batches[0].first_seq if self._batches else self._next_seq
        n_lost = max(oldest - seq - 1, 0)
        seq += n_lost
        batches: list[Batch] = []
        n, skip = 0, 0
        for batch in self._batches:
            if batch.first_seq + len(batch) - 1 <= seq:
                continue
            if n >= most:
                break
            if not batches:
                skip = seq + 1 - batch.first_seq
            batches.append(batch)
            n += len(batch)
        last = batches[-1].first_seq + len(batches[-1]) - 1 if batches else seq
        return Events(batches, skip, last, n_lost, gap)

    def on_event(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call this with the next event, once. Returns what to call if it is not wanted any more."""
        self._waiting[callback] = None
        return lambda: self._forget(callback)

    def _forget(self, callback: Callable[[], None]) -> None:
        self._waiting.pop(callback, None)

    # What the index tells ------------------------------------------------------------------------

    def gained(self, at: At, tier: int, *, first: NDArray[np.bool_]) -> None:
        """Blocks have a copy in a tier now; ``first``: which had none anywhere before."""
        is_block = self._index.is_block(at)
        at, first = at[is_block], first[is_block]
        for kind, which in ((Kind.STORED, first), (Kind.MOVED, ~first)):
            if not which.any():
                continue
            ids = at[which].astype(np.uint32)
            self._add(
                kind, tier, None, ids, parents=self._index.parent_keys(ids), row_bytes=self._index.short_row_bytes(ids)
            )

    def lost(self, at: At, tier: int, reason: Loss, last: NDArray[np.bool_]) -> None:
        """Blocks have lost their copy in a tier; ``last``: which have none left."""
        is_block, hints = self._index.is_block(at), self._index.hints
        parts = [(reason, is_block)]
        if reason is Loss.EVICTED and hints.has_ttl:
            expired = hints.has_run_out(at)
            parts = [(reason, is_block & ~expired), (Loss.EXPIRED, is_block & expired)]
        for why, which in parts:
            if which.any():
                self._add(Kind.REMOVED, tier, why, at[which], last=last[which])

    def _add(
        self,
        kind: Kind,
        tier: int,
        reason: Loss | None,
        at: At,
        parents: NDArray[np.uint8] | None = None,
        row_bytes: NDArray[np.uint32] | None = None,
        last: NDArray[np.bool_] | None = None,
    ) -> None:
        table = self._index.table
        batch = Batch(
            self._next_seq, self._unix_s(), kind, tier, reason,
            table.namespace[at], table.key[at], parents, row_bytes, last,
        )  # fmt: skip
        self._batches.append(batch)
        self._next_seq += len(batch)
        self._n_kept += len(batch)
        while self._n_kept > EVENTS_MAX and len(self._batches) > 1:
            self._n_kept -= len(self._batches.popleft())
        waiting, self._waiting = self._waiting, {}
        for callback in waiting:
            callback()
