"""``check`` notices every kind of damage and names the invariant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.node import Node
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.types import ExtraKey

ROOT = b"r" * 16


def store(index: PrefixIndex, tokens: list[int], *extras: ExtraKey) -> None:
    path = RowPath.from_tokens(tokens, 4, extras)
    first = len(index.match(ROOT, path).ids)
    index.insert(ROOT, path, first, np.arange(path.n_rows - first), 1, Use())


def sample() -> PrefixIndex:
    index = PrefixIndex(make_policy("lru"), reserve_blocks=16)
    store(index, list(range(20)))
    store(index, [*range(8), 50, 51, 52, 53, 54, 55])
    store(index, [*range(8), 60, 61, 62, 63], ExtraKey(9, 1, b"i"))
    store(index, [*range(8), 60, 61, 62, 63], ExtraKey(10, 1, b"i"))
    return index


def top(index: PrefixIndex) -> Node:
    kids = index._tree.roots[ROOT].kids
    assert kids
    return kids[0]


def special(index: PrefixIndex) -> Any:
    found = top(index).special
    assert found
    return found


def kids(index: PrefixIndex) -> list[Node]:
    found = top(index).kids
    assert found
    return found


def short_leaf(index: PrefixIndex) -> Node:
    found = kids(index)[1].kids
    assert found
    return found[0]


def bump(column: NDArray[Any], at: int) -> None:
    column[at] += 1


DAMAGE: dict[str, Callable[[PrefixIndex], object]] = {
    "under its own key": lambda i: i._tree.roots.update({b"o" * 16: i._tree.roots[ROOT]}),
    "an empty root disappears": lambda i: i._tree.make_root(b"e" * 16, RowPath.from_tokens([1], 4)),
    "a root has no parent": lambda i: setattr(i._tree.roots[ROOT], "parent", top(i)),
    "children are sorted": lambda i: kids(i).reverse(),
    "sorted and distinct": lambda i: kids(i).__setitem__(0, kids(i)[-1]),
    "a child knows its parent": lambda i: setattr(kids(i)[0], "parent", i._tree.roots[ROOT]),
    "no list of children is empty": lambda i: setattr(kids(i)[0], "kids", []),
    "special children are sorted": lambda i: special(i).kids.reverse(),
    "open parts are sorted": lambda i: special(i).by_open_part.reverse(),
    "both orders hold": lambda i: special(i).by_open_part.pop(),
    "no edge is empty": lambda i: setattr(top(i), "ids", top(i).ids[:0]),
    "one id per row": lambda i: top(i).ids.append(99),
    "block keys are chained": lambda i: bump(i.table.key[0], 3),
    "the table knows the edge": lambda i: i.table.node.__setitem__(2, top(i)),
    "the block before": lambda i: bump(i.table.parent, 1),
    "is alive": lambda i: i.table.state.__setitem__(2, 0),
    "pins are not negative": lambda i: i.table.refs.__setitem__(2, -1),
    "counts the blocks that follow": lambda i: bump(i.table.n_children, 1),
    "the living blocks are those of the tree": lambda i: i.table.state.__setitem__(i.table.allocate(1), 1),
    "every id is free or in use": lambda i: i.table.allocate(1),
    "no id is free and in use": lambda i: i.table._free.append(0),
    "a row is at most one block": lambda i: setattr(kids(i)[0], "head", kids(i)[0].head + bytes(4)),
    "a short block is a leaf": lambda i: setattr(top(i), "head", top(i).head[:8]),
    "whole tokens": lambda i: setattr(short_leaf(i), "head", short_leaf(i).head[:6]),
}


def tiered() -> PrefixIndex:
    """Cold blocks 0 and 1; blocks 2 to 6 of one prompt, all but the last on NVMe too; a second prompt in DRAM."""
    index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)
    keys = RowPath.from_tokens(list(range(200, 208)), 4).keys(ROOT)
    parents = np.concatenate((np.frombuffer(ROOT, np.uint8)[None], keys[:1]))
    n = np.ones(2, np.uint32)
    index.insert_cold(keys, parents, np.array([70, 80]), n, n, 0.0)
    store(index, list(range(20)))
    index.add_nvme(np.arange(2, 6, dtype=np.uint32), np.arange(10, 14))
    store(index, list(range(100, 108)))
    return index


def broken(index: PrefixIndex) -> None:
    """Block 3 of the table has no copy, and those behind it have one on NVMe."""
    index.evict(index.n_dram_blocks)
    index.break_nvme(np.array([3], np.uint32))
    index.check()


TIER_DAMAGE: dict[str, Callable[[PrefixIndex], object]] = {
    "counts the blocks in DRAM that follow": lambda i: bump(i.table.n_dram_children, 2),
    "counts the blocks on NVMe that follow": lambda i: bump(i.table.n_nvme_children, 2),
    "counts the blocks that follow": lambda i: bump(i.table.n_children, 1),
    "the copies of each tier are counted": lambda i: i._copies.n.__setitem__(1, 3),
    "exactly the blocks in DRAM have a slot": lambda i: i.table.slot.__setitem__(3, -1),
    "exactly the blocks on NVMe have a slot there": lambda i: i.table.nvme_slot.__setitem__(0, -1),
    "every cold block is found by its key": lambda i: bump(i.table.key[1], 0),
    "broken blocks are counted": lambda i: setattr(i._copies, "n_broken", 1),
    "a broken block has children or pins": lambda i: lose_all(i, 6),
    "on NVMe are whole chains": lambda i: lose_nvme(i, 3),
    "a cold block has no edge": lambda i: i.table.node.__setitem__(0, top(i)),
    "a free id has no copy": lambda i: i.table.residency.__setitem__(i.evict(1).ids, 1),
    "its evictor forgot it": lambda i: forget(i),
}


def lose_all(index: PrefixIndex, block: int) -> None:
    """A last block loses its DRAM copy, and only that is written down."""
    table = index.table
    table.residency[block], table.slot[block], index._copies.n_broken = 0, -1, 1
    table.n_dram_children[block - 1] -= 1
    index._copies.n[0] -= 1


def lose_nvme(index: PrefixIndex, block: int) -> None:
    table = index.table
    table.residency[block], table.nvme_slot[block] = 1, -1
    table.n_nvme_children[block - 1] -= 1
    index._copies.n[1] -= 1


def forget(index: PrefixIndex) -> None:
    index.evict(1)
    evictor = index._copies.evictors[0]._whole
    evictor._heap.clear()
    evictor._chunk.clear()


def test_the_sample_is_sound() -> None:
    sample().check()
    tiered().check()
    broken(tiered())


@pytest.mark.parametrize("invariant", list(DAMAGE))
def test_check_names_what_is_broken(invariant: str) -> None:
    index = sample()
    DAMAGE[invariant](index)
    with pytest.raises(IntegrityError, match=invariant):
        index.check()


@pytest.mark.parametrize("invariant", list(TIER_DAMAGE))
def test_check_names_what_is_broken_in_tiers(invariant: str) -> None:
    index = tiered()
    index.check()
    TIER_DAMAGE[invariant](index)
    with pytest.raises(IntegrityError, match=invariant):
        index.check()


def test_check_misses_no_block_that_ought_to_be_in_dram() -> None:
    index = sample()
    index.table.residency[3] = 0
    index._copies.n[0] -= 1
    with pytest.raises(IntegrityError, match=r"counts|in DRAM"):
        index.check()
