"""Blocks known by key only: found by the rows of prompts, robust against damaged entries, refused when unsound."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import BadInputError, IntegrityError
from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.index import MissingParent, PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.types import ExtraKey

ROOT, OTHER = b"r" * 16, b"o" * 16

Keys = NDArray[np.uint8]


def new_index() -> PrefixIndex:
    return PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)


def path_of(tokens: list[int], *extras: ExtraKey) -> RowPath:
    return RowPath.from_tokens(tokens, 2, extras)


def chain_of(path: RowPath, root: bytes = ROOT) -> tuple[Keys, Keys]:
    """Keys and parents' keys of all rows."""
    keys = path.keys(root)
    return keys, np.concatenate((np.frombuffer(root, np.uint8)[None], keys[:-1]))


def take_in(index: PrefixIndex, keys: Keys, parents: Keys, tier: int = NVME) -> NDArray[np.uint32]:
    n = len(keys)
    return index.insert_cold(
        keys, parents, np.arange(100, 100 + n), np.full(n, 7, np.uint32), np.arange(n, dtype=np.uint32), 3.0, tier
    )


def test_a_prompt_finds_what_it_shows_and_no_more() -> None:
    index = new_index()
    ids = take_in(index, *chain_of(path_of([1, 2, 3, 4, 5, 6, 7])))
    assert (index.n_blocks, index.n_cold_blocks, index.n_roots) == (4, 4, 0)
    assert index.match(OTHER, path_of([1, 2])).n_tokens == 0
    assert index.match(ROOT, path_of([1, 9, 3, 4])).n_tokens == 0, "tokens of a cold block are not known"
    match = index.match(ROOT, path_of([1, 2, 3, 4, 8, 9]))
    assert match.ids.tolist() == ids[:2].tolist()
    assert (match.n_tokens, index.n_cold_blocks, index.n_roots) == (4, 2, 1)
    assert index.match(ROOT, path_of([1, 9])).n_tokens == 1, "once shown, single tokens are found as ever"
    assert index.match(ROOT, path_of([1, 2, 3, 4, 5, 6, 8])).n_tokens == 6, "a short block needs its whole tail"
    assert index.n_cold_blocks == 1
    match = index.match(ROOT, path_of([1, 2, 3, 4, 5, 6, 7]))
    assert (match.partial_id, match.n_tokens) == (ids[3], 7)
    assert index.n_cold_blocks == 0
    assert index.frame_rows(ids) == [(np.array(r, np.uint32).tobytes(), b"") for r in ([1, 2], [3, 4], [5, 6], [7])]
    index.check()


def test_facts_given_are_kept_and_the_order_given_is_the_order_of_eviction() -> None:
    index = new_index()
    paths = [path_of([i, i]) for i in range(5)]
    keys = np.concatenate([path.keys(ROOT) for path in paths])
    ids = take_in(index, keys, np.tile(np.frombuffer(ROOT, np.uint8), (5, 1)))
    assert index.nvme_slots(ids).tolist() == [100, 101, 102, 103, 104]
    assert index.slots(ids).tolist() == [-1] * 5
    assert index.table.namespace[ids].tolist() == [0, 1, 2, 3, 4]
    assert index.table.last_use_s[ids].tolist() == [3.0] * 5
    assert index.parent_keys(ids).tobytes() == ROOT * 5
    index.touch(index.match(ROOT, paths[1]).ids, Use(4.0))
    index.pin(ids[2:3])
    evicted = index.evict_nvme(9)
    assert evicted.slots.tolist() == [100, 103, 104, 101]
    assert evicted.gone.all()
    assert index.n_blocks == 1
    index.check()


def test_a_tier_that_holds_nothing_is_taken_in() -> None:
    index = new_index()
    none = np.empty((0, 16), np.uint8)
    assert take_in(index, none, none).tolist() == []
    assert index.n_blocks == 0
    index.check()


def test_extra_keys_count() -> None:
    index = new_index()
    shown = path_of([1, 2, 3, 4], ExtraKey(3, 1, b"cat"))
    ids = take_in(index, *chain_of(shown))
    assert index.match(ROOT, path_of([1, 2, 3, 4], ExtraKey(3, 1, b"dog"))).ids.tolist() == [ids[0]]
    assert index.match(ROOT, path_of([1, 2, 3, 4])).ids.tolist() == [ids[0]]
    assert index.match(ROOT, shown).ids.tolist() == ids.tolist()
    (_, plain), (row, digest) = index.frame_rows(ids)
    assert (row, plain, len(digest)) == (shown.row(1), b"", 16)


