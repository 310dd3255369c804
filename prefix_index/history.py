"""Which blocks left lately, and why: a bounded memory of what is not there any more.

Leaving is on the path of every eviction, asking is rare. So what leaves is put aside as it comes, batch by batch, and
moved into a ring of arrays some hundreds of batches at a time; a question looks at the whole ring, once, with vectors
(under a millisecond for 262,144 entries), in place of a hash table that each eviction would have to keep in order.

A block leaves with its last copy. The newest entry of a key counts. One entry takes ``ENTRY_BYTES``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import HIDDEN, At, BlockTable
from kvstore.prefix_index.hint_columns import HintColumns

FLUSH_BATCHES, FLUSH_ENTRIES = 512, 1 << 14
"""So many batches, or entries in them, wait for their place in the ring."""
CLEARED_SHARE = 4
"""One clearing takes no more than this part of the ring, so that it does not drive everything else out."""


class Left(StrEnum):
    """Why a block is not there: it left, or it was to be stored and was not.

    EVICTED: the policy gave up its last copy. UNWANTED: as well, after a request had said that it is not used again.
    EXPIRED: its time was over. CORRUPT: its frame was damaged or could not be read. CLEARED: its namespace was.
    NO_ROOM: the DRAM tier was full of blocks in use. QUOTA: its tenant's part of that tier was. TOO_LARGE: the tier has
    not room for one block of this size, TOO_LONG: for all that was to be stored at once. DECLINED: the policy took it
    for worth less than what would have had to go. GENERATED: it holds generated tokens, which were not to be stored.
    UNCOMMITTED: a client had reserved it, and its right ended before it was committed.
    """

    EVICTED = "evicted"
    UNWANTED = "unwanted"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    CLEARED = "cleared"
    NO_ROOM = "no_room"
    QUOTA = "quota"
    TOO_LARGE = "too_large"
    TOO_LONG = "too_long"
    DECLINED = "declined"
    GENERATED = "generated"
    UNCOMMITTED = "uncommitted"


class Unwritten(StrEnum):
    """Why a block was not written to NVMe when it was to be.

    QUEUE_FULL: too much waited to be written. SUSPENDED: the disk was full, failing or stuck. UNSUITABLE: blocks of the
    namespace can't lie there. DECLINED: they would have been the first to go there.
    """

    QUEUE_FULL = "queue_full"
    SUSPENDED = "suspended"
    UNSUITABLE = "unsuitable"
    DECLINED = "declined"


class Departure(NamedTuple):
    """How a block left. ``tier``: of its last copy, -1 if it had none. ``idle_s``: from its last use to then, NaN if
    it was not used. ``unwritten``: why it was not written to NVMe, as far as that was tried."""

    left: Left
    tier: int
    ago_s: float
    idle_s: float
    unwritten: Unwritten | None


_LEFT, _UNWRITTEN = tuple(Left), tuple(Unwritten)
_CODE = {left: code for code, left in enumerate(_LEFT)}
_COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("low", np.uint64),
    ("high", np.uint64),
    ("at_s", np.float64),
    ("idle_s", np.float32),
    ("left", np.uint8),
    ("tier", np.int8),
    ("unwritten", np.uint8),
)
ENTRY_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in _COLUMNS)


class _Batch(NamedTuple):
    keys: NDArray[np.uint8]
    at_s: float
    last_use_s: NDArray[np.float64]
    left: NDArray[np.uint8] | int
    tier: int
    unwritten: NDArray[np.uint8] | int


class History:
    """The memory of one index. One thread uses it; nothing here blocks."""

    def __init__(self, table: BlockTable, hints: HintColumns) -> None:
        self._table = table
        self._hints = hints
        self.capacity = 0
        """Entries that are kept at most."""
        self._now_s: Callable[[], float] = float
        self._knows_idle = True
        self._began_s = 0.0
        self._ring: dict[str, NDArray[Any]] = {}
        self._n_pushed = 0
        self._waiting: list[_Batch] = []
        self._n_waiting = 0
        self._skipped = np.zeros(0, np.uint8)
        self._skipped_generation = np.zeros(0, np.uint32)

    def begin(self, capacity: int, now_s: Callable[[], float], *, knows_idle: bool = True) -> None:
        """Remember from now on what leaves: the last ``capacity`` blocks; 0 = nothing.

        Call it once. ``knows_idle``: last uses in the table are by ``now_s``, and not by a clock of the callers' own.
        """
        self.capacity = capacity
        self._now_s, self._knows_idle, self._began_s = now_s, knows_idle, now_s()
        self._ring = {name: np.zeros(capacity, dtype) for name, dtype in _COLUMNS}

    def __bool__(self) -> bool:
        """Whether anything is remembered."""
        return self.capacity > 0

    def __len__(self) -> int:
        """Entries that are kept."""
        return min(self._n_pushed + self._n_waiting, self.capacity)

    @property
    def reach_s(self) -> float:
        """What left in the last so many seconds is remembered: all since the start, or since the oldest entry."""
        if not self:
            return 0.0
        self._flush()
        if self._n_pushed <= self.capacity:
            return self._now_s() - self._began_s
        return self._now_s() - float(self._ring["at_s"][self._n_pushed % self.capacity])

    @property
    def has_forgotten(self) -> bool:
        """Whether entries had to make room for others."""
        return self._n_pushed + self._n_waiting > self.capacity

    # What happens --------------------------------------------------------------------------------

    def evicted(self, at: At, keys: NDArray[np.uint8], tier: int) -> None:
        """These blocks, with these keys, have lost their last copy to eviction. O(1) vector steps.

        Hidden ones have left already, here and in ``lost``.
        """
        if self._table.n_hidden:
            found = self._table.state[at] != HIDDEN
            at, keys = at[found], keys[found]
        left: NDArray[np.uint8] | int = _CODE[Left.EVICTED]
        if self._hints.is_used:
            left = np.full(len(at), left, np.uint8)
            left[self._hints.was_unwanted(at)] = _CODE[Left.UNWANTED]
            left[self._hints.has_run_out(at)] = _CODE[Left.EXPIRED]
        self._push(keys, self._table.last_use_s[at], left, tier, self._unwritten(at))

    def lost(self, at: At, left: Left, tier: int) -> None:
        """These blocks have lost their last copy otherwise."""
        if not self:
            return
        at = at[self._table.state[at] != HIDDEN]
        if len(at):
            self._push(self._table.key[at], self._table.last_use_s[at], _CODE[left], tier, 0)

    def not_stored(self, keys: NDArray[np.uint8], left: Left) -> None:
        """Blocks with these keys, uint8 [n, 16], were to be stored and were not. Keeps ``keys``: never change it."""
        if self and len(keys):
            self._push(keys, np.full(len(keys), np.nan), _CODE[left], -1, 0)

    def not_written(self, at: At, why: Unwritten) -> None:
        """These blocks were to be written to NVMe and were not."""
        if not self:
            return
        n, known = self._table.capacity_blocks, len(self._skipped)
        if known < n:
            self._skipped = np.concatenate((self._skipped, np.zeros(n - known, np.uint8)))
            grown = np.zeros(n - known, np.uint32)
            self._skipped_generation = np.concatenate((self._skipped_generation, grown))
        self._skipped[at] = 1 + _UNWRITTEN.index(why)
        self._skipped_generation[at] = self._table.generation[at]

    # Questions -----------------------------------------------------------------------------------

    def of(self, keys: NDArray[np.uint8]) -> list[Departure | None]:
        """How each of the blocks with these keys, uint8 [n, 16], left last; None for what nothing is known of.

        Looks at the whole ring, once.
        """
        self._flush()
        low, high = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2).T
        at = self._candidates(low)
        lows, low_ranks = np.unique(low, return_inverse=True)
        highs, high_ranks = np.unique(high, return_inverse=True)
        newest: dict[int, int] = {}
        if len(at):
            low_at, at = _placed(lows, self._ring["low"][at], at)
            high_at, same = _placed(highs, self._ring["high"][at], np.arange(len(at)))
            codes = low_at[same] * len(highs) + high_at
            # Of several the last one stays: the newest.
            newest = dict(zip(codes.tolist(), at[same].tolist(), strict=True))
        now_s = self._now_s()
        entries = [newest.get(code, -1) for code in (low_ranks * len(highs) + high_ranks).reshape(-1).tolist()]
        return [self._departure(entry, now_s) if entry >= 0 else None for entry in entries]

    def _departure(self, entry: int, now_s: float) -> Departure:
        ring = self._ring
        code = int(ring["unwritten"][entry])
        return Departure(
            _LEFT[ring["left"][entry]],
            int(ring["tier"][entry]),
            max(now_s - float(ring["at_s"][entry]), 0.0),
            float(ring["idle_s"][entry]),
            _UNWRITTEN[code - 1] if code else None,
        )

    def _candidates(self, low: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Entries that may have one of these lower halves of keys, oldest first."""
        n = min(self._n_pushed, self.capacity)
        if not n or not len(low):
            return np.empty(0, np.intp)
        wanted = np.zeros(1 << 16, np.bool_)
        wanted[low & np.uint64(0xFFFF)] = True
        at = np.flatnonzero(wanted[(self._ring["low"][:n] & np.uint64(0xFFFF)).astype(np.uint16)])
        head = self._n_pushed % self.capacity if self._n_pushed > self.capacity else 0
        cut = int(np.searchsorted(at, head))
        return np.concatenate((at[cut:], at[:cut]))

    # Own -----------------------------------------------------------------------------------------

    def _unwritten(self, at: At) -> NDArray[np.uint8] | int:
        if not len(self._skipped):
            return 0
        known = at < len(self._skipped)
        inside = np.where(known, at, 0)
        known &= self._skipped_generation[inside] == self._table.generation[at]
        return np.where(known, self._skipped[inside], 0).astype(np.uint8)

    def _push(
        self,
        keys: NDArray[np.uint8],
        last_use_s: NDArray[np.float64],
        left: NDArray[np.uint8] | int,
        tier: int,
        unwritten: NDArray[np.uint8] | int,
    ) -> None:
        self._waiting.append(_Batch(keys, self._now_s(), last_use_s, left, tier, unwritten))
        self._n_waiting += len(keys)
        if len(self._waiting) >= FLUSH_BATCHES or self._n_waiting >= FLUSH_ENTRIES:
            self._flush()

    def _flush(self) -> None:
        """Move what waits into the ring."""
        batches, self._waiting = self._waiting, []
        if not batches:
            return
        sizes = np.array([len(batch.keys) for batch in batches])
        halves = np.concatenate([batch.keys for batch in batches]).view(np.uint64)
        at_s = np.repeat([batch.at_s for batch in batches], sizes)
        used_s = np.concatenate([batch.last_use_s for batch in batches]) if self._knows_idle else np.nan
        columns: dict[str, NDArray[np.generic]] = {
            "low": halves[:, 0],
            "high": halves[:, 1],
            "at_s": at_s,
            "idle_s": np.maximum(at_s - used_s, 0.0),
            "left": _together([batch.left for batch in batches], sizes),
            "tier": np.repeat([batch.tier for batch in batches], sizes),
            "unwritten": _together([batch.unwritten for batch in batches], sizes),
        }
        n, self._n_waiting = self._n_waiting, 0
        skip = max(n - self.capacity, 0)
        first = (self._n_pushed + skip) % self.capacity
        split = min(n - skip, self.capacity - first)
        for name, column in columns.items():
            ring = self._ring[name]
            ring[first : first + split] = column[skip : skip + split]
            ring[: n - skip - split] = column[skip + split :]
        self._n_pushed += n


def _placed(
    wanted: NDArray[np.uint64], values: NDArray[np.uint64], at: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Of the values that are among the wanted ones, which are sorted, the place there, and what ``at`` has for them."""
    places = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
    found = wanted[places] == values
    return places[found], at[found]


def _together(parts: list[NDArray[np.uint8] | int], sizes: NDArray[np.intp]) -> NDArray[np.uint8]:
    """One value for each entry, of those that batches have for all of theirs or for each."""
    if all(isinstance(part, int) for part in parts):
        return np.repeat(np.array(parts, np.uint8), sizes)
    return np.concatenate(
        [np.broadcast_to(np.asarray(part, np.uint8), n) for part, n in zip(parts, sizes, strict=True)]
    )
