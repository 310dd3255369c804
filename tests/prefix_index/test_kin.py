"""Rings of blocks that are worth nothing without each other."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.prefix_index.block_table import STORED, BlockTable
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.kin import Kin
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath


@pytest.fixture
def table() -> BlockTable:
    table = BlockTable(16)
    table.state[table.allocate(16)] = STORED
    return table


def others(kin: Kin, *ids: int) -> list[int]:
    found: list[int] = kin.of(np.array(ids, np.uint32)).tolist()
    return found


def test_a_ring_is_known_from_any_of_it(table: BlockTable) -> None:
    kin = Kin(table)
    assert not kin
    assert others(kin, 3) == []
    kin.link(np.array([[0, 1], [2, 3], [4, 5]]))
    assert kin
    assert [others(kin, block) for block in range(6)] == [[2, 4], [3, 5], [0, 4], [1, 5], [0, 2], [1, 3]]
    assert others(kin, 0, 1) == [2, 3, 4, 5]
    assert others(kin, 7) == []


def test_blocks_join_one_after_the_other(table: BlockTable) -> None:
    kin = Kin(table)
    kin.join(np.array([1, 2]), np.array([3, 4]), 4)
    kin.join(np.array([5]), np.array([1]), 4)
    kin.join(np.array([6]), np.array([3]), 4)
    assert others(kin, 5) == [1, 3, 6]
    assert others(kin, 3) == [1, 5, 6]
    assert others(kin, 2) == [4]
    kin.join(np.array([], np.intp), np.array([], np.intp), 4)


def test_a_block_of_another_life_is_in_no_ring(table: BlockTable) -> None:
    kin = Kin(table)
    kin.link(np.array([[0], [1], [2]]))
    table.free(np.array([1], np.uint32))
    assert others(kin, 1) == [0, 2], "it has left a moment ago"
    assert 1 not in others(kin, 0)
    table.state[table.allocate(1)] = STORED
    assert others(kin, 1) == []
    assert set(others(kin, 2)) <= {0}


def test_rings_that_were_linked_anew_in_part_come_to_an_end(table: BlockTable) -> None:
    kin = Kin(table)
    kin.link(np.array([[0], [1], [2], [3]]))
    kin.link(np.array([[1], [2]]))  # 0 leads into it, and not back
    assert set(others(kin, 0)) <= {1, 2, 3}
    assert others(kin, 1) == [2]


def test_the_rest_of_a_ring_goes_first_when_one_is_gone() -> None:
    index = PrefixIndex(make_policy("lru"), reserve_blocks=64)
    paths = [RowPath.from_tokens(np.arange(8, dtype=np.uint32), 2) for _ in range(3)]
    roots = [bytes([i]) * 16 for i in range(3)]
    ids = [
        index.insert(root, path, 0, np.arange(4) + 10 * i, 1, Use()).ids
        for i, (root, path) in enumerate(zip(roots, paths, strict=True))
    ]
    index.kin.link(np.array([ids[0], ids[2]], np.intp))
    assert index.evict(1).ids.tolist() == [ids[0][3]]
    useless = index.evict_useless()
    assert useless is not None
    assert useless.ids.tolist() == [ids[2][3]], "it was used last, but goes before the second's"
    assert index.evict_useless() is None
    index.pin(ids[2])
    assert index.evict(1).ids.tolist() == [ids[0][2]]
    while index.evict_useless() is not None:
        pass
    assert len(index.match(roots[2], paths[2]).ids) == 3, "what is in use stays"
    assert len(index.match(roots[1], paths[1]).ids) == 4, "and nothing goes in its place"
    index.unpin(ids[2])
    index.check()


def test_what_has_others_behind_it_stays_and_nothing_goes_in_its_place() -> None:
    index = PrefixIndex(make_policy("lru"), reserve_blocks=64)
    path = RowPath.from_tokens(np.arange(8, dtype=np.uint32), 2)
    short, long = (
        index.insert(bytes([i]) * 16, path, 0, np.arange(n) + 10 * i, 1, Use()).ids for i, n in ((1, 2), (2, 4))
    )
    index.kin.link(np.array([short, long[:2]], np.intp))
    assert index.evict(1).ids.tolist() == [short[1]]
    useless = index.evict_useless()
    assert useless is not None
    assert len(useless.ids) == 0
    assert index.evict_useless() is None
    assert index.n_blocks == 5
    index.check()
