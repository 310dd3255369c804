"""Blocks whose last copy turned out bad: out of sight at once, gone when nothing needs them, repaired by a store."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.index import MissingParent, PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16


def path_of(tokens: list[int]) -> RowPath:
    return RowPath.from_tokens(tokens, 2)


PATH = path_of([1, 2, 3, 4, 5, 6])


def on_nvme_only() -> tuple[PrefixIndex, NDArray[np.uint32]]:
    index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)
    ids = index.insert(ROOT, PATH, 0, np.arange(3), 7, Use()).ids
    index.add_nvme(ids, np.arange(10, 13))
    assert not index.evict(3).gone.any()
    return index, ids


def test_what_is_behind_a_broken_block_is_not_found_and_is_back_after_a_repair() -> None:
    index, ids = on_nvme_only()
    assert index.break_nvme(ids[1:2]).tolist() == [11]
    assert index.match(ROOT, PATH).ids.tolist() == [ids[0]]
    with pytest.raises(MissingParent):
        index.insert(ROOT, PATH, 2, np.arange(1), 7, Use())
    result = index.insert(ROOT, PATH, 1, np.array([5]), 7, Use())
    assert (result.ids.tolist(), result.is_new.tolist()) == ([ids[1]], [True])
    assert index.match(ROOT, PATH).ids.tolist() == ids.tolist()
    index.check()


def test_a_broken_block_leaves_with_the_last_one_behind_it() -> None:
    index, ids = on_nvme_only()
    index.break_nvme(ids[:2][::-1])
    assert (index.n_blocks, index.n_broken_blocks) == (3, 2)
    assert index.evict_nvme(5).ids.tolist() == [ids[2]]
    assert (index.n_blocks, index.n_broken_blocks, index.n_roots) == (0, 0, 0)
    index.check()


def test_a_pinned_block_stays_though_all_its_copies_broke_and_the_last_block_behind_it_left() -> None:
    index, ids = on_nvme_only()
    index.pin(ids[:2])
    index.break_nvme(ids[1:2])
    assert index.evict_nvme(5).ids.tolist() == [ids[2]]
    assert (index.n_blocks, index.n_broken_blocks) == (2, 1)
    index.check()
    index.unpin(ids[:2])
    assert (index.n_blocks, index.n_broken_blocks) == (1, 0)
    index.check()


def test_all_break_at_once_and_each_leaves_once() -> None:
    index, ids = on_nvme_only()
    assert index.break_nvme(ids).tolist() == [10, 11, 12]
    assert index.n_blocks == 0
    index.check()


def test_a_block_that_breaks_on_nvme_alone_stays_in_dram_and_is_written_again_before_what_follows() -> None:
    index, ids = on_nvme_only()
    index.add_dram(ids, np.arange(3))
    index.break_nvme(ids[:1])
    assert index.match(ROOT, PATH).ids.tolist() == ids.tolist()
    longer = path_of([1, 2, 3, 4, 5, 6, 7, 8])
    new = index.insert(ROOT, longer, 3, np.arange(1), 7, Use()).ids
    assert index.chain_unpersisted(new).tolist() == [ids[0], *new], "what is on NVMe behind it could not be found again"
    index.add_nvme(ids[:1], np.array([20]))
    assert index.chain_unpersisted(new).tolist() == new.tolist()
    index.check()


def test_a_child_can_not_join_nvme_after_its_parent_broke_there() -> None:
    index, ids = on_nvme_only()
    index.add_dram(ids, np.arange(3))
    index.break_nvme(ids[2:])
    index.break_nvme(ids[1:2])
    assert index.may_join_nvme(ids[2:]).tolist() == [False]
    assert index.may_join_nvme(ids[1:]).tolist() == [True, True]
    assert index.may_join_nvme(ids[[1, 1, 2, 0]]).tolist() == [True, False, True, False]
    with pytest.raises(IntegrityError, match="may_join_nvme"):
        index.add_nvme(ids[2:], np.array([30]))
    assert not index.resident(ids[2:], NVME).any()
    index.check()


def test_dram_gives_up_a_last_copy_that_blocks_on_nvme_follow() -> None:
    """Else a broken copy could hold DRAM for as long as NVMe keeps what is behind it."""
    index, ids = on_nvme_only()
    index.add_dram(ids[:1], np.array([4]))
    index.break_nvme(ids[:1])
    evicted = index.evict(1)
    assert (evicted.ids.tolist(), evicted.slots.tolist(), evicted.gone.tolist()) == ([ids[0]], [4], [False])
    assert (index.n_broken_blocks, index.match(ROOT, PATH).n_tokens) == (1, 0)
    index.check()
    index.add_dram(ids[:1], np.array([6]))
    assert index.match(ROOT, PATH).ids.tolist() == ids.tolist()
    assert index.resident(ids, DRAM).tolist() == [True, False, False]
    index.check()


def test_partial_matches_pass_over_broken_neighbours() -> None:
    index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)
    rows = [[5, 1, 1, 1], [5, 6, 1, 1], [5, 6, 7, 2], [5, 6, 7, 4], [5, 6, 8, 8], [5, 9, 9, 9]]
    ids = []
    for row in rows:
        path = RowPath.from_tokens([*row, 1, 1, 1, 1], 4)
        ids.append(index.insert(ROOT, path, 0, np.arange(2), 7, Use()).ids)
        index.add_nvme(ids[-1], np.arange(2))
    index.evict(100)
    asked = RowPath.from_tokens([5, 6, 7, 3], 4)
    assert index.match(ROOT, asked).partial_id in (ids[2][0], ids[3][0])
    for broken, tokens, found in [
        ((2, 3), 2, (1, 4)),
        ((1,), 2, (4,)),
        ((4,), 1, (0, 5)),
        ((0,), 1, (5,)),
        ((5,), 0, ()),
    ]:
        index.break_nvme(np.array([ids[i][0] for i in broken], np.uint32))
        match = index.match(ROOT, asked)
        assert match.n_tokens == match.partial_tokens == tokens
        assert match.partial_id in {ids[i][0] for i in found} or not found
        index.check()