def test_a_row_that_is_not_known_can_not_be_written() -> None:
    index = new_index()
    keys, parents = chain_of(path_of([1, 2, 3, 4]))
    ids = take_in(index, keys, parents, DRAM)
    with pytest.raises(BadInputError, match="cold"):
        index.frame_rows(ids)
    assert index.chain_unpersisted(ids).tolist() == []
    index.match(ROOT, path_of([1, 2, 5, 6]))
    assert index.chain_unpersisted(ids).tolist() == [ids[0]]
    index.match(ROOT, path_of([1, 2, 3, 4]))
    assert index.chain_unpersisted(ids[::-1]).tolist() == ids.tolist()


def test_dram_may_hold_what_nvme_has_and_more() -> None:
    index = new_index()
    keys, parents = chain_of(path_of([1, 2, 3, 4, 5, 6]))
    on_nvme = take_in(index, keys[:2], parents[:2])
    in_dram = take_in(index, keys[1:], parents[1:], DRAM)
    assert in_dram[0] == on_nvme[1]
    assert index.resident(in_dram, DRAM).all()
    assert index.resident(in_dram, NVME).tolist() == [True, False]
    assert index.match(ROOT, path_of([1, 2, 3, 4, 5, 6])).ids.tolist() == [*on_nvme, in_dram[1]]
    index.check()


def test_an_entry_that_lies_about_its_parent_is_no_hit() -> None:
    index = new_index()
    keys, parents = chain_of(path_of([1, 2, 3, 4, 5, 6]))
    other = path_of([1, 2, 7, 8]).keys(ROOT)[1:]
    parents[1] = np.frombuffer(ROOT, np.uint8)
    take_in(index, np.concatenate((keys, other)), np.concatenate((parents, keys[:1])))
    assert index.match(ROOT, path_of([1, 2, 3, 4, 5, 6])).n_tokens == 2
    assert index.match(ROOT, path_of([1, 2, 7, 8])).n_tokens == 4
    index.check()


def test_keys_with_the_same_beginning_are_told_apart() -> None:
    index = new_index()
    keys, parents = chain_of(path_of([1, 2, 3, 4, 5, 6]))
    likes = np.repeat(keys, 2, axis=0)
    likes[:, 15] ^= np.arange(1, 7, dtype=np.uint8)
    # A child of one that looks like another block stays below just that.
    below = likes.copy()
    below[:, 0] ^= 255
    roots = np.tile(np.frombuffer(ROOT, np.uint8), (6, 1))
    ids = take_in(index, np.concatenate((likes, keys, below)), np.concatenate((roots, parents, likes)))
    assert index.match(ROOT, path_of([1, 2, 3, 4, 5, 6])).ids.tolist() == ids[6:9].tolist()
    assert index.parent_keys(ids[9:]).tolist() == likes.tolist()
    index.check()


def test_what_is_unsound_is_refused_and_changes_nothing() -> None:
    index = new_index()
    keys, parents = chain_of(path_of([1, 2, 3, 4]))
    with pytest.raises(BadInputError, match="given twice"):
        take_in(index, keys[[0, 1, 0]], parents[[0, 1, 0]])
    with pytest.raises(BadInputError, match="parents first"):
        take_in(index, keys[::-1], parents[::-1])
    with pytest.raises(BadInputError, match="parents first"):
        take_in(index, keys[:1], keys[:1])
    assert index.n_blocks == 0
    take_in(index, keys[:1], parents[:1])
    with pytest.raises(IntegrityError, match="already"):
        take_in(index, keys[:1], parents[:1])
    take_in(index, keys[1:], parents[1:], DRAM)
    more, before = chain_of(path_of([1, 2, 3, 4, 5, 6]))
    with pytest.raises(IntegrityError, match="closed"):
        take_in(index, more[2:], before[2:])
    index.match(ROOT, path_of([1, 2]))
    with pytest.raises(IntegrityError, match="first"):
        take_in(index, more[2:], before[2:], DRAM)
    assert index.n_blocks == 2
    index.check()


def test_an_unknown_parent_is_a_root() -> None:
    index = new_index()
    keys, parents = chain_of(path_of([1, 2, 3, 4]))
    ids = take_in(index, keys[1:], parents[1:])
    assert index.match(ROOT, path_of([1, 2, 3, 4])).n_tokens == 0
    assert index.parent_keys(ids).tolist() == parents[1:].tolist()
    assert index.evict_nvme(1).gone.all()
    index.check()


