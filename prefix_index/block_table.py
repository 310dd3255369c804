"""Everything known per block, as one array per field, so that policies and checks work on vectors."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.types import KEY_BYTES

Ids = NDArray[np.uint32]
At = NDArray[np.integer[Any]]
"""Block ids to look up fields with. As intp each look-up is about three times faster: convert once."""

NO_PARENT = 0xFFFFFFFF
"""``parent`` of a first block."""

MAX_BLOCKS = NO_PARENT
TIERS = 4
GROUPS_PER_TIER = 16


def residency_bit(tier: int, group: int = 0) -> int:
    """The bit of ``residency`` that says: this group of the block lies in this tier (0 is DRAM)."""
    if not (0 <= tier < TIERS and 0 <= group < GROUPS_PER_TIER):
        raise BadInputError(f"tier {tier}, group {group}: there are {TIERS} tiers of {GROUPS_PER_TIER} groups")
    return 1 << (tier * GROUPS_PER_TIER + group)


class BlockTable:
    """A growable structure of arrays, indexed by block id (uint32, reused after ``free``).

    Read a field afresh for each use (``table.rank[ids]``): growing replaces the arrays. A block is alive
    while ``residency`` is not 0.

    key          uint8 [., 16]  the chained block key
    parent       uint32         id of the block before, NO_PARENT for a first block
    slot         int64          where its bytes lie
    size_bytes   uint32         how many bytes
    refs         int32          pins; a pinned block is never evicted
    generation   uint32         how often the id has been used; (id, generation) names a block for good
    rank         float64        the policy's order: the lowest leaf goes first
    last_use_s   float64        policy time of the last access
    category     uint8          the caller's class of the last access
    residency    uint64         bits per tier and group
    n_children   uint32         blocks that directly follow it
    node         object         the tree's edge that holds it
    """

    key: NDArray[np.uint8]
    parent: NDArray[np.uint32]
    slot: NDArray[np.int64]
    size_bytes: NDArray[np.uint32]
    refs: NDArray[np.int32]
    generation: NDArray[np.uint32]
    rank: NDArray[np.float64]
    last_use_s: NDArray[np.float64]
    category: NDArray[np.uint8]
    residency: NDArray[np.uint64]
    n_children: NDArray[np.uint32]
    node: NDArray[Any]

    _FIELDS: tuple[tuple[str, Any], ...] = (
        ("parent", np.uint32),
        ("slot", np.int64),
        ("size_bytes", np.uint32),
        ("refs", np.int32),
        ("generation", np.uint32),
        ("rank", np.float64),
        ("last_use_s", np.float64),
        ("category", np.uint8),
        ("residency", np.uint64),
        ("n_children", np.uint32),
        ("node", object),
    )

    def __init__(self, reserve_blocks: int = 1024) -> None:
        self._capacity = 0
        self._free = array("I")
        self.n_used = 0
        """Ids below this have been used; all arrays are at least this long."""
        self.reserve(max(reserve_blocks, 16))

    @property
    def n_blocks(self) -> int:
        """Blocks alive."""
        return self.n_used - len(self._free)

    @property
    def capacity_blocks(self) -> int:
        """Blocks that fit before the next growth."""
        return self._capacity

    def reserve(self, n_blocks: int) -> None:
        """Make room for ``n_blocks`` ids. Copies all fields; untouched room takes no memory yet."""
        if n_blocks <= self._capacity:
            return
        if n_blocks > MAX_BLOCKS:
            raise BadInputError(f"{n_blocks} blocks; ids are 32 bits, the most is {MAX_BLOCKS}")
        key = np.zeros((n_blocks, KEY_BYTES), np.uint8)
        if self._capacity:
            key[: self.n_used] = self.key[: self.n_used]
        self.key = key
        for name, dtype in self._FIELDS:
            new = np.empty(n_blocks, dtype) if dtype is object else np.zeros(n_blocks, dtype)
            if self._capacity:
                new[: self.n_used] = getattr(self, name)[: self.n_used]
            setattr(self, name, new)
        self._capacity = n_blocks

    def allocate(self, n: int) -> Ids:
        """``n`` ids that are not alive, their generation bumped; the caller fills every field."""
        reused = min(n, len(self._free))
        ids = np.empty(n, np.uint32)
        if reused:
            ids[:reused] = self._free[-reused:]
            del self._free[-reused:]
        fresh = n - reused
        if fresh:
            if self.n_used + fresh > self._capacity:
                self.reserve(max(self.n_used + fresh, self._capacity + self._capacity // 4))
            ids[reused:] = np.arange(self.n_used, self.n_used + fresh, dtype=np.uint32)
            self.n_used += fresh
        self.generation[ids] += 1
        return ids

    def free(self, ids: Ids) -> None:
        """Give ids back; their blocks are no longer alive."""
        self.residency[ids] = 0
        self.node[ids] = None
        self._free.frombytes(ids.tobytes())

    def free_ids(self) -> Ids:
        """A copy of the ids that wait for reuse."""
        return np.array(self._free, np.uint32)

    def alive(self) -> Ids:
        """Ids of all living blocks, ascending. Looks at the whole table."""
        return np.flatnonzero(self.residency[: self.n_used]).astype(np.uint32)

    def evictable(self, at: At) -> Ids:
        """Those of the blocks that are alive, have no children and are not pinned."""
        mask = (self.n_children[at] == 0) & (self.refs[at] == 0) & (self.residency[at] != 0)
        leaves: Ids = at[mask].astype(np.uint32)
        return leaves

    def all_evictable(self) -> Ids:
        """Ids of all evictable blocks, ascending. Looks at the whole table."""
        end = self.n_used
        mask = (self.n_children[:end] == 0) & (self.refs[:end] == 0) & (self.residency[:end] != 0)
        return np.flatnonzero(mask).astype(np.uint32)
