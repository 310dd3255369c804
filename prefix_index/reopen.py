"""Taking in what a tier still holds from before: blocks known by key only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.prefix_index.block_table import NO_PARENT, NVME, BlockTable, Ids
from kvstore.prefix_index.cold import ColdBlocks
from kvstore.prefix_index.copies import Copies
from kvstore.prefix_index.parts import Parts
from kvstore.prefix_index.policy import EvictionPolicy, Use


class Found(NamedTuple):
    """What a tier says about each of its blocks; parents before their children."""

    keys: NDArray[np.uint8]
    """uint8 [n, 16]; so are ``parents``."""
    parents: NDArray[np.uint8]
    slots: NDArray[np.int64]
    size_bytes: NDArray[np.uint32]
    namespaces: NDArray[np.uint32]
    part_numbers: NDArray[np.uint8]
    """0 for a block, else which part of its parent it is."""


def take_in(
    table: BlockTable,
    copies: Copies,
    cold: ColdBlocks,
    policy: EvictionPolicy,
    parts: Parts,
    found: Found,
    now_s: float,
    tier: int,
) -> Ids:
    """See ``PrefixIndex.insert_cold``; every block of the table is cold or a part of one."""
    batch = cold.resolve(found.keys, found.parents)
    in_batch = batch.parent_places >= 0
    numbers = np.where(in_batch | (batch.parent_ids != NO_PARENT), found.part_numbers, 0).astype(np.uint8)
    ids = batch.known.copy()
    for number in np.unique(numbers[numbers != 0]).tolist():
        mine = np.flatnonzero((numbers == number) & (batch.parent_ids != NO_PARENT))
        known = parts.ids(batch.parent_ids[mine], number)
        ids[mine[known >= 0]] = known[known >= 0]
    is_new = ids == NO_PARENT
    if table.resident(ids[~is_new], tier).any():
        raise IntegrityError(f"a block has a copy in tier {tier} already: give each block of a tier once")
    if tier == NVME:
        before = batch.parent_ids[~in_batch & (batch.parent_ids != NO_PARENT)]
        if not table.resident(before, NVME).all():
            raise IntegrityError("a block on NVMe has a parent that isn't: copies there are closed")
    n_new = int(np.count_nonzero(is_new))
    new = ids[is_new] = table.allocate(n_new)
    parent = np.where(in_batch, ids[batch.parent_places], batch.parent_ids)[is_new]
    table.key[new] = found.keys[is_new]
    table.parent[new] = parent
    table.slot[new] = -1
    for column in (table.residency, table.refs, table.category, table.n_children, table.n_dram_children):
        column[new] = 0
    table.size_bytes[new] = found.size_bytes[is_new]
    table.last_use_s[new] = now_s
    table.namespace[new] = found.namespaces[is_new]
    table.clear_places(new)
    if table.counts_hits:
        table.hits[new] = 1
    if table.nvme:
        copies.n_broken += n_new  # until they gain their copy
    np.add.at(table.n_children, parent[parent != NO_PARENT], 1)
    is_part = numbers[is_new] != 0
    parts.adopt(new[is_part].astype(np.intp), parent[is_part], numbers[is_new][is_part])
    is_cold = ~is_part
    cold.add(new[is_cold], found.parents[is_new][is_cold], parent[is_cold] == NO_PARENT)
    policy.inserted(new[::-1].astype(np.intp), Use(now_s))
    copies.gain(ids, tier, found.slots)
    return ids
