"""The radix tree over rows: structure only. What is known per block lives in the block table.

A path is matched edge by edge: the next row is looked up among the sorted children, the rows behind it
are compared as one piece of memory. Splits and merges copy at most one edge, no loop runs over the
blocks of an edge.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError, IntegrityError
from kvstore.prefix_index.block_table import BlockTable, Ids
from kvstore.prefix_index.node import HEAD, Node, RootNode, common_prefix_bytes, open_part
from kvstore.prefix_index.rows import RowPath
from kvstore.types import TOKEN_BYTES

_MERGE_BYTES_MAX = 1 << 16
"""Edges are joined up to this size, so that an eviction copies little; two neighbours that stay apart
are longer than this together, so that the longest prompts still lie on few edges."""


class Stop(NamedTuple):
    """Where a path leaves the tree: ``used`` rows of ``node`` match, ``n_rows`` from the root on."""

    node: Node
    used: int
    n_rows: int
    ids: array[int]


class RadixTree:
    """All roots and their nodes. Not safe for threads; does no I/O."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self.roots: dict[bytes, RootNode] = {}

    def find_root(self, root_key: bytes, path: RowPath) -> RootNode | None:
        """The root, None if nothing is stored under it. Raises BadInputError for another kind of row."""
        root = self.roots.get(root_key)
        if root is not None and (root.row_bytes != path.row_bytes or root.unit_bytes != path.unit_bytes):
            raise BadInputError(
                f"rows of {path.row_bytes} bytes under root {root_key.hex()}, which holds rows of "
                f"{root.row_bytes}: another block size or kind of row is another namespace"
            )
        return root

    def make_root(self, root_key: bytes, path: RowPath, namespace: int = 0) -> RootNode:
        """The root, made if need be. ``namespace``: the caller's number for the namespace that it is in."""
        root = self.find_root(root_key, path)
        if root is None:
            root = self.roots[root_key] = RootNode(root_key, path.row_bytes, path.unit_bytes, namespace)
        return root

    def walk(self, root: RootNode, path: RowPath, n_rows: int) -> Stop:
        """Follow the first ``n_rows`` rows as far as they are stored. Changes nothing."""
        node: Node = root
        ids = array("I")
        data, width = path.data, path.row_bytes
        row = used = 0
        run_end = path.run_end(0)
        while row < n_rows:
            if row > run_end:
                run_end = path.run_end(row)
            at = row * width
            if row < run_end:
                child = node.find(bytes(data[at : at + width]))
            elif not path.has_extra(row):
                child = node.find(path.row(row))
            else:
                child = node.find_special(path.child_key(row))
            if child is None:
                break
            node = child
            size = len(node.ids)
            used = 1
            if size > 1:
                more = min(size, run_end - row, n_rows - row) - 1
                piece = data[at + width : at + width + more * width]
                if not node.rest.startswith(piece):
                    more = common_prefix_bytes(node.rest, piece) // width
                used += more
            row += used
            if used < size:
                ids.extend(node.ids[:used])
                break
            ids.extend(node.ids)
        return Stop(node, used, row, ids)

    def partial(self, stop: Stop, path: RowPath, skip_broken: bool = False) -> tuple[int, int]:
        """The block that shares most of the next tokens: (id, tokens), or (-1, 0).

        Children are sorted, so only the two next to where the row would stand can share most of it. Tokens
        covered by extra keys, in the prompt or the block, never count. ``skip_broken``: blocks without a
        copy are passed over.
        """
        query = path.open_part(stop.n_rows)
        best, best_id = 0, -1
        residency = self._table.residency if skip_broken else None
        for row, block in _candidates(stop, query, path.row_bytes, residency):
            tokens = common_prefix_bytes(row, query) // TOKEN_BYTES
            if tokens > best:
                best, best_id = tokens, block
        return best_id, best

    def grow(self, stop: Stop, path: RowPath, n_rows: int, ids: Ids) -> Stop:
        """Store rows ``stop.n_rows`` to ``n_rows - 1`` under ``ids``, from where ``stop`` was found.

        Returns where the path then ends.
        """
        node = stop.node
        if stop.used < len(node.ids):
            node = self._split(node, stop.used, path.row_bytes)
        row, width = stop.n_rows, path.row_bytes
        while row < n_rows:
            end = min(path.run_end(row), n_rows)
            plain = row < end
            end = end if plain else row + 1
            here = ids[row - stop.n_rows : end - stop.n_rows]
            if plain and node.parent is not None and node.n_kids == 0 and len(node.head) == width:
                _extend(node, path.data[row * width : end * width], here)
            else:
                rest = bytearray(path.data[(row + 1) * width : end * width]) if end - row > 1 else b""
                kid = Node(path.child_key(row), rest, array("I", here.tobytes()))
                node.add(kid, special=path.has_extra(row))
                node = kid
            self._table.node[here] = node
            row = end
        return Stop(node, len(node.ids), n_rows, stop.ids + array("I", ids.tobytes()))

    def remove_leaves(self, node: Node, n: int) -> None:
        """Take the last ``n`` rows from a node without children; an empty node goes, an empty root too."""
        if node.n_kids:
            raise IntegrityError(f"block {node.ids[-1]} has children; only leaves leave")
        if n < len(node.ids):
            _trim(node, n)
            return
        parent = node.above()
        parent.drop(node)
        if isinstance(parent, RootNode):
            if parent.n_kids == 0 and self.roots.get(parent.root_key) is parent:
                del self.roots[parent.root_key]
        elif parent.kids is not None and len(parent.kids) == 1 and parent.special is None:
            self._merge(parent, parent.kids[0])

    def detach(self, namespaces: Collection[int]) -> None:
        """No path leads to what is under the roots of these namespaces any more. Looks at every root."""
        for root_key in [key for key, root in self.roots.items() if root.namespace in namespaces]:
            del self.roots[root_key]

    def _split(self, node: Node, used: int, width: int) -> Node:
        """Cut an edge in two; the new upper part is returned. The old node keeps its children."""
        cut = (used - 1) * width
        upper = Node(node.head, node.rest[:cut] if used > 1 else b"", node.ids[:used])
        node.above().replace(node, upper)
        node.head = bytes(node.rest[cut : cut + width])
        node.rest = node.rest[cut + width :] or b""
        node.ids = node.ids[used:]
        node.parent = upper
        upper.kids = [node]
        self._table.node[as_ids(upper.ids)] = upper
        return upper

    def _merge(self, upper: Node, lower: Node) -> None:
        """Join an edge with its only child, when both are plain and together not too long."""
        # The upper edge has a child, so its row is full; the lower has no extra keys. Heads of equal length
        # are therefore two full plain rows, whatever the row's size is.
        size_bytes = len(upper.rest) + len(lower.head) + len(lower.rest)
        if len(upper.head) != len(lower.head) or size_bytes > _MERGE_BYTES_MAX:
            return
        self._table.node[as_ids(upper.ids)] = lower
        lower.rest = bytearray().join((upper.rest, lower.head, lower.rest))
        lower.ids = upper.ids + lower.ids
        lower.head = upper.head
        upper.above().replace(upper, lower)


