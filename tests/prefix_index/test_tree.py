"""Shape of the tree: splits, merges, growth, hash rows, many children, and what ``check`` notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import BadInputError
from kvstore.prefix_index import tree as tree_module
from kvstore.prefix_index.block_table import BlockTable, residency_bit
from kvstore.prefix_index.index import MissingParent, PrefixIndex
from kvstore.prefix_index.node import Node, common_prefix_bytes
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.types import ExtraKey

ROOT = b"r" * 16


def new_index() -> PrefixIndex:
    return PrefixIndex(make_policy("lru"), reserve_blocks=16)


def store(index: PrefixIndex, tokens: Any, block_tokens: int = 4, extras: tuple[ExtraKey, ...] = ()) -> list[int]:
    path = RowPath.from_tokens(np.array(tokens, np.uint32), block_tokens, extras)
    first = len(index.match(ROOT, path).ids)
    result = index.insert(ROOT, path, first, np.arange(path.n_rows - first), 1, Use())
    index.check()
    return [int(block) for block in result.ids]


def edges(index: PrefixIndex) -> list[int]:
    """Sizes of all edges, in rows."""
    sizes = []
    todo: list[Node] = list(index._tree.roots.values())
    while todo:
        node = todo.pop()
        todo.extend(node.kids or ())
        todo.extend(node.special.kids if node.special else ())
        if node.ids:
            sizes.append(len(node.ids))
    return sorted(sizes)


def test_a_prompt_is_one_edge_until_another_leaves_it() -> None:
    index = new_index()
    base = list(range(40))
    store(index, base)
    assert edges(index) == [10]
    store(index, [*base[:12], *[99] * 8])
    assert edges(index) == [2, 3, 7]
    gone = index.evict(2)
    assert len(gone.ids) == 2
    index.check()
    assert edges(index) == [3, 7] or edges(index) == [10] or edges(index) == [2, 3, 5]


def test_edges_merge_when_the_branch_is_gone() -> None:
    index = new_index()
    base = list(range(40))
    store(index, base)
    store(index, [*base[:12], *[99] * 8])
    path = RowPath.from_tokens(base, 4)
    index.touch(index.match(ROOT, path).ids, Use(1.0))
    index.evict(2)
    index.check()
    assert edges(index) == [10]
    assert index.match(ROOT, path).n_tokens == 40


def test_long_edges_are_left_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "_MERGE_BYTES_MAX", 100)
    index = new_index()
    base = list(range(40))
    store(index, base)
    store(index, [*base[:12], *[99] * 8])
    path = RowPath.from_tokens(base, 4)
    index.touch(index.match(ROOT, path).ids, Use(1.0))
    index.evict(2)
    index.check()
    assert edges(index) == [3, 7]
    assert index.match(ROOT, path).n_tokens == 40


def test_a_longer_prompt_grows_its_edge() -> None:
    index = new_index()
    for end in range(4, 44, 4):
        store(index, list(range(end)))
    assert edges(index) == [10]


def test_a_short_leaf_gets_a_sibling_never_a_change() -> None:
    index = new_index()
    short = store(index, [1, 2, 3, 4, 5, 6])
    longer = store(index, [1, 2, 3, 4, 5, 6, 7])
    full = store(index, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len({short[1], longer[0], full[0]}) == 3
    assert index.table.parent[[short[1], longer[0], full[0]]].tolist() == [short[0]] * 3
    match = index.match(ROOT, RowPath.from_tokens([1, 2, 3, 4, 5, 6], 4))
    assert (match.ids.tolist(), match.partial_tokens, match.n_tokens) == ([short[0]], 2, 6)


def test_partial_match_stops_before_covered_tokens_of_either_side() -> None:
    index = new_index()
    image = (ExtraKey(6, 1, b"i"),)
    with_image = store(index, [1, 2, 3, 4, 5, 6, 7, 8], extras=image)
    same = index.match(ROOT, RowPath.from_tokens([1, 2, 3, 4, 5, 6, 7, 8], 4, image))
    assert same.ids.tolist() == with_image
    plain = index.match(ROOT, RowPath.from_tokens([1, 2, 3, 4, 5, 6, 7, 8], 4))
    assert (len(plain.ids), plain.partial_id, plain.partial_tokens) == (1, with_image[1], 2)
    other = index.match(ROOT, RowPath.from_tokens([1, 2, 3, 4, 5, 6, 7, 8], 4, (ExtraKey(5, 1, b"j"),)))
    assert (len(other.ids), other.partial_id, other.partial_tokens) == (1, with_image[1], 1)


@pytest.mark.parametrize("row", [0, 1, 2, 4])
def test_an_image_is_never_taken_for_the_plain_tokens_of_an_edge(row: int) -> None:
    index = new_index()
    tokens = list(range(20))
    plain = store(index, tokens)
    covered = RowPath.from_tokens(tokens, 4, (ExtraKey(4 * row + 1, 2, b"i"),))
    match = index.match(ROOT, covered)
    assert (match.ids.tolist(), match.partial_id, match.partial_tokens) == (plain[:row], plain[row], 1)
    ids = index.insert(ROOT, covered, row, np.arange(5 - row), 1, Use())
    index.check()
    assert ids.is_new.all()
    assert index.match(ROOT, covered).ids.tolist() == plain[:row] + ids.ids.tolist()
    assert index.match(ROOT, RowPath.from_tokens(tokens, 4)).ids.tolist() == plain


def test_equal_text_before_two_images_finds_either() -> None:
    index = new_index()
    ids = [store(index, [1, 2, 3, 4], extras=(ExtraKey(2, 1, digest),))[0] for digest in (b"i", b"j", b"k")]
    match = index.match(ROOT, RowPath.from_tokens([1, 2, 9], 4))
    assert match.partial_tokens == 2
    assert match.partial_id in ids
    while index.n_blocks:
        index.evict(1)
        index.check()


def test_hash_rows_match_whole_rows_only() -> None:
    index = new_index()
    data = np.arange(40, dtype=np.uint8).reshape(5, 8)
    index.insert(ROOT, RowPath.from_hashes(data, 8, 16), 0, np.arange(5), 1, Use())
    index.check()
    asked = data.copy()
    asked[3, 7] ^= 1
    match = index.match(ROOT, RowPath.from_hashes(asked, 8, 16))
    assert (len(match.ids), match.partial_id, match.partial_tokens, match.n_tokens) == (3, -1, 0, 48)


@pytest.mark.parametrize("hash_bytes", [1, 4, 17, 25, 64])
def test_hash_rows_of_any_width(hash_bytes: int) -> None:
    rng = np.random.default_rng(hash_bytes)
    index = new_index()
    for _ in range(20):
        data = rng.integers(0, 2, (6, hash_bytes), dtype=np.uint8)
        data[:, 1:] = 7
        path = RowPath.from_hashes(data, hash_bytes)
        first = len(index.match(ROOT, path).ids)
        index.insert(ROOT, path, first, np.arange(6 - first), 1, Use())
        index.check()
        assert len(index.match(ROOT, path).ids) == 6
    while index.n_blocks:
        index.evict(3)
        index.check()


def test_one_root_has_one_kind_of_row() -> None:
    index = new_index()
    store(index, [1, 2, 3, 4])
    for other in (RowPath.from_tokens([1, 2], 2), RowPath.from_hashes(bytes(16), 16)):
        with pytest.raises(BadInputError, match="another block size"):
            index.match(ROOT, other)
        with pytest.raises(BadInputError, match="another block size"):
            index.insert(ROOT, other, 0, np.arange(1), 1, Use())
    index.evict(1)
    assert index.match(ROOT, RowPath.from_tokens([1, 2], 2)).n_tokens == 0


@pytest.mark.parametrize("block_tokens", [1, 16])
def test_thousands_of_children_are_all_found(block_tokens: int) -> None:
    index = new_index()
    order = np.random.default_rng(1).permutation(3000)
    base = np.arange(2 * block_tokens, dtype=np.uint32)
    stored = {}
    for value in order.tolist():
        base[-1] = 10_000 + 2 * value
        path = RowPath.from_tokens(base.copy(), block_tokens)
        first = len(index.match(ROOT, path).ids)
        stored[value] = int(index.insert(ROOT, path, first, np.arange(2 - first), 1, Use()).ids[-1])
    index.check()
    for value in order[:300].tolist():
        base[-1] = 10_000 + 2 * value
        assert index.match(ROOT, RowPath.from_tokens(base, block_tokens)).ids[-1] == stored[value]
        base[-1] += 1
        match = index.match(ROOT, RowPath.from_tokens(base, block_tokens))
        assert match.n_tokens == 2 * block_tokens - 1


@pytest.mark.parametrize("differ_at", [0, 1, 4095, 4096, 16_383, 16_384, 65_535, None])
def test_a_long_edge_is_compared_to_the_token(differ_at: int | None) -> None:
    index = new_index()
    base = np.random.default_rng(2).integers(0, 1 << 32, 65_536, dtype=np.uint32)
    store(index, base, 64)
    asked = base.copy()
    if differ_at is not None:
        asked[differ_at] ^= 1 << 31
    match = index.match(ROOT, RowPath.from_tokens(asked, 64))
    expected = 65_536 if differ_at is None else differ_at
    assert match.n_tokens == expected
    assert (len(match.ids), match.partial_tokens) == divmod(expected, 64)


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 3))
@settings(derandomize=True, deadline=None)
def test_common_prefix_of_any_two_buffers(head: bytes, left: bytes, right: bytes, pad: int) -> None:
    head = head + b"x" * pad * 16_000
    a, b = head + left, head + right
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix_bytes(bytearray(a), memoryview(b)) == n


def test_a_match_changes_nothing() -> None:
    index = new_index()
    store(index, list(range(40)))

    def state() -> tuple[object, ...]:
        return (
            edges(index),
            index.table.rank.tolist(),
            index.table.refs.tolist(),
            index.n_blocks,
            index.n_roots,
        )

    before = state()
    index.match(ROOT, RowPath.from_tokens([*range(20), 7, 7, 7, 7], 4))
    index.match(b"x" * 16, RowPath.from_tokens([1], 4))
    assert state() == before


def test_an_insert_is_a_copy_of_the_callers_tokens() -> None:
    index = new_index()
    tokens = np.arange(40, dtype=np.uint32)
    index.insert(ROOT, RowPath.from_tokens(tokens, 4), 0, np.arange(10), 1, Use())
    kept = tokens.copy()
    tokens[:] = 0
    index.check()
    assert index.match(ROOT, RowPath.from_tokens(kept, 4)).n_tokens == 40


def test_bad_inserts_change_nothing() -> None:
    index = new_index()
    path = RowPath.from_tokens(list(range(12)), 4)
    slots = np.arange(1)
    bad: list[tuple[type[Exception], Callable[[], object]]] = [
        (MissingParent, lambda: index.insert(ROOT, path, 1, slots, 1, Use())),
        (BadInputError, lambda: index.insert(ROOT, path, -1, slots, 1, Use())),
        (BadInputError, lambda: index.insert(ROOT, path, 3, slots, 1, Use())),
        (BadInputError, lambda: index.insert(b"short", path, 0, slots, 1, Use())),
        (BadInputError, lambda: index.insert(ROOT, path, 0, slots, -1, Use())),
        (BadInputError, lambda: index.insert(ROOT, path, 0, slots, 1 << 32, Use())),
    ]
    for error, call in bad:
        with pytest.raises(error):
            call()
        assert (index.n_blocks, index.n_roots) == (0, 0)
        index.check()
    assert len(index.insert(ROOT, path, 2, np.empty(0, np.int64), 1, Use()).ids) == 0
    index.insert(ROOT, path, 0, slots, 1, Use())
    with pytest.raises(MissingParent, match="up to row 1"):
        index.insert(ROOT, path, 2, slots, 1, Use())
    assert index.n_blocks == 1


def test_the_table_knows_each_block() -> None:
    index = new_index()
    path = RowPath.from_tokens(list(range(10)), 4)
    ids = index.insert(ROOT, path, 0, np.array([5, 1 << 40, 7]), 4096, Use(2.5, category=9)).ids
    table = index.table
    assert (table.key[ids] == path.keys(ROOT)).all()
    assert index.slots(ids).tolist() == [5, 1 << 40, 7]
    assert table.size_bytes[ids].tolist() == [4096] * 3
    assert table.last_use_s[ids].tolist() == [2.5] * 3
    assert table.category[ids].tolist() == [9] * 3
    assert table.residency[ids].tolist() == [residency_bit(0)] * 3
    assert table.generation[ids].tolist() == [1] * 3
    index.touch(ids[:1], Use(3.5, category=4))
    assert table.last_use_s[ids].tolist() == [3.5, 2.5, 2.5]
    assert table.category[ids].tolist() == [4, 9, 9]
    index.evict(1)
    again = index.insert(ROOT, path, 2, np.array([8]), 1, Use(4.0))
    assert again.ids.tolist() == [ids[2]]
    assert table.generation[ids[2]] == 2


def test_the_table_grows_and_keeps_what_it_holds() -> None:
    table = BlockTable(16)
    first = table.allocate(10)
    table.slot[first] = np.arange(10) + 100
    table.residency[first] = 1
    table.free(first[3:5])
    assert table.n_blocks == 8
    second = table.allocate(100)
    assert set(first[3:5].tolist()) <= set(second.tolist())
    assert len(set(second.tolist())) == 100
    assert not set(second.tolist()) & set(first[:3].tolist() + first[5:].tolist())
    assert table.slot[first[:3]].tolist() == [100, 101, 102]
    assert table.generation[second].tolist() == [2, 2, *[1] * 98]
    assert table.capacity_blocks >= 108


@pytest.mark.parametrize(("tier", "group"), [(-1, 0), (4, 0), (0, -1), (0, 16)])
def test_residency_bits_have_bounds(tier: int, group: int) -> None:
    with pytest.raises(BadInputError, match=f"tier {tier}, group {group}"):
        residency_bit(tier, group)
    assert residency_bit(3, 15) == 1 << 63
