"""Every structural invariant of the index, verified from the outside. For tests and for doubt."""

from __future__ import annotations

import numpy as np

from kvstore.errors import IntegrityError
from kvstore.prefix_index.block_table import COLD, DRAM, FREE, HIDDEN, NO_PARENT, NVME, STORED, BlockTable, Ids
from kvstore.prefix_index.cold import ColdBlocks
from kvstore.prefix_index.copies import Copies
from kvstore.prefix_index.keys import block_key, part_key
from kvstore.prefix_index.node import Node, RootNode, open_part
from kvstore.prefix_index.rows import EXTRA_SUFFIX_BYTES
from kvstore.prefix_index.tree import RadixTree
from kvstore.types import TOKEN_BYTES


def check_index(tree: RadixTree, table: BlockTable, copies: Copies, cold: ColdBlocks) -> None:
    """Raises IntegrityError naming the first broken invariant. Visits every block and hashes its row."""
    seen: list[int] = []
    for root_key, root in tree.roots.items():
        _require(root.root_key == root_key, "a root is filed under its own key")
        _require(root.parent is None and not root.ids and not root.rest, "a root has no parent and no rows")
        _require(root.n_kids > 0, "an empty root disappears")
        todo: list[Node] = [root]
        while todo:
            node = todo.pop()
            if not isinstance(node, RootNode):
                _check_edge(node, root)
                _check_blocks(node, root, table)
                seen.extend(node.ids)
            _check_kids(node, root)
            todo.extend(node.kids or ())
            todo.extend(node.special.kids if node.special else ())
    _check_table(table, np.array(seen, np.uint32))
    _check_counts(table)
    _check_parts(table)
    _check_copies(table, copies)
    cold.check()
    for evictor in copies.evictors:
        evictor.check()
    if copies.above is not None:
        copies.above.check()
    _check_tenants(copies)


def _require(holds: bool, invariant: str, where: object = "") -> None:
    if not holds:
        raise IntegrityError(f"the index is inconsistent: not true that {invariant} {where}".rstrip())


def is_special(node: Node, root: RootNode) -> bool:
    """Whether extra keys cover the node's row, by the length of its head."""
    return root.unit_bytes != root.row_bytes and len(node.head) % TOKEN_BYTES == EXTRA_SUFFIX_BYTES % TOKEN_BYTES


def _row_and_digest(node: Node, root: RootNode, i: int) -> tuple[bytes, bytes]:
    if i:
        return bytes(node.rest[(i - 1) * root.row_bytes : i * root.row_bytes]), b""
    if is_special(node, root):
        cut = len(node.head) - EXTRA_SUFFIX_BYTES
        return node.head[:cut], node.head[cut : cut + 16]
    return node.head, b""


def _check_edge(node: Node, root: RootNode) -> None:
    _require(len(node.ids) > 0, "no edge is empty")
    _require(len(node.rest) == (len(node.ids) - 1) * root.row_bytes, "an edge has one id per row", node.ids[0])
    row, _ = _row_and_digest(node, root, 0)
    _require(0 < len(row) <= root.row_bytes, "a row is at most one block long", node.ids[0])
    if len(row) < root.row_bytes:
        _require(root.unit_bytes != root.row_bytes, "only token rows may be short", node.ids[0])
        _require(node.n_kids == 0, "a short block is a leaf", node.ids[0])
        _require(len(row) % root.unit_bytes == 0, "a short row is whole tokens", node.ids[0])
    if len(row) < root.row_bytes or is_special(node, root):
        _require(len(node.ids) == 1, "a short row or one with extra keys is alone in its edge", node.ids[0])


def _check_blocks(node: Node, root: RootNode, table: BlockTable) -> None:
    above = node.above()
    parent = above.ids[-1] if above.ids else NO_PARENT
    for i, block in enumerate(node.ids):
        _require(table.node[block] is node, "the table knows the edge of a block", block)
        _require(int(table.parent[block]) == parent, "the table knows the block before a block", block)
        _require(int(table.state[block]) == STORED, "a block in the tree is alive", block)
        before = root.root_key if parent == NO_PARENT else table.key[parent].tobytes()
        row, digest = _row_and_digest(node, root, i)
        _require(table.key[block].tobytes() == block_key(before, row, digest), "block keys are chained", block)
        parent = block


def _check_kids(node: Node, root: RootNode) -> None:
    for kid in [*(node.kids or ()), *(node.special.kids if node.special else ())]:
        _require(kid.parent is node, "a child knows its parent", kid.ids[:1])
    _require(node.kids is None or len(node.kids) > 0, "no list of children is empty")
    heads = [kid.head for kid in node.kids or ()]
    _require(heads == sorted(set(heads)), "children are sorted and distinct")
    _require(not any(is_special(kid, root) for kid in node.kids or ()), "plain children have no extra keys")
    if node.special is not None:
        heads = [kid.head for kid in node.special.kids]
        _require(len(heads) > 0 and heads == sorted(set(heads)), "special children are sorted and distinct")
        _require(all(is_special(kid, root) for kid in node.special.kids), "special children have extra keys")
        parts = [open_part(kid) for kid in node.special.by_open_part]
        _require(parts == sorted(parts), "open parts are sorted")
        _require(
            sorted(map(id, node.special.kids)) == sorted(map(id, node.special.by_open_part)),
            "both orders hold the same special children",
        )