def test_inserting_behind_cold_blocks_takes_them_in() -> None:
    index = new_index()
    path = path_of([1, 2, 3, 4, 5])
    ids = take_in(index, *chain_of(path_of([1, 2, 3, 4])))
    with pytest.raises(MissingParent):
        index.insert(ROOT, path_of([9, 9, 8, 8]), 1, np.arange(1), 7, Use())
    result = index.insert(ROOT, path, 1, np.array([5, 6]), 7, Use())
    assert result.is_new.tolist() == [True, True], "the second block is on NVMe only: it takes the new slot"
    assert result.ids[0] == ids[1]
    assert (index.n_cold_blocks, index.n_dram_blocks, index.n_nvme_blocks) == (0, 2, 2)
    index.check()


def test_broken_cold_blocks_part_from_what_is_behind_them() -> None:
    index = new_index()
    path = path_of([1, 2, 3, 4, 5, 6])
    ids = take_in(index, *chain_of(path))
    index.pin(ids[2:])
    assert index.break_nvme(ids[1:2]).tolist() == [101]
    assert index.match(ROOT, path).ids.tolist() == [ids[0]]
    index.check()
    assert index.break_nvme(ids[2:]).tolist() == [102]
    assert index.n_blocks == 3, "what is pinned stays, and what is before it"
    index.unpin(ids[2:])
    assert (index.n_blocks, index.n_broken_blocks) == (1, 0)
    index.check()


def test_a_large_tier_in_several_batches_equals_a_dictionary() -> None:
    rng = np.random.default_rng(1)
    n = 4000
    keys = rng.integers(0, 256, (n, 16), np.uint8)
    keys[::7, :7] = 9  # beginnings that are much alike
    parents = np.empty_like(keys)
    at = [int(rng.integers(-1, i)) if i % 5 else -1 for i in range(n)]
    for i, parent in enumerate(at):
        parents[i] = keys[parent] if parent >= 0 else np.frombuffer((ROOT, OTHER)[i % 2], np.uint8)
    index = new_index()
    ids = np.concatenate([take_in(index, keys[a : a + 1000], parents[a : a + 1000]) for a in range(0, n, 1000)])
    index.check()
    assert (index.table.key[ids] == keys).all()
    assert (index.parent_keys(ids) == parents).all()
    children = np.bincount([i for i in at if i >= 0], minlength=n)
    dice = random.Random(2)
    left = dict(enumerate(ids.tolist()))
    while left:
        leaves = [i for i in left if children[i] == 0]
        assert index.coldest(1).tolist() == []
        evicted = index.evict_nvme(1)
        assert evicted.ids.tolist() == [left.pop(min(leaves))]
        first = min(leaves)
        if at[first] >= 0:
            children[at[first]] -= 1
        if dice.random() < 0.01:
            some = dice.sample(sorted(left), min(len(left), 50))
            assert index._cold.find(keys[some]).tolist() == [left[i] for i in some]
            assert (index._cold.find(keys[[i for i in range(n) if i not in left]]) == 0xFFFFFFFF).all()
    assert index.n_blocks == 0
    index.check()


@pytest.mark.parametrize("seed", range(20))
def test_dram_kept_over_a_restart_needs_no_nvme(seed: int) -> None:
    results = []
    for nvme, most in ((False, 5), (True, 5), (False, 1)):
        dice = random.Random(seed)
        source = PrefixIndex(make_policy("lru"), reserve_blocks=16)
        paths = [path_of([dice.randrange(3) for _ in range(dice.randrange(1, 16))]) for _ in range(12)]
        for path in paths:
            source.insert(ROOT, path, 0, np.arange(path.n_rows), 7, Use())
        ids = source.table.alive()
        index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=nvme)
        take_in(index, source.table.key[ids], source.parent_keys(ids), DRAM)
        out: list[object] = []
        while index.n_blocks:
            match = index.match(ROOT, dice.choice(paths))
            out.append((match.n_tokens, index.slots(match.ids).tolist()))
            index.touch(match.ids[: dice.randrange(9)], Use(1.0))
            index.check()
            left = dice.randrange(6)
            while left > 0:
                out += index.evict(min(left, most)).slots.tolist()
                left -= most
                index.check()
        results.append(out)
    assert results[0] == results[1] == results[2]
