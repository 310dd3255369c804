"""New blocks for rows of a prompt that are not in the tree yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVStoreError
from kvstore.prefix_index.block_table import DRAM, DRAM_BIT, NO_PARENT, STORED, BlockTable, Ids
from kvstore.prefix_index.copies import Copies
from kvstore.prefix_index.rows import RowPath
from kvstore.prefix_index.tree import RadixTree, Stop


class MissingParent(KVStoreError):  # noqa: N818 - it names what is missing, not a fault
    """Rows can't be stored because an earlier row of their path isn't; nothing was changed."""


class Inserted(NamedTuple):
    """Blocks of the rows asked for. ``is_new``: the slot was taken; else a block that is in DRAM already stays,
    and its slot too."""

    ids: Ids
    is_new: NDArray[np.bool_]


def add_blocks(
    tree: RadixTree,
    table: BlockTable,
    copies: Copies,
    root_key: bytes,
    path: RowPath,
    stop: Stop,
    end: int,
    slots: NDArray[np.int64],
) -> Ids:
    """Blocks for the rows behind ``stop`` up to ``end``, in tree and table; size and use are left to fill."""
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
    table.residency[ids] = DRAM_BIT
    table.state[ids] = STORED
    if table.nvme:
        table.n_dram_children[ids] = table.n_children[ids]
        if parent != NO_PARENT:
            table.n_dram_children[parent] += 1
    table.clear_places(ids)
    copies.n[DRAM] += n_new
    tree.grow(stop, path, end, ids)
    return ids