def _check_table(table: BlockTable, seen: Ids) -> None:
    _require(len(np.unique(seen)) == len(seen), "no block is in the tree twice")
    alive = table.alive()
    in_tree = alive[table.state[alive] == STORED]
    _require(np.array_equal(np.sort(seen), in_tree), "the living blocks are those of the tree")
    free = table.free_ids()
    _require(len(np.unique(free)) == len(free), "no id is free twice")
    _require(not np.intersect1d(free, alive).size, "no id is free and in use")
    _require(table.n_blocks == len(alive), "every id is free or in use")
    _require(all(node is None for node in table.node[free]), "a free id has no edge")
    _require(not table.residency[free].any(), "a free id has no copy")
    _require(table.n_hidden == int((table.state[alive] == HIDDEN).sum()), "hidden blocks are counted")
    cold = alive[table.state[alive] == COLD]
    _require(all(node is None for node in table.node[cold]), "a cold block has no edge")


def _check_parts(table: BlockTable) -> None:
    _require(bool(table.parts) or not table.n_parts, "parts have columns")
    if not table.parts:
        return
    parts = np.flatnonzero(table.part[: table.n_used])
    _require(table.n_parts == len(parts), "parts are counted")
    _require(table.n_spare == int(table.spare[: table.n_used].sum()), "spare parts are counted")
    _require(not table.spare[table.part == 0].any(), "only parts are spare")
    _require(bool((table.state[parts] != FREE).all()), "a part is alive")
    _require(not table.n_children[parts].any(), "nothing follows a part")
    for part in parts.tolist():
        block, number = int(table.parent[part]), int(table.part[part])
        _require(block != NO_PARENT and int(table.parts[number - 1][block]) == part + 1, "a block knows its part", part)
        _require(table.key[part].tobytes() == part_key(table.key[block].tobytes(), number), "a part has its key", part)
    known = sum(int(np.count_nonzero(column[: table.n_used])) for column in table.parts)
    _require(known == len(parts), "what a block knows as its part is one")


def _check_counts(table: BlockTable) -> None:
    alive = table.alive()
    _require(bool((table.refs[alive] >= 0).all()), "pins are not negative")
    children = alive[table.parent[alive] != NO_PARENT]
    parents = table.parent[children]
    _require(bool((table.state[parents] != FREE).all()), "the block before a block is alive")
    everyone = np.ones(len(children), np.bool_)
    columns = [("", everyone, table.n_children)]
    if table.nvme:
        columns.append(("in DRAM ", table.resident(children, DRAM), table.n_dram_children))
        columns.append(("on NVMe ", table.resident(children, NVME), table.n_nvme_children))
    for where, counted, column in columns:
        n = np.bincount(parents[counted], minlength=table.n_used)
        wrong = alive[n[alive] != column[alive]]
        _require(not len(wrong), f"the table counts the blocks {where}that follow a block", wrong[:1])


def _check_copies(table: BlockTable, copies: Copies) -> None:
    alive = table.alive()
    in_dram, on_nvme = table.resident(alive, DRAM), table.resident(alive, NVME)
    _require(copies.n == [int(in_dram.sum()), int(on_nvme.sum())], "the copies of each tier are counted")
    if not table.nvme:
        _require(bool(in_dram[table.state[alive] != HIDDEN].all()), "without NVMe every block is in DRAM")
        return
    _require(np.array_equal(table.slot[alive] >= 0, in_dram), "exactly the blocks in DRAM have a slot")
    _require(np.array_equal(table.nvme_slot[alive] >= 0, on_nvme), "exactly the blocks on NVMe have a slot there")
    broken = alive[~in_dram & ~on_nvme]
    _require(copies.n_broken == len(broken), "broken blocks are counted")
    needless = broken[(table.n_children[broken] == 0) & (table.refs[broken] == 0) & (table.state[broken] != HIDDEN)]
    _require(not len(needless), "a broken block has children or pins", needless[:1])
    parents = table.parent[alive[on_nvme]]
    parents = parents[parents != NO_PARENT]
    open_ends = set(parents[~table.resident(parents, NVME) & (table.state[parents] != HIDDEN)].tolist())
    _require(open_ends == copies.holes(), "on NVMe are whole chains, but for copies that broke", open_ends)


def _check_tenants(copies: Copies) -> None:
    used = copies.tenants.used_bytes
    _require(np.array_equal(copies.tenants.census(), used), "what each tenant has is counted")
    present = np.count_nonzero(used > 0, axis=1).tolist()
    _require(copies.tenants.n_present == present, "tenants that have something are counted")
