"""What callers have said about blocks: one array per hint, by block id, so that policies can work on vectors.

A record belongs to one life of an id: to the block and the generation it was made for. Nothing is kept, and nothing
done, before the first hint; of blocks that nobody said anything about there is no record.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.hints import Hints
from kvstore.prefix_index.block_table import At, BlockTable

SESSIONS_MAX = 65536
"""Sessions whose blocks are known as theirs; of more, those heard of longest ago are forgotten."""
REQUEST_TYPES_MAX = 1024
"""Kinds of request that are told apart; more are recorded as none."""
SCAN_BLOCKS = 65536
"""Blocks looked at in one call for those whose time is over."""

_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("generation", np.uint32),
    ("noted_s", np.float64),
    ("session", np.uint32),
    ("is_shared", np.bool_),
    ("request_type", np.uint16),
    ("turn", np.uint16),
    ("expected_reuse", np.float32),
    ("priority", np.int8),
    ("no_reuse", np.bool_),
    ("expires_s", np.float64),
    ("is_overdue", np.bool_),
    ("is_moved", np.bool_),
)


class HintColumns:
    """The hints of one block table's blocks. One thread uses them; nothing here blocks.

    generation       uint32   of the block when it was noted; another one: no record
    noted_s          float64  policy time of the last request with hints that used it
    session          uint32   number of that request's session, 0 for none
    is_shared        bool     others have used it too, as far as is known
    request_type     uint16   number of the kind of request, 0 for none
    turn             uint16   0 for none
    expected_reuse   float32  0 for none
    priority         int8     0 for none
    no_reuse         bool
    expires_s        float64  the clock's time from which on it is a miss; inf for never
    is_overdue       bool     that time has been acted upon
    is_moved         bool     that time is another since ``take_moved`` was called last
    """

    generation: NDArray[np.uint32]
    noted_s: NDArray[np.float64]
    session: NDArray[np.uint32]
    is_shared: NDArray[np.bool_]
    request_type: NDArray[np.uint16]
    turn: NDArray[np.uint16]
    expected_reuse: NDArray[np.float32]
    priority: NDArray[np.int8]
    no_reuse: NDArray[np.bool_]
    expires_s: NDArray[np.float64]
    is_overdue: NDArray[np.bool_]
    is_moved: NDArray[np.bool_]

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        for name, dtype in _COLUMNS:
            setattr(self, name, np.zeros(0, dtype))
        self.has_ttl = False
        """Whether any block was ever given a time."""
        self._any_moved = False
        self._sessions: dict[tuple[bytes, str], int] = {}
        self._n_sessions = 0
        self._types: dict[str, int] = {}
        self._scanned = 0

    @property
    def is_used(self) -> bool:
        """Whether anybody ever said anything."""
        return len(self.generation) > 0

    # What is said --------------------------------------------------------------------------------

    def used(self, ids: At, root_key: bytes, hints: Hints, now_s: float, time_s: float) -> None:
        """Blocks of one path were used by a request with hints. A life that they have gets longer, never shorter."""
        at = ids.astype(np.intp, copy=False)
        known = self._note(at, np.zeros(len(at), np.bool_), root_key, hints, time_s)
        if hints.ttl_s and self.has_ttl:
            limited = at[known & np.isfinite(self.expires_s[at])]
            self._live_until(limited, now_s + hints.ttl_s)

    def stored(
        self, ids: At, is_new: NDArray[np.bool_], root_key: bytes, hints: Hints | None, now_s: float, time_s: float
    ) -> None:
        """A path was stored from its head up to its new blocks: all of it lives as long as the longest of its users
        wants. ``is_new``: blocks that were nowhere before."""
        at = ids.astype(np.intp, copy=False)
        if hints is None:
            if self.has_ttl:
                self._grow()
                self._live_until(at[self._is_known(at)], np.inf)
            return
        known = self._note(at, is_new, root_key, hints, time_s)
        if hints.ttl_s:
            self.has_ttl = True
            self._live_until(at[known], now_s + hints.ttl_s)
            self.expires_s[at[~known & is_new]] = now_s + hints.ttl_s
        else:
            self._live_until(at[known], np.inf)

    def end_session(self, root_key: bytes, session_id: str) -> NDArray[np.intp]:
        """Blocks that only this session below this root has used, as far as is known.

        The next with this name is another one.
        """
        number = self._sessions.pop((root_key, session_id), 0)
        if not number:
            return np.empty(0, np.intp)
        at = np.flatnonzero(self.session[: self._table.n_used] == number)
        at = at[self._is_known(at) & ~self.is_shared[at]]
        # A later use by a request without hints left no other trace.
        at = at[self._table.last_use_s[at] <= self.noted_s[at]]
        self.no_reuse[at] = True
        return at

    # Lives ---------------------------------------------------------------------------------------

    def n_alive(self, ids: At, now_s: float) -> int:
        """How many of the leading blocks have time left."""
        over = np.flatnonzero(self.is_over(ids, now_s))
        return int(over[0]) if len(over) else len(ids)

    def is_over(self, ids: At, now_s: float) -> NDArray[np.bool_]:
        """Which of the blocks have no time left."""
        self._grow()
        at = ids.astype(np.intp, copy=False)
        over: NDArray[np.bool_] = (self.expires_s[at] <= now_s) & self._is_known(at)
        return over

    def has_run_out(self, ids: At) -> NDArray[np.bool_]:
        """Which of the blocks were given up because their time was over: see ``take_overdue``."""
        self._grow()
        at = ids.astype(np.intp, copy=False)
        run_out: NDArray[np.bool_] = self.is_overdue[at] & self._is_known(at)
        return run_out

    def was_unwanted(self, ids: At) -> NDArray[np.bool_]:
        """Of which of the blocks the last request that said something said that they are not used again."""
        self._grow()
        at = ids.astype(np.intp, copy=False)
        unwanted: NDArray[np.bool_] = self.no_reuse[at] & self._is_known(at)
        return unwanted

    def take_overdue(self, now_s: float) -> NDArray[np.intp]:
        """Blocks whose time is over since they were last looked at; looks at a part of the table each time."""
        if not self.has_ttl:
            return np.empty(0, np.intp)
        n = min(self._table.n_used, len(self.generation))
        first = self._scanned if self._scanned < n else 0
        end = self._scanned = min(first + SCAN_BLOCKS, n)
        at = np.flatnonzero((self.expires_s[first:end] <= now_s) & ~self.is_overdue[first:end]) + first
        at = at[self._is_known(at) & (self._table.state[at] != 0)]
        self.is_overdue[at] = True
        overdue: NDArray[np.intp] = at
        return overdue

    def expire_s(self, ids: At) -> NDArray[np.float64]:
        """From when on each of the blocks is a miss, by the clock; inf for never."""
        if not self.has_ttl:
            return np.full(len(ids), np.inf)
        self._grow()
        at = ids.astype(np.intp, copy=False)
        return np.where(self._is_known(at), self.expires_s[at], np.inf)

    def found(self, ids: At, expires_s: NDArray[np.float64]) -> None:
        """Blocks that nothing else is known of were stored with a life that ends then; inf for never."""
        at = ids[np.isfinite(expires_s)].astype(np.intp, copy=False)
        if not len(at):
            return
        self.has_ttl = True
        self._grow()
        self._begin(at)
        self.is_shared[at] = True
        self.expires_s[at] = expires_s[np.isfinite(expires_s)]

    def has_moved(self, ids: At) -> NDArray[np.bool_]:
        """Which of the blocks ``take_moved`` would give now."""
        self._grow()
        at = ids.astype(np.intp, copy=False)
        moved: NDArray[np.bool_] = self.is_moved[at] & self._is_known(at)
        return moved

    def take_moved(self) -> NDArray[np.intp]:
        """Blocks whose life has been made longer since this was called last. Looks at the whole table if any was."""
        if not self._any_moved:
            return np.empty(0, np.intp)
        self._any_moved = False
        at = np.flatnonzero(self.is_moved)
        self.is_moved[at] = False
        moved: NDArray[np.intp] = at[self._is_known(at)]
        return moved

    # Facts ---------------------------------------------------------------------------------------

    def of(self, block: int, now_s: float) -> dict[str, str | int | float | bool]:
        """What is known of a block, by the names of ``Hints``; ``ttl_s`` is what is left, perhaps less than 0."""
        if block >= len(self.generation) or self.generation[block] != self._table.generation[block]:
            return {}
        named: dict[str, str | int | float | bool] = {
            "request_type": _name_of(self._types, int(self.request_type[block])),
            "turn": int(self.turn[block]),
            "session_id": next((key[1] for key, n in self._sessions.items() if n == self.session[block]), ""),
            "expected_reuse": float(self.expected_reuse[block]),
            "priority": int(self.priority[block]),
            "no_reuse": bool(self.no_reuse[block]),
        }
        if np.isfinite(self.expires_s[block]):
            named["ttl_s"] = float(self.expires_s[block]) - now_s
        return {name: value for name, value in named.items() if value or name == "ttl_s"}

    # Own -----------------------------------------------------------------------------------------

    def _note(
        self, at: NDArray[np.intp], is_new: NDArray[np.bool_], root_key: bytes, hints: Hints, time_s: float
    ) -> NDArray[np.bool_]:
        """Write down all but the life; says which blocks had a record."""
        self._grow()
        known = self._is_known(at)
        fresh = at[~known]
        self._begin(fresh)
        self.is_shared[fresh] = ~is_new[~known]  # somebody has stored it who said nothing
        self.noted_s[at] = time_s
        number = self._number(root_key, hints.session_id) if hints.session_id else 0
        self.is_shared[at] |= known & (self.session[at] != number)
        self.session[at] = number
        if hints.request_type:
            self.request_type[at] = self._type(hints.request_type)
        for name in ("turn", "expected_reuse", "priority"):
            if value := getattr(hints, name):
                getattr(self, name)[at] = value
        self.no_reuse[at] = hints.no_reuse
        return known

    def _begin(self, at: NDArray[np.intp]) -> None:
        """A record of each block, which says nothing."""
        for name, _ in _COLUMNS:
            getattr(self, name)[at] = np.inf if name == "expires_s" else 0
        self.generation[at] = self._table.generation[at]

    def _live_until(self, at: NDArray[np.intp], until_s: float) -> None:
        longer = at[self.expires_s[at] < until_s]
        self.is_moved[longer] = True
        self._any_moved |= len(longer) > 0
        self.expires_s[longer] = until_s
        self.is_overdue[at] = False

    def _is_known(self, at: NDArray[np.intp]) -> NDArray[np.bool_]:
        known: NDArray[np.bool_] = self.generation[at] == self._table.generation[at]
        return known

    def _number(self, root_key: bytes, session_id: str) -> int:
        key = (root_key, session_id)
        number = self._sessions.pop(key, 0)
        if not number:
            self._n_sessions = number = self._n_sessions + 1
            if len(self._sessions) >= SESSIONS_MAX:
                del self._sessions[next(iter(self._sessions))]
        self._sessions[key] = number
        return number

    def _type(self, request_type: str) -> int:
        if request_type not in self._types and len(self._types) >= REQUEST_TYPES_MAX:
            return 0
        return self._types.setdefault(request_type, len(self._types) + 1)

    def _grow(self) -> None:
        n, n_now = self._table.capacity_blocks, len(self.generation)
        if n_now >= n:
            return
        for name, dtype in _COLUMNS:
            grown = np.zeros(n, dtype)
            grown[:n_now] = getattr(self, name)
            setattr(self, name, grown)


def _name_of(names: dict[str, int], number: int) -> str:
    return next((name for name, n in names.items() if n == number), "")
