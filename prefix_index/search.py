"""Finds how much of a prompt is stored: in the tree, among cold blocks, up to a broken one."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from kvstore.prefix_index.block_table import NO_PARENT, STORED, BlockTable, Ids
from kvstore.prefix_index.cold import ColdBlocks
from kvstore.prefix_index.copies import Copies
from kvstore.prefix_index.rows import RowPath
from kvstore.prefix_index.tree import RadixTree, Stop, as_ids


class Match(NamedTuple):
    """The longest stored prefix of a prompt. Valid until the index next changes."""

    ids: Ids
    """Blocks of whole rows, first to last."""
    partial_id: int
    """A block whose first ``partial_tokens`` tokens come next in the prompt (a short leaf too), or -1."""
    partial_tokens: int
    n_tokens: int
    """Tokens matched: whole blocks and the partial one."""


class Search:
    """Walks the tree; takes cold blocks into it as prompts show their rows."""

    def __init__(self, tree: RadixTree, table: BlockTable, copies: Copies, cold: ColdBlocks) -> None:
        self._tree = tree
        self._table = table
        self._copies = copies
        self._cold = cold

    def match(self, root_key: bytes, path: RowPath) -> Match:
        """See ``PrefixIndex.match``."""
        stop = self.locate(root_key, path, path.n_full_rows)
        if stop is None and not self._table.n_cold:
            return Match(np.empty(0, np.uint32), -1, 0, 0)
        may_end_inside = path.unit_bytes != path.row_bytes
        if self._table.n_cold and may_end_inside and path.tail_tokens:
            at_tail = stop.n_rows if stop else 0
            if at_tail == path.n_full_rows and self._graft(root_key, path, stop, path.n_rows) is not stop:
                stop = self.locate(root_key, path, path.n_full_rows)
        if stop is None:
            return Match(np.empty(0, np.uint32), -1, 0, 0)
        broken = self._copies.n_broken > 0
        stop = self.before_broken(root_key, path, stop)
        partial_id, partial_tokens = -1, 0
        if stop.n_rows < path.n_rows and may_end_inside:
            partial_id, partial_tokens = self._tree.partial(stop, path, skip_broken=broken)
        n_tokens = stop.n_rows * path.block_tokens + partial_tokens
        return Match(as_ids(stop.ids), partial_id, partial_tokens, n_tokens)

    def locate(self, root_key: bytes, path: RowPath, n_rows: int) -> Stop | None:
        """How far the tree has the first ``n_rows`` rows, cold ones taken in; None if it has not even the root."""
        root = self._tree.find_root(root_key, path)
        stop = None if root is None else self._tree.walk(root, path, n_rows)
        if self._table.n_cold and (stop is None or stop.n_rows < n_rows):
            return self._graft(root_key, path, stop, n_rows)
        return stop

    def _graft(self, root_key: bytes, path: RowPath, stop: Stop | None, n_rows: int) -> Stop | None:
        """Take the cold blocks behind ``stop`` into the tree that the rows up to ``n_rows`` name."""
        table = self._table
        parent, parent_key = NO_PARENT, root_key
        if stop is not None and stop.ids:
            parent = stop.ids[-1]
            in_tree = 1 if stop.used < len(stop.node.ids) else stop.node.n_kids
            if table.n_followers(parent) == in_tree:
                return stop
            parent_key = table.key[parent].tobytes()
        elif not self._cold.has_root(root_key):
            return stop
        n_done = stop.n_rows if stop else 0
        found = self._cold.follow(parent, parent_key, path, n_done, n_rows)
        if not len(found):
            return stop
        if stop is None:
            root = self._tree.make_root(root_key, path, int(table.namespace[found[0]]))
            stop = Stop(root, 0, 0, array("I"))
        table.state[found] = STORED
        self._cold.left(len(found))
        return self._tree.grow(stop, path, n_done + len(found), found)

    def before_broken(self, root_key: bytes, path: RowPath, stop: Stop) -> Stop:
        """``stop``, or where the path reaches its first broken block."""
        if not self._copies.n_broken:
            return stop
        broken = self._table.residency[as_ids(stop.ids)] == 0
        if not broken.any():
            return stop
        return self._tree.walk(self._tree.roots[root_key], path, int(broken.argmax()))
