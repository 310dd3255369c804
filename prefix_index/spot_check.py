"""Whether what is known of some blocks fits together: what ``integrity`` asks of all of them, for a few at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import COLD, DRAM, FREE, HIDDEN, NO_PARENT, NVME, PART, STORED, BlockTable, Ids
from kvstore.prefix_index.cold import ColdBlocks
from kvstore.prefix_index.keys import block_key, part_key
from kvstore.prefix_index.lineage import frame_rows, parent_keys
from kvstore.prefix_index.node import Node
from kvstore.prefix_index.tree import as_ids


def contradictions(table: BlockTable, cold: ColdBlocks, ids: Ids) -> Iterator[str]:
    """In words what contradicts what, of these living blocks. Hashes the row of each that is in the tree."""
    at = ids.astype(np.intp)
    state, parents = table.state[at], table.parent[at]
    has_parent = parents != NO_PARENT
    lost = has_parent & (table.state[np.where(has_parent, parents, 0)] == FREE)
    yield from _told(at, lost, "follows a block that is not there")
    yield from _told(at, ~np.isin(state, (STORED, COLD, PART, HIDDEN)), "is in no state that there is")
    yield from _told(at, table.refs[at] < 0, "is pinned less than not at all")
    counted = table.n_children[np.where(has_parent, parents, 0)] > 0
    yield from _told(at, has_parent & ~counted, "follows a block that nothing follows")
    if table.nvme:
        yield from _told(
            at, table.resident(at, DRAM) != (table.slot[at] >= 0), "has a place in DRAM or a copy, not both"
        )
        on_nvme = table.resident(at, NVME)
        yield from _told(at, on_nvme != (table.nvme_slot[at] >= 0), "has a place on NVMe or a copy, not both")
    stored = ids[state == STORED]
    placed = _have_places(table, stored)
    yield from _told(stored, ~placed, "is not where the tree says")
    yield from _wrong_keys(table, cold, stored[placed])
    parts = ids[state == PART]
    keys = [part_key(table.key[table.parent[part]].tobytes(), int(table.part[part])) for part in parts.tolist()]
    wrong = [key != table.key[part].tobytes() for key, part in zip(keys, parts.tolist(), strict=True)]
    yield from _told(parts, np.array(wrong, np.bool_), "is a part with the key of another")


def _have_places(table: BlockTable, ids: Ids) -> NDArray[np.bool_]:
    """Which blocks are on the edge that the table says. Looks through each edge once."""
    nodes: list[Node | None] = table.node[ids].tolist()
    placed = np.zeros(len(ids), np.bool_)
    for node in {id(node): node for node in nodes if node is not None}.values():
        mine = np.array([each is node for each in nodes], np.bool_)
        placed[mine] = np.isin(ids[mine], as_ids(node.ids))
    return placed


def _wrong_keys(table: BlockTable, cold: ColdBlocks, ids: Ids) -> Iterator[str]:
    before = parent_keys(table, cold, ids)
    keys = [
        block_key(parent.tobytes(), row, digest)
        for parent, (row, digest) in zip(before, frame_rows(table, ids), strict=True)
    ]
    wrong = [key != table.key[block].tobytes() for key, block in zip(keys, ids.tolist(), strict=True)]
    yield from _told(ids, np.array(wrong, np.bool_), "has another key than its tokens and the block before it")


def _told(ids: NDArray[np.integer], wrong: NDArray[np.bool_], what: str) -> Iterator[str]:
    for block in ids[wrong].tolist():
        yield f"block {block} {what}"
