"""Nodes of the radix tree: an edge of many rows, and the children behind its end."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from operator import attrgetter

import numpy as np

from kvstore.errors import IntegrityError
from kvstore.prefix_index.keys import EXTRA_DIGEST_BYTES
from kvstore.prefix_index.rows import EXTRA_SUFFIX_BYTES
from kvstore.types import TOKEN_BYTES

HEAD = attrgetter("head")
_CHUNK_BYTES = 1 << 14
_SMALL_BYTES = 1 << 10


class Node:
    """An edge and what follows it.

    ``head``: the first row, as the child key under which the parent finds this node. ``rest``: the other
    rows, packed; only plain full rows have company in an edge, a short row or one with extra keys is alone.
    ``ids``: block ids of all rows. ``kids``: children by ascending head, None when there are none.
    ``special``: children whose row is covered by extra keys.
    """

    __slots__ = ("head", "ids", "kids", "parent", "rest", "special")

    def __init__(self, head: bytes, rest: bytearray | bytes, ids: array[int]) -> None:
        self.head = head
        self.rest = rest
        self.ids = ids
        self.parent: Node | None = None
        self.kids: list[Node] | None = None
        self.special: SpecialKids | None = None

    @property
    def n_kids(self) -> int:
        """Children of both kinds."""
        return (len(self.kids) if self.kids else 0) + (len(self.special.kids) if self.special else 0)

    def above(self) -> Node:
        """The parent. Raises IntegrityError for a root or a node that was let go."""
        if self.parent is None:
            raise IntegrityError("a root, or a node no longer in the tree, has no parent")
        return self.parent

    def find(self, key: bytes) -> Node | None:
        """The plain child with exactly this head."""
        kids = self.kids
        if kids is None:
            return None
        at = bisect_left(kids, key, key=HEAD)
        return kids[at] if at < len(kids) and kids[at].head == key else None

    def find_special(self, key: bytes) -> Node | None:
        """The child with exactly this row and extra keys."""
        return self.special.find(key) if self.special else None

    def add(self, kid: Node, *, special: bool) -> None:
        """Take a child whose head none of the others has."""
        kid.parent = self
        if special:
            if self.special is None:
                self.special = SpecialKids()
            self.special.add(kid)
        elif self.kids is None:
            self.kids = [kid]
        else:
            self.kids.insert(bisect_left(self.kids, kid.head, key=HEAD), kid)

    def replace(self, old: Node, new: Node) -> None:
        """Put ``new`` where the plain child ``old``, of the same head, is."""
        kids = self.kids or []
        at = bisect_left(kids, new.head, key=HEAD)
        if at == len(kids) or kids[at] is not old:
            raise IntegrityError(f"a node with block {old.ids[:1]} is not among its parent's children")
        kids[at] = new
        new.parent = self

    def drop(self, kid: Node) -> None:
        """Let go of a child, in both directions, so that no cycle is left."""
        kid.parent = None
        kids = self.kids or []
        at = bisect_left(kids, kid.head, key=HEAD)
        if at < len(kids) and kids[at] is kid:
            del kids[at]
            if not kids:
                self.kids = None
        elif self.special is not None:
            self.special.drop(kid)
            if not self.special.kids:
                self.special = None


class RootNode(Node):
    """Where the first rows of a root hang. Has no rows itself; one root has one kind of row."""

    __slots__ = ("namespace", "root_key", "row_bytes", "unit_bytes")

    def __init__(self, root_key: bytes, row_bytes: int, unit_bytes: int, namespace: int = 0) -> None:
        super().__init__(b"", b"", array("I"))
        self.root_key = root_key
        self.row_bytes = row_bytes
        self.unit_bytes = unit_bytes
        self.namespace = namespace


class SpecialKids:
    """Children with extra keys: sorted by head to be found, and by their open part for partial matches.

    The open part is the row up to the first covered token. Several may be equal (the same text before two
    images), and sorting by it keeps the rule that a neighbour has the longest common prefix.
    """

    __slots__ = ("by_open_part", "kids")

    def __init__(self) -> None:
        self.kids: list[Node] = []
        self.by_open_part: list[Node] = []

    def find(self, key: bytes) -> Node | None:
        at = bisect_left(self.kids, key, key=HEAD)
        return self.kids[at] if at < len(self.kids) and self.kids[at].head == key else None

    def has_tokens(self, row: bytes) -> bool:
        """Whether a child has exactly these tokens, whatever covers them."""
        at = bisect_left(self.kids, row, key=HEAD)
        if at == len(self.kids):
            return False
        head = self.kids[at].head
        return len(head) == len(row) + EXTRA_SUFFIX_BYTES and head.startswith(row)

    def add(self, kid: Node) -> None:
        self.kids.insert(bisect_left(self.kids, kid.head, key=HEAD), kid)
        self.by_open_part.insert(bisect_right(self.by_open_part, open_part(kid), key=open_part), kid)

    def drop(self, kid: Node) -> None:
        del self.kids[bisect_left(self.kids, kid.head, key=HEAD)]
        at = bisect_left(self.by_open_part, open_part(kid), key=open_part)
        while self.by_open_part[at] is not kid:
            at += 1
        del self.by_open_part[at]


def row_and_digest(node: Node, i: int) -> tuple[bytes, bytes]:
    """Row ``i`` of an edge as its key hashes it: bytes, and the digest of extra keys or b""."""
    if i:
        width = len(node.rest) // (len(node.ids) - 1)
        return bytes(node.rest[(i - 1) * width : i * width]), b""
    special = node.above().special
    if special is not None and special.find(node.head) is node:
        cut = len(node.head) - EXTRA_SUFFIX_BYTES
        return node.head[:cut], node.head[cut : cut + EXTRA_DIGEST_BYTES]
    return node.head, b""


def open_part(kid: Node) -> bytes:
    """The row of a child with extra keys, up to the first token that they cover."""
    first_covered = int.from_bytes(kid.head[-5:-1], "little")
    return kid.head[: min(first_covered * TOKEN_BYTES, len(kid.head) - EXTRA_SUFFIX_BYTES)]


def common_prefix_bytes(a: bytes | bytearray | memoryview, b: bytes | bytearray | memoryview) -> int:
    """How many leading bytes two buffers share, by a compare that stops early."""
    size = min(len(a), len(b))
    if size <= _SMALL_BYTES:
        # The lowest bit in which the two differ as little-endian numbers lies in the first byte that differs.
        differ_bits = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
        return ((differ_bits & -differ_bits).bit_length() - 1) // 8 if differ_bits else size
    left, right = memoryview(a), memoryview(b)
    for start in range(0, size, _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, size)
        differ = np.frombuffer(left[start:end], np.uint8) != np.frombuffer(right[start:end], np.uint8)
        first = int(differ.argmax())
        if differ[first]:
            return start + first
    return size
