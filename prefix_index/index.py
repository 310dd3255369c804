"""The prefix index of a daemon: which blocks are stored for a prompt, and which to give up first.

One thread uses it; nothing here blocks, waits or does I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError, IntegrityError, KVStoreError
from kvstore.prefix_index.block_table import NO_PARENT, At, BlockTable, Ids, residency_bit
from kvstore.prefix_index.evictor import Evictor
from kvstore.prefix_index.integrity import check_index
from kvstore.prefix_index.policy import EvictionPolicy
from kvstore.prefix_index.rows import RowPath
from kvstore.prefix_index.tree import RadixTree, Stop, as_ids
from kvstore.types import KEY_BYTES

_DRAM = residency_bit(0)
_MAX_SIZE_BYTES = (1 << 32) - 1


class MissingParent(KVStoreError):  # noqa: N818 - it names what is missing, not a fault
    """Rows can't be stored because an earlier row of their path isn't; nothing was changed."""


class Match(NamedTuple):
    """The longest stored prefix of a prompt. Valid until the index next changes."""

    ids: Ids
    """Blocks of whole rows, first to last."""
    partial_id: int
    """A block whose first ``partial_tokens`` tokens come next in the prompt (a short leaf too), or -1."""
    partial_tokens: int
    n_tokens: int
    """Tokens matched: whole blocks and the partial one."""


class Inserted(NamedTuple):
    """Blocks of the rows asked for; where ``is_new`` is False an older block stays and its slot too."""

    ids: Ids
    is_new: NDArray[np.bool_]


class Evicted(NamedTuple):
    """Blocks that left the index, in the order they went. The ids may be reused at once."""

    ids: Ids
    slots: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    keys: NDArray[np.uint8]
    """Block keys, [n, 16]."""


class PrefixIndex:
    """Radix tree, block table and eviction order behind one face.

    ``reserve_blocks``: room made at once, so that the table needn't be copied to grow; untouched room
    takes no memory.
    """

    def __init__(self, policy: EvictionPolicy, reserve_blocks: int = 1 << 16) -> None:
        self.table = BlockTable(reserve_blocks)
        self._policy = policy
        policy.attach(self.table)
        self._tree = RadixTree(self.table)
        self._evictor = Evictor(self.table, policy)

    @property
    def policy(self) -> EvictionPolicy:
        """What decides the order of eviction."""
        return self._policy

    @property
    def n_blocks(self) -> int:
        """Blocks stored."""
        return self.table.n_blocks

    @property
    def n_roots(self) -> int:
        """Roots with at least one block."""
        return len(self._tree.roots)

    def match(self, root_key: bytes, path: RowPath) -> Match:
        """The longest stored prefix. A pure question: splits, touches and pins nothing.

        Raises BadInputError when the root holds rows of another size or kind.
        """
        root = self._tree.find_root(root_key, path)
        if root is None:
            return Match(np.empty(0, np.uint32), -1, 0, 0)
        stop = self._tree.walk(root, path, path.n_full_rows)
        partial_id, partial_tokens = -1, 0
        if stop.n_rows < path.n_rows and path.unit_bytes != path.row_bytes:
            partial_id, partial_tokens = self._tree.partial(stop, path)
        n_tokens = stop.n_rows * path.block_tokens + partial_tokens
        return Match(as_ids(stop.ids), partial_id, partial_tokens, n_tokens)

    def touch(self, ids: At, now_s: float, category: int = 0) -> None:
        """One access of blocks of one path, given from its head; the head counts as more recent."""
        if len(ids):
            at = ids.astype(np.intp, copy=False)
            self._used(at, now_s, category)
            self._evictor.changed(at, self._policy.accessed(at, now_s))

    def insert(
        self,
        root_key: bytes,
        path: RowPath,
        first_row: int,
        slots: NDArray[np.int64],
        size_bytes: int,
        now_s: float,
        category: int = 0,
    ) -> Inserted:
        """Store rows ``first_row`` to ``first_row + len(slots) - 1``, whose bytes lie in ``slots``.

        A row that is stored keeps its block. A short last row becomes a short leaf. Raises MissingParent
        when an earlier row isn't stored, BadInputError for rows the path doesn't have; nothing changes then.
        """
        end = first_row + len(slots)
        if len(root_key) != KEY_BYTES:
            raise BadInputError(f"root_key is {len(root_key)} bytes; it has {KEY_BYTES}")
        if first_row < 0 or end > path.n_rows:
            raise BadInputError(f"rows {first_row} to {end - 1} of a path with {path.n_rows} rows")
        if not 0 <= size_bytes <= _MAX_SIZE_BYTES:
            raise BadInputError(f"size_bytes is {size_bytes}; it must be in 0..{_MAX_SIZE_BYTES}")
        if first_row == end:
            return Inserted(np.empty(0, np.uint32), np.empty(0, np.bool_))
        root = self._tree.find_root(root_key, path)
        if root is None:
            if first_row:
                raise MissingParent(f"row {first_row} of a path of which nothing is stored: insert row 0 first")
            root = self._tree.make_root(root_key, path)
        stop = self._tree.walk(root, path, end)
        if stop.n_rows < first_row:
            raise MissingParent(f"row {first_row} of a path stored up to row {stop.n_rows}: insert the rows between")
        old = as_ids(stop.ids)
        new = self._add(root_key, path, stop, end, slots[stop.n_rows - first_row :])
        if len(new):
            self.table.size_bytes[new] = size_bytes
            self._used(new, now_s, category)
            self._policy.inserted(new, now_s)
            self._evictor.changed(new[-1:])
        is_new = np.zeros(end - first_row, np.bool_)
        is_new[len(is_new) - len(new) :] = True
        return Inserted(np.concatenate((old[first_row:], new)), is_new)

    def pin(self, ids: At) -> None:
        """Keep these blocks (distinct ids) from eviction until as many ``unpin``."""
        self.table.refs[ids.astype(np.intp, copy=False)] += 1

    def unpin(self, ids: At) -> None:
        """Undo one ``pin`` of these blocks (distinct ids). Raises IntegrityError if one isn't pinned."""
        at = ids.astype(np.intp, copy=False)
        refs = self.table.refs[at]
        if len(refs) and refs.min() <= 0:
            raise IntegrityError(f"block {ids[int(refs.argmin())]} is unpinned more often than it was pinned")
        self.table.refs[at] = refs - 1
        self._evictor.changed(at)

    def evict(self, n: int) -> Evicted:
        """Give up the ``n`` blocks the policy values least: leaves only, never a pinned one.

        Fewer when nothing else is evictable. The cost grows with ``n``: slice a long burst.
        """
        table, evictor = self.table, self._evictor
        gone = array("I")
        while len(gone) < n and (block := evictor.pop()) >= 0:
            ids = table.node[block].ids
            tail = ids[: -min(len(ids), n - len(gone)) - 1 : -1]
            if len(tail) > 1:
                del tail[evictor.run(as_ids(tail)) :]
            self._take_leaves(block, tail)
            gone.extend(tail)
        return self._forget(gone)

    def evict_among(self, n: int, worth: Callable[[int], int], most_passed: int) -> Evicted:
        """As ``evict``, until the blocks given up are worth ``n``: ``worth(slot)`` says what each one counts.

        Blocks of negative worth are passed over and keep their place in the order; after ``most_passed`` of
        them it ends, so that the order is never bent further than that.
        """
        table, evictor = self.table, self._evictor
        gone, passed = array("I"), array("I")
        gained = 0
        while gained < n and len(passed) <= most_passed and (block := evictor.pop()) >= 0:
            value = worth(int(table.slot[block]))
            if value >= 0:
                gained += value
                self._take_leaves(block, array("I", (block,)))
                gone.append(block)
            else:
                passed.append(block)
        evictor.changed(as_ids(passed).astype(np.intp))
        return self._forget(gone)

    def _take_leaves(self, block: int, tail: array[int]) -> None:
        """Out of the tree: ``tail``, which starts with ``block`` and goes up its edge."""
        table = self.table
        self._tree.remove_leaves(table.node[block], len(tail))
        table.residency[as_ids(tail)] = 0
        parent = int(table.parent[tail[-1]])
        if parent != NO_PARENT:
            left = int(table.n_children[parent]) - 1
            table.n_children[parent] = left
            if left == 0:
                self._evictor.became_leaf(parent)

    def _forget(self, gone: array[int]) -> Evicted:
        """Out of the table: blocks that the tree has let go."""
        table, ids = self.table, as_ids(gone)
        self._policy.evicted(ids)
        out = Evicted(ids, table.slot[ids], table.size_bytes[ids].astype(np.int64), table.key[ids])
        table.free(ids)
        return out

    def relocate(self, ids: Ids, slots: NDArray[np.int64]) -> None:
        """The bytes of these blocks lie in other slots now."""
        self.table.slot[ids] = slots

    def slots(self, ids: At) -> NDArray[np.int64]:
        """Where the bytes of these blocks lie; a copy."""
        return self.table.slot[ids.astype(np.intp, copy=False)]

    def check(self) -> None:
        """Verify every structural invariant. Raises IntegrityError that names the one broken. Slow."""
        check_index(self._tree, self.table)

    def _used(self, at: At, now_s: float, category: int) -> None:
        self.table.last_use_s[at] = now_s
        self.table.category[at] = category

    def _add(self, root_key: bytes, path: RowPath, stop: Stop, end: int, slots: NDArray[np.int64]) -> Ids:
        """Blocks for the rows behind ``stop``, in tree and table; size and use are left to fill."""
        table = self.table
        n_new = end - stop.n_rows
        ids = table.allocate(n_new)
        if not n_new:
            return ids
        parent = stop.ids[-1] if stop.ids else NO_PARENT
        parent_key = root_key if parent == NO_PARENT else table.key[parent].tobytes()
        table.key[ids] = path.chain(parent_key, stop.n_rows, end)
        table.parent[ids[0]] = parent
        table.parent[ids[1:]] = ids[:-1]
        table.n_children[ids] = 1
        table.n_children[ids[-1]] = 0
        if parent != NO_PARENT:
            table.n_children[parent] += 1
        table.slot[ids] = slots
        table.refs[ids] = 0
        table.residency[ids] = _DRAM
        self._tree.grow(stop, path, end, ids)
        return ids