def as_ids(ids: array[int]) -> Ids:
    """Block ids of an edge or a path as a vector, without a copy."""
    return np.frombuffer(ids, np.uint32) if ids else np.empty(0, np.uint32)


def _candidates(
    stop: Stop, query: bytes, width: int, residency: NDArray[np.uint64] | None
) -> Iterator[tuple[bytes | bytearray, int]]:
    node, used = stop.node, stop.used
    if not query:
        return
    if used < len(node.ids):
        if residency is None or residency[node.ids[used]] != 0:
            yield node.rest[(used - 1) * width : used * width], node.ids[used]
        return
    if node.kids is not None:
        for kid in _neighbours(node.kids, bisect_left(node.kids, query, key=HEAD), residency):
            yield kid.head, kid.ids[0]
    if node.special is not None:
        kids = node.special.by_open_part
        for kid in _neighbours(kids, bisect_left(kids, query, key=open_part), residency):
            yield open_part(kid), kid.ids[0]


def _neighbours(kids: Sequence[Node], at: int, residency: NDArray[np.uint64] | None) -> Sequence[Node]:
    """The kids next to place ``at``, one on each side; only such with a copy if ``residency`` is given."""
    if residency is None:
        return kids[max(at - 1, 0) : at + 1]
    before = (kid for kid in reversed(kids[:at]) if residency[kid.ids[0]] != 0)
    behind = (kid for kid in kids[at:] if residency[kid.ids[0]] != 0)
    return [kid for kid in (next(before, None), next(behind, None)) if kid is not None]


def _extend(node: Node, rows: memoryview, ids: Ids) -> None:
    if isinstance(node.rest, bytearray):
        node.rest += rows
    else:
        node.rest = bytearray(rows)
    node.ids.frombytes(ids.tobytes())


def _trim(node: Node, n: int) -> None:
    """Drop the last ``n`` rows, not all. Arrays give memory back only when half of it is unused."""
    width = len(node.rest) // (len(node.ids) - 1)
    del node.ids[-n:]
    if isinstance(node.rest, bytearray) and len(node.ids) > 1:
        del node.rest[-n * width :]
    else:
        node.rest = b""
