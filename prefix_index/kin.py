"""Which blocks are worth nothing without each other: those of one row in the shards of a family.

They form a ring. When one of them is gone for good, no hit reaches that row in any shard, and the rest of the ring
only takes room: it is to go first. A ring is known from the time that somebody asked for the family as such.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import DRAM, At, BlockTable, Ids


class Kin:
    """Rings of blocks over one table. Takes no memory before the first, and no time."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._next: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._generation: NDArray[np.uint32] = np.zeros(0, np.uint32)
        """Of the block when it was put into its ring; another one means that the id is another block's now."""
        self._longest = 0
        self._useless: set[int] = set()

    def __bool__(self) -> bool:
        """Whether any ring was ever known."""
        return bool(len(self._next))

    def link(self, ids: At) -> None:
        """Each column of ``ids`` [shards, rows] is a ring from now on, and its blocks are in no other."""
        if not ids.size or len(ids) == 1:
            return
        self._grow()
        self._longest = max(self._longest, len(ids))
        self._next[ids[:-1]], self._next[ids[-1]] = ids[1:], ids[0]
        self._generation[ids] = self._table.generation[ids]

    def join(self, ids: At, others: At, n_shards: int) -> None:
        """Blocks that are in no ring get into those of ``others``, one each. ``n_shards``: the most a ring can have."""
        if not len(ids):
            return
        self._grow()
        self._longest = max(self._longest, n_shards)
        self._next[ids] = np.where(self._linked(others), self._next[others], others)
        self._next[others] = ids
        generations = self._table.generation
        self._generation[ids], self._generation[others] = generations[ids], generations[others]

    def of(self, ids: Ids) -> NDArray[np.intp]:
        """The other blocks of the rings of these, which may have left the table a moment ago; as far as alive."""
        if not len(self._next):
            return np.empty(0, np.intp)
        start = ids[ids < len(self._next)].astype(np.intp)
        start = start[self._linked(start)]
        found, at = [np.empty(0, np.intp)], start
        for _ in range(self._longest - 1):  # a ring that was linked anew in part need not lead back to where one began
            at = self._next[at].astype(np.intp)
            on = self._linked(at) & (at != start)
            at, start = at[on], start[on]
            found.append(at)
        others = np.unique(np.concatenate(found))
        alive: NDArray[np.intp] = others[self._table.state[others] != 0]
        return alive

    def lost(self, ids: Ids) -> NDArray[np.intp]:
        """These have left for good: the others of their rings, which are worth nothing now."""
        others = self.of(ids)
        there = others[(self._table.refs[others] == 0) & self._table.resident(others, DRAM)]
        self._useless.update(self._table.slot[there].tolist())
        return others

    def take_useless(self) -> set[int]:
        """The DRAM slots of those that were worth nothing, and not in use, since the last call."""
        useless, self._useless = self._useless, set()
        return useless

    def _linked(self, at: At) -> NDArray[np.bool_]:
        linked: NDArray[np.bool_] = self._generation[at] == self._table.generation[at]
        return linked

    def _grow(self) -> None:
        n = self._table.capacity_blocks
        if len(self._next) < n:
            for name in ("_next", "_generation"):
                grown = np.zeros(n, np.uint32)
                grown[: len(getattr(self, name))] = getattr(self, name)
                setattr(self, name, grown)
