"""Blocks that must not be found any more, at once, though taking them away takes its time.

Hidden blocks are out of the tree, with all that follows them: nobody finds them, and a prompt that is stored again
gets blocks of its own. They keep their copies until they are taken, the last block of a prompt first, and as long as
somebody uses them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import (
    COLD,
    DRAM,
    FREE,
    HIDDEN,
    NO_PARENT,
    NVME,
    At,
    BlockTable,
    Ids,
    residency_bit,
)
from kvstore.prefix_index.cold import ColdBlocks
from kvstore.prefix_index.copies import Copies, Loss
from kvstore.prefix_index.history import CLEARED_SHARE, Left
from kvstore.prefix_index.leaving import Leaving
from kvstore.prefix_index.tree import RadixTree


class Hidden(NamedTuple):
    """How many blocks of one namespace were hidden, and had a copy where."""

    n_blocks: int
    n_dram_blocks: int
    n_nvme_blocks: int


class Lost(NamedTuple):
    """Hidden blocks that lost their copy in a tier, and where it lay there."""

    ids: Ids
    slots: NDArray[np.int64]


_DRAM, _NVME = np.uint64(residency_bit(DRAM)), np.uint64(residency_bit(NVME))
_CHUNK = 1 << 14
_NOTHING = Lost(np.empty(0, np.uint32), np.empty(0, np.int64))


class Hiding:
    """Hides the blocks of namespaces and takes hidden blocks away. ``PrefixIndex.hiding`` is the one of an index."""

    def __init__(self, tree: RadixTree, table: BlockTable, copies: Copies, cold: ColdBlocks, leaving: Leaving) -> None:
        self._tree = tree
        self._table = table
        self._copies = copies
        self._cold = cold
        self._leaving = leaving

    def hide(self, namespaces: Collection[int]) -> dict[int, Hidden]:
        """No block of these namespaces is found from now on, by its rows or by its key; says how many there were.

        They stay in their tiers until they are taken. Looks at the whole table and at every root.
        """
        counts = self._hide_blocks(np.fromiter(namespaces, np.intp, len(namespaces)))
        self._tree.detach(frozenset(namespaces))
        return {namespace: Hidden(*counts[:, namespace].tolist()) for namespace in namespaces}

    def hidden(self, first: int, end: int) -> Ids:
        """Hidden blocks among the ids from ``first`` up to ``end``."""
        return np.flatnonzero(self._table.state[first:end] == HIDDEN).astype(np.uint32) + np.uint32(first)

    def is_hidden(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of the blocks are hidden."""
        mask: NDArray[np.bool_] = self._table.state[ids] == HIDDEN
        return mask

    def lose_nvme(self, ids: Ids) -> Lost:
        """These hidden blocks lose their copies on NVMe, in use or not."""
        at = ids.astype(np.intp)
        at = at[self._table.resident(at, NVME)]
        if not len(at):
            return Lost(at.astype(np.uint32), np.empty(0, np.int64))
        slots = self._table.nvme_slot[at]
        self._lose(at, NVME)
        return Lost(at.astype(np.uint32), slots)

    def remove(self, first: int, end: int, most: int) -> tuple[int, Lost]:
        """Up to ``most`` hidden blocks leave the index that nobody uses, that nothing follows and that are not on NVMe.

        Paths that end among the ids from ``first`` up to ``end`` are taken, the last block first. Returns how many,
        and which of them had a copy in DRAM.
        """
        table, n_left = self._table, most
        span = slice(first, min(end, table.n_used))
        is_leaf = (table.state[span] == HIDDEN) & (table.n_children[span] == 0) & (table.refs[span] == 0)
        lost: list[Lost] = []
        for leaf in (np.flatnonzero(is_leaf & (table.residency[span] & _NVME == 0)) + first).tolist():
            if n_left <= 0:
                break
            tail = self._leaving.unused_tail(leaf, n_left)
            n_left -= len(tail)
            lost.append(self._remove(tail))
        together = (np.concatenate([getattr(each, name) for each in (_NOTHING, *lost)]) for name in Lost._fields)
        return most - n_left, Lost(*together)

    def _remove(self, tail: Ids) -> Lost:
        table = self._table
        at = tail.astype(np.intp)
        in_dram = at[table.resident(at, DRAM)]
        lost = Lost(in_dram.astype(np.uint32), table.slot[in_dram])
        self._lose(in_dram, DRAM)
        self._copies.n_broken -= len(at)
        self._leaving.leave(tail)
        return lost

    def _hide_blocks(self, namespaces: NDArray[np.intp]) -> NDArray[np.int64]:
        """All blocks of these namespaces, and their parts; how many, in DRAM, on NVMe, int64 [3, namespaces].

        Bit by bit, so that what is looked at stays in the caches.
        """
        table = self._table
        of_all = table.namespace[: table.n_used]
        n_namespaces = 1 + max(int(of_all.max(initial=0)), int(namespaces.max(initial=0)))
        wanted = np.zeros(n_namespaces, np.bool_)
        wanted[namespaces] = True
        counts = np.zeros((3, n_namespaces), np.int64)
        only = namespaces[0] if len(namespaces) == 1 else None  # which takes a tenth of the time
        n_cold = 0
        history = self._copies.history
        n_noted = history.capacity // CLEARED_SHARE if history else 0
        for first in range(0, table.n_used, _CHUNK):
            span = slice(first, min(first + _CHUNK, table.n_used))
            state, residency, of = table.state[span], table.residency[span], of_all[span]
            mine = (of == only if only is not None else wanted[of]) & (state != FREE) & (state != HIDDEN)
            if not mine.any():
                continue
            there = (mine, mine & ((residency & _DRAM) != 0), mine & ((residency & _NVME) != 0))
            if only is not None:
                counts[:, only] += [np.count_nonzero(each) for each in there]
            else:
                counts += [np.bincount(of[each], minlength=n_namespaces) for each in there]
            n_cold += int(np.count_nonzero(mine & (state == COLD)))
            if history is not None and n_noted:
                noted = first + np.flatnonzero(mine & (residency != 0))[:n_noted]
                n_noted -= len(noted)
                history.lost(noted, Left.CLEARED, -1)
            np.copyto(state, HIDDEN, where=mine)
        self._cold.left(n_cold)
        table.n_hidden += int(counts[0].sum())
        return counts

    def _lose(self, at: At, tier: int) -> None:
        """Copies go, wherever the blocks stand; what they followed may be the last of its path in the tier now."""
        if not len(at):
            return
        table, copies = self._table, self._copies
        left = table.residency[at] & ~np.uint64(residency_bit(tier))
        table.residency[at] = left
        copies.n[tier] -= len(at)
        copies.lost(at, tier)
        copies.last_lost(at[left == 0], Loss.CLEARED)
        copies.n_broken += int(np.count_nonzero(left == 0))
        if copies.witness is not None:
            copies.witness.lost(at, tier, Loss.CLEARED, left == 0)
        if table.nvme:
            copies.slots(tier)[at] = -1
            parents = table.parent[at]
            parents = parents[parents != NO_PARENT]
            np.subtract.at(copies.children(tier), parents, 1)
            copies.evictors[tier].changed(parents.astype(np.intp))
