"""What a tier that outlives the process needs of a block: its row, its parent's key, its unstored ancestors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.prefix_index.block_table import COLD, DRAM_BIT, HIDDEN, NO_PARENT, NVME, NVME_BIT, BlockTable, Ids
from kvstore.prefix_index.cold import ColdBlocks
from kvstore.prefix_index.copies import Copies
from kvstore.prefix_index.keys import part_tag
from kvstore.prefix_index.node import Node, RootNode, row_and_digest
from kvstore.prefix_index.parts import is_part


def frame_rows(table: BlockTable, ids: Ids) -> list[tuple[bytes, bytes]]:
    """Per block its row's bytes as hashed and the digest of its extra keys, or b"".

    Raises BadInputError for a block whose row is not known.
    """
    out = []
    last: Node | None = None
    place = -1
    for block in ids.tolist():
        node: Node | None = table.node[block]
        if node is None and is_part(table, block):
            out.append((b"", part_tag(int(table.part[block]))))
            last = None
            continue
        if node is None:
            raise BadInputError(f"block {block} is cold: its row isn't known before a prompt has shown it")
        place = place + 1 if node is last else -1
        if not 0 <= place < len(node.ids) or node.ids[place] != block:
            place = node.ids.index(block)
        out.append(row_and_digest(node, place))
        last = node
    return out


def short_row_bytes(table: BlockTable, ids: Ids) -> NDArray[np.uint32]:
    """See ``PrefixIndex.short_row_bytes``. Only leaves that are alone on their edge can be short."""
    out = np.zeros(len(ids), np.uint32)
    for i in np.flatnonzero(table.n_children[ids] == 0).tolist():
        node: Node | None = table.node[ids[i]]
        if node is not None and len(node.ids) == 1:
            row, _ = row_and_digest(node, 0)
            out[i] = len(row) if len(row) < _root(node).row_bytes else 0
    return out


def _root(node: Node) -> RootNode:
    while not isinstance(node, RootNode):
        node = node.above()
    return node


def parent_keys(table: BlockTable, cold: ColdBlocks, ids: Ids) -> NDArray[np.uint8]:
    """Keys of the blocks before these, uint8 [n, 16]; the root key for a first block."""
    parents = table.parent[ids]
    is_first = parents == NO_PARENT
    keys = table.key[np.where(is_first, 0, parents)]
    for i in np.flatnonzero(is_first).tolist():
        block = int(ids[i])
        if table.state[block] == COLD:
            root_key = cold.root_key(block)
        else:
            root: RootNode = table.node[block].above()
            root_key = root.root_key
        keys[i] = np.frombuffer(root_key, np.uint8)
    return keys


def chain_unpersisted(table: BlockTable, copies: Copies, ids: Ids) -> Ids:
    """See ``PrefixIndex.chain_unpersisted``."""
    # NVMe is closed towards the head but for holes: only while there are some, one has to look further up.
    to_the_head = bool(copies.holes())
    if not to_the_head:
        ids = ids[~table.resident(ids, NVME)]
    wanted: dict[int, bool] = {}
    """Visited blocks: whether all that lies above can be persisted."""
    out: list[int] = []
    for start in ids.tolist():
        climb: list[tuple[int, bool]] = []
        block, good = start, True
        while block != NO_PARENT:
            if block in wanted:
                good = wanted[block]
                break
            residency = int(table.residency[block])
            on_nvme = residency & NVME_BIT != 0
            if on_nvme and not to_the_head:
                break
            climb.append((block, on_nvme))
            if not on_nvme and (residency & DRAM_BIT == 0 or table.state[block] in (COLD, HIDDEN)):
                good = False
                break
            block = int(table.parent[block])
        for visited, on_nvme in reversed(climb):
            wanted[visited] = good
            if good and not on_nvme:
                out.append(visited)
    return np.array(out, np.uint32)
