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
DRAM, NVME, HBM = 0, 1, 2
"""Tier numbers. Blocks live in DRAM and on NVMe; in HBM are copies of such blocks only, see ``above``."""

TIER_NAMES = ("dram", "nvme", "hbm")
"""By number, as operators and clients have them."""

FREE, STORED, COLD, PART, HIDDEN = 0, 1, 2, 3, 4
"""``state``: not alive; in the tree; known by its key only, as its row has not been seen yet; a part of the block
that is its parent, see ``parts``; never found again, see ``hiding``."""

PARTS_MAX = 15
"""Most parts a block may have besides its own bytes."""


def residency_bit(tier: int, group: int = 0) -> int:
    """The bit of ``residency`` that says: this group of the block lies in this tier, which is not HBM."""
    if not (0 <= tier < TIERS and 0 <= group < GROUPS_PER_TIER):
        raise BadInputError(f"tier {tier}, group {group}: there are {TIERS} tiers of {GROUPS_PER_TIER} groups")
    return 1 << (tier * GROUPS_PER_TIER + group)


DRAM_BIT, NVME_BIT = residency_bit(DRAM), residency_bit(NVME)


class BlockTable:
    """A growable structure of arrays, indexed by block id (uint32, reused after ``free``).

    Read a field afresh for each use (``table.rank[ids]``): growing replaces the arrays. A block is alive
    while ``state`` is not FREE. One that is alive but resident nowhere is *broken*: its bytes are lost, and
    it stays only for the blocks behind it.

    key              uint8 [., 16]  the chained block key
    parent           uint32         id of the block before, NO_PARENT for a first block
    slot             int64          where its bytes lie in DRAM; -1 when they don't
    size_bytes       uint32         how many bytes
    refs             int32          pins; a pinned block is never evicted
    generation       uint32         how often the id has been used; (id, generation) names a block for good
    rank             float64        the policy's order in DRAM: the lowest leaf goes first
    last_use_s       float64        policy time of the last access
    category         uint8          the caller's class of the last access
    residency        uint64         bits per tier and group, but for HBM
    n_children       uint32         blocks that directly follow it
    n_dram_children  uint32         those of them that are in DRAM
    node             object         the tree's edge that holds it, None for a cold block and a part
    state            uint8          FREE, STORED, COLD, PART or HIDDEN
    namespace        uint32         the caller's number for its namespace

    With an NVMe tier also

    nvme_rank        float64        the policy's order on NVMe, as ``rank`` is DRAM's
    nvme_slot        int64          the NVMe tier's handle of its frame; -1 when there is none
    n_nvme_children  uint32         children that are on NVMe

    Without, every block is in DRAM and ``n_dram_children`` is the array ``n_children``.

    With an HBM tier also

    hbm_rank         float64        the policy's order in HBM
    hbm_slot         int64          where its copy in HBM lies; -1 when there is none
    n_hbm_children   uint32         children that are in HBM

    With any of these tiers also

    hits             uint8          accesses, its insertion included, up to 255

    Once there are parts also

    part             uint8          of a part its number, from 1 on; else 0
    spare            bool           no hit at the end of its path or at a fork needs the part: it goes first
    parts[number-1]  uint32         1 + the id of the block's part of that number; 0 without
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
    n_dram_children: NDArray[np.uint32]
    node: NDArray[Any]
    state: NDArray[np.uint8]
    nvme_rank: NDArray[np.float64]
    nvme_slot: NDArray[np.int64]
    n_nvme_children: NDArray[np.uint32]
    hbm_rank: NDArray[np.float64]
    hbm_slot: NDArray[np.int64]
    n_hbm_children: NDArray[np.uint32]
    hits: NDArray[np.uint8]
    namespace: NDArray[np.uint32]
    part: NDArray[np.uint8]
    spare: NDArray[np.bool_]

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
        ("state", np.uint8),
        ("namespace", np.uint32),
    )
    _NVME_FIELDS: tuple[tuple[str, Any], ...] = (
        ("n_dram_children", np.uint32),
        ("nvme_rank", np.float64),
        ("nvme_slot", np.int64),
        ("n_nvme_children", np.uint32),
    )
    _HBM_FIELDS: tuple[tuple[str, Any], ...] = (
        ("hbm_rank", np.float64),
        ("hbm_slot", np.int64),
        ("n_hbm_children", np.uint32),
    )
    _HIT_FIELDS: tuple[tuple[str, Any], ...] = (("hits", np.uint8),)
    _PART_FIELDS: tuple[tuple[str, Any], ...] = (("part", np.uint8), ("spare", np.bool_))

    def __init__(self, reserve_blocks: int = 1024, nvme: bool = False, hbm: bool = False) -> None:
        self.nvme = nvme
        self.hbm = hbm
        self.counts_hits = nvme or hbm
        self._capacity = 0
        self._free = array("I")
        self.n_used = 0
        """Ids below this have been used; all arrays are at least this long."""
        self.n_cold = 0
        """Blocks in state COLD."""
        self.n_hidden = 0
        """Blocks in state HIDDEN."""
        self.n_parts = 0
        """Blocks in state PART."""
        self.n_spare = 0
        """Parts that are spare."""
        self.parts: list[NDArray[np.uint32]] = []
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
        optional = (
            (self.nvme, self._NVME_FIELDS),
            (self.hbm, self._HBM_FIELDS),
            (self.counts_hits, self._HIT_FIELDS),
            (bool(self.parts), self._PART_FIELDS),
        )
        for name, dtype in sum((fields for there, fields in optional if there), self._FIELDS):
            new = np.empty(n_blocks, dtype) if dtype is object else np.zeros(n_blocks, dtype)
            if self._capacity:
                new[: self.n_used] = getattr(self, name)[: self.n_used]
            setattr(self, name, new)
        for i, column in enumerate(self.parts):
            self.parts[i] = np.zeros(n_blocks, np.uint32)
            self.parts[i][: self.n_used] = column[: self.n_used]
        if not self.nvme:
            self.n_dram_children = self.n_children
        self._capacity = n_blocks

    def reserve_parts(self, number: int) -> None:
        """Have columns for parts up to this number. Untouched ones take no memory."""
        if number > PARTS_MAX:
            raise BadInputError(f"part {number}; a block has at most {PARTS_MAX} parts")
        if number and not self.parts:
            for name, dtype in self._PART_FIELDS:
                setattr(self, name, np.zeros(self._capacity, dtype))
        while len(self.parts) < number:
            self.parts.append(np.zeros(self._capacity, np.uint32))

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

    def clear_places(self, ids: At) -> None:
        """New blocks have no copy below or above DRAM, and were not used yet."""
        if self.nvme:
            self.nvme_slot[ids], self.n_nvme_children[ids] = -1, 0
        if self.hbm:
            self.hbm_slot[ids], self.n_hbm_children[ids] = -1, 0
        if self.counts_hits:
            self.hits[ids] = 0

    def free(self, ids: Ids) -> None:
        """Give ids back, whose copies are gone; their blocks are no longer alive."""
        if self.n_hidden:
            self.n_hidden -= int(np.count_nonzero(self.state[ids] == HIDDEN))
        self.state[ids] = FREE
        self.node[ids] = None
        self._free.frombytes(ids.tobytes())

    def used(self, at: At, now_s: float, category: int, *, is_access: bool = True) -> None:
        """Blocks are used; ``is_access``: which was not counted yet."""
        self.last_use_s[at] = now_s
        self.category[at] = category
        if self.counts_hits and is_access:
            self.hits[at] = np.minimum(self.hits[at], 254) + 1

    def free_ids(self) -> Ids:
        """A copy of the ids that wait for reuse."""
        return np.array(self._free, np.uint32)

    def alive(self) -> Ids:
        """Ids of all living blocks, ascending. Looks at the whole table."""
        return np.flatnonzero(self.state[: self.n_used]).astype(np.uint32)

    def ranks(self, tier: int) -> NDArray[np.float64]:
        """The column that has a tier's order; another array after the table has grown."""
        if tier == HBM:
            return self.hbm_rank
        return self.rank if tier == DRAM else self.nvme_rank

    def in_slots(self, slots: NDArray[np.int64]) -> Ids:
        """Blocks that have their DRAM copies in these slots. Looks at the whole table."""
        span = slice(self.n_used)
        held = (self.residency[span] & np.uint64(DRAM_BIT) != 0) & np.isin(self.slot[span], slots)
        return np.flatnonzero(held).astype(np.uint32)

    def resident(self, at: At, tier: int) -> NDArray[np.bool_]:
        """Which of the blocks have a copy in a tier."""
        if tier == HBM:
            return self.hbm_slot[at] >= 0 if self.hbm else np.zeros(at.shape, np.bool_)
        mask: NDArray[np.bool_] = (self.residency[at] & residency_bit(tier)) != 0
        return mask

    def evictable(self, at: At, tier: int = DRAM) -> Ids:
        """Those of the blocks whose copy in a tier may go: see ``is_evictable``."""
        ids: Ids = at[self._evictable(at, tier)].astype(np.uint32)
        return ids

    def is_evictable(self, block: int, tier: int = DRAM) -> bool:
        """Whether the block has a copy in the tier, isn't pinned, and no child of it has a copy there.

        From NVMe the last copy goes only when nothing at all follows the block.
        """
        if self.refs[block] != 0:
            return False
        if tier == HBM:
            return int(self.hbm_slot[block]) >= 0 and int(self.n_hbm_children[block]) == 0
        residency = int(self.residency[block])
        if tier == DRAM:
            return residency & DRAM_BIT != 0 and self.n_dram_children[block] == 0
        if residency & NVME_BIT == 0 or self.n_nvme_children[block] != 0:
            return False
        return residency & DRAM_BIT != 0 or self.n_children[block] == 0

    def n_followers(self, block: int) -> int:
        """How many blocks directly follow it, broken and cold ones included; parts of it are left out."""
        return int(self.n_children[block]) - sum(int(column[block] != 0) for column in self.parts)

    def all_evictable(self, tier: int = DRAM) -> Ids:
        """Ids of all evictable blocks of a tier, ascending. Looks at the whole table."""
        if tier == HBM:
            return self.evictable(self.all_resident(tier), tier)
        # Few are left of most tables by what they use of the narrowest columns.
        children = self.n_dram_children if tier == DRAM else self.n_nvme_children
        may_go = (self.refs[: self.n_used].view(np.uint32) | children[: self.n_used]) == 0
        if self.nvme:
            may_go &= self._bits(tier) != 0
        return self.evictable(np.flatnonzero(may_go), tier)

    def all_resident(self, tier: int = DRAM) -> NDArray[np.intp]:
        """Ids of all blocks with a copy in a tier, ascending. Looks at the whole table."""
        if tier == HBM:
            return np.flatnonzero(self.hbm_slot[: self.n_used] >= 0)
        return np.flatnonzero(self._bits(tier))

    def _bits(self, tier: int) -> NDArray[np.uint16]:
        """What ``residency`` says of one tier, of all ids used."""
        bits: NDArray[np.uint16] = self.residency[: self.n_used].view("<u2")[tier::TIERS]
        return bits

    def _evictable(self, at: At | slice, tier: int) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_]
        if tier == HBM:
            mask = (self.refs[at] == 0) & (self.hbm_slot[at] >= 0) & (self.n_hbm_children[at] == 0)
            return mask
        residency = self.residency[at]
        mask = (self.refs[at] == 0) & ((residency & residency_bit(tier)) != 0)
        if tier == DRAM:
            mask &= self.n_dram_children[at] == 0
        else:
            mask &= (self.n_nvme_children[at] == 0) & (((residency & DRAM_BIT) != 0) | (self.n_children[at] == 0))
        return mask
