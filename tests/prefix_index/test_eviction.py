"""Which block goes first: exact order for any ranks, and pins."""

from __future__ import annotations

import gc
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.errors import ConfigError, IntegrityError
from kvstore.prefix_index import evictor as evictor_module
from kvstore.prefix_index.block_table import At, BlockTable, Ids
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policies.lru import LruPolicy
from kvstore.prefix_index.policy import EvictionPolicy, Use
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16


class LotteryPolicy(EvictionPolicy):
    """Every access draws a new rank from a few values, so that order is arbitrary and ties are common."""

    name = "lottery"

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.moved: dict[int, float] = {}

    def accessed(self, ids: At, use: Use) -> float:  # noqa: ARG002
        for block in ids.tolist():
            self.set_ranks(np.array([block]), float(self.random.randrange(50)))
        return -math.inf

    def inserted(self, ids: At, use: Use) -> None:
        self.accessed(ids, use)

    def demoted(self, ids: At) -> None:
        self.evicted(ids)
        self.set_ranks(ids, -1.0)

    def evicted(self, ids: At) -> None:
        for block in ids.tolist():
            self.moved.pop(block, None)

    def rank(self, ids: At, tier: int) -> NDArray[np.float64]:
        ranks = self.table.ranks(tier)
        return np.array([self.moved.get(b, ranks[b]) for b in ids.tolist()], np.float64)


def lowest_leaf_rank(index: PrefixIndex) -> float | None:
    """By brute force over the table's parents, without its child counts."""
    table = index.table
    alive = table.alive().tolist()
    parents = set(table.parent[alive].tolist())
    return min((float(table.rank[b]) for b in alive if b not in parents and table.refs[b] == 0), default=None)


def path_of(tokens: list[int]) -> RowPath:
    return RowPath.from_tokens(np.array(tokens, np.uint32), 2)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "touch", "pin", "unpin", "evict", "evict", "version"]),
        st.integers(0, 1 << 30),
    ),
    min_size=5,
    max_size=60,
)


@pytest.mark.parametrize("snapshot_min", [1, 3, 4096])
@given(operations=OPERATIONS, seed=st.integers(0, 1 << 30))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_each_evicted_block_has_the_lowest_rank_of_all_leaves(
    snapshot_min: int, operations: list[tuple[str, int]], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evictor_module, "_SNAPSHOT_MIN", snapshot_min)
        patch.setattr(evictor_module, "_CHUNK", 2)
        patch.setattr(evictor_module, "_HEAP_SLACK", 4)
        policy = LotteryPolicy(seed)
        index = PrefixIndex(policy, reserve_blocks=16)
        pinned: list[NDArray[np.uint32]] = []
        for what, number in operations:
            apply(index, policy, pinned, what, number)
        index.check()
        for ids in pinned:
            index.unpin(ids)
        evict_by_brute_force(index, 1 << 20)
        assert index.n_blocks == 0


def apply(index: PrefixIndex, policy: LotteryPolicy, pinned: list[NDArray[np.uint32]], what: str, number: int) -> None:
    dice = random.Random(number)
    path = path_of([dice.randrange(2) for _ in range(dice.randrange(1, 14))])
    match = index.match(ROOT, path)
    if what == "insert":
        first = len(match.ids)
        index.insert(ROOT, path, first, np.zeros(path.n_rows - first, np.int64), 1, Use())
    elif what == "touch":
        index.touch(match.ids, Use())
    elif what == "pin":
        index.pin(match.ids)
        pinned.append(match.ids)
    elif what == "unpin" and pinned:
        index.unpin(pinned.pop(number % len(pinned)))
    elif what == "evict":
        evict_by_brute_force(index, number % 5)
    elif what == "version":
        leaves = index.table.alive().tolist()
        policy.moved = {b: float(dice.randrange(50)) for b in leaves}
        index.table.rank[leaves] = [policy.moved[b] for b in leaves]
        policy.version += 1


def evict_by_brute_force(index: PrefixIndex, n: int) -> None:
    for _ in range(n):
        expected = lowest_leaf_rank(index)
        ranks = index.table.rank.copy()
        gone = index.evict(1)
        if expected is None:
            assert len(gone.ids) == 0
            return
        assert ranks[gone.ids].tolist() == [expected]


@given(seed=st.integers(0, 1 << 30), n=st.integers(1, 40))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_many_at_once_are_the_same_as_one_by_one(seed: int, n: int) -> None:
    slots = []
    for step in (n, 1):
        dice = random.Random(seed)
        index = PrefixIndex(make_policy("lru"))
        for _ in range(12):
            path = path_of([dice.randrange(3) for _ in range(dice.randrange(1, 20))])
            match = index.match(ROOT, path)
            index.touch(match.ids, Use())
            first = len(match.ids)
            index.insert(
                ROOT,
                path,
                first,
                np.array([dice.randrange(1 << 40) for _ in range(path.n_rows - first)]),
                1,
                Use(),
            )
        out: list[int] = []
        while len(out) < n and index.n_blocks:
            out.extend(index.evict(min(step, n - len(out))).slots.tolist())
            index.check()
        slots.append(out)
    assert slots[0] == slots[1]


def test_the_tail_goes_first_and_a_touched_head_stays() -> None:
    index = PrefixIndex(make_policy("lru"))
    path = path_of(list(range(8)))
    index.insert(ROOT, path, 0, np.array([1, 2, 3, 4]), 5, Use())
    index.touch(index.match(ROOT, path).ids[:2], Use(1.0))
    gone = index.evict(2)
    assert gone.slots.tolist() == [4, 3]
    assert gone.size_bytes.tolist() == [5, 5]
    assert (gone.keys == path.keys(ROOT)[[3, 2]]).all()
    assert index.match(ROOT, path).n_tokens == 4


def test_each_access_ranks_a_path_from_its_head_down_and_above_all_before() -> None:
    index = PrefixIndex(make_policy("lru"))
    ids = index.insert(ROOT, path_of(list(range(8))), 0, np.arange(4), 1, Use()).ids
    first = index.table.rank[ids]
    assert (np.diff(first) < 0).all()
    index.touch(ids[:3], Use(1.0))
    second = index.table.rank[ids]
    assert (np.diff(second) < 0).all()
    assert second[:3].min() > first.max()
    assert second[3] == first[3]


def test_pinned_blocks_and_their_ancestors_stay() -> None:
    index = PrefixIndex(make_policy("lru"))
    path = path_of(list(range(8)))
    ids = index.insert(ROOT, path, 0, np.arange(4), 1, Use()).ids
    index.pin(ids[1:2])
    assert index.evict(10).slots.tolist() == [3, 2]
    assert len(index.evict(10).ids) == 0
    index.pin(ids[1:2])
    index.unpin(ids[1:2])
    assert len(index.evict(10).ids) == 0
    index.unpin(ids[1:2])
    assert index.evict(10).slots.tolist() == [1, 0]
    assert (index.n_blocks, index.n_roots) == (0, 0)


def test_unpinning_what_is_not_pinned_is_an_error_and_changes_nothing() -> None:
    index = PrefixIndex(make_policy("lru"))
    ids = index.insert(ROOT, path_of([1, 2, 3, 4]), 0, np.arange(2), 1, Use()).ids
    index.pin(ids[:1])
    with pytest.raises(IntegrityError, match="more often"):
        index.unpin(ids)
    assert index.table.refs[ids].tolist() == [1, 0]


def test_ten_thousand_questions_pin_nothing() -> None:
    index = PrefixIndex(make_policy("lru"))
    path = path_of(list(range(64)))
    index.insert(ROOT, path, 0, np.arange(32), 1, Use())
    for _ in range(10_000):
        index.match(ROOT, path)
    assert len(index.evict(32).ids) == 32


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each look at the whole table."""
    looks: list[int] = []
    look = BlockTable.all_evictable

    def counted(table: BlockTable, tier: int = 0) -> Ids:
        looks.append(1)
        return look(table, tier)

    monkeypatch.setattr(BlockTable, "all_evictable", counted)
    return looks


def test_asking_in_vain_takes_no_new_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    index = PrefixIndex(make_policy("lru"))
    ids = index.insert(ROOT, path_of([1, 2, 3, 4]), 0, np.arange(2), 1, Use()).ids
    index.pin(ids)
    looks = count_looks(monkeypatch)
    counts = []
    for _ in range(5):
        assert len(index.evict(1).ids) == 0
        counts.append(len(looks))
    index.unpin(ids)
    assert index.evict(5).slots.tolist() == [1, 0]
    assert counts == [counts[0]] * 5, "only the first question may look at the whole table"


def test_steady_eviction_seldom_looks_at_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    index = PrefixIndex(make_policy("lru"))
    looks = count_looks(monkeypatch)
    for i in range(3000):
        path = path_of([i, 1, 2, 3, 4, 5, 6, 7])
        if index.n_blocks >= 400:
            assert len(index.evict(4).ids) == 4
        index.insert(ROOT, path, 0, np.arange(4), 1, Use(float(i)))
    assert len(looks) <= 3000 * 4 // 400 + 2


def test_a_long_prompt_is_given_up_block_by_block_with_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    index = PrefixIndex(make_policy("lru"))
    index.insert(ROOT, path_of(list(range(400))), 0, np.arange(200), 1, Use())
    looks = count_looks(monkeypatch)
    assert [int(index.evict(1).slots[0]) for _ in range(200)] == list(range(199, -1, -1))
    assert len(looks) == 1


def test_the_heap_stays_small_whatever_is_touched_and_pinned() -> None:
    index = PrefixIndex(make_policy("lru"))
    for i in range(20):
        index.insert(ROOT, path_of([i, i]), 0, np.arange(1), 1, Use())
    index.evict(1)
    newest = index.match(ROOT, path_of([19, 19])).ids
    for _ in range(500):
        index.touch(newest, Use())
    assert len(index._copies.evictors[0]._whole._heap) == 0, "what was used since the snapshot lies behind its bound"
    oldest = index.match(ROOT, path_of([1, 1])).ids
    for _ in range(3000):
        index.pin(oldest)
        index.unpin(oldest)
    assert len(index._copies.evictors[0]._whole._heap) <= evictor_module._HEAP_SLACK + 2 * 20
    assert index.evict(1).ids.tolist() == oldest.tolist()


def test_nothing_is_left_for_the_cycle_collector() -> None:
    index = PrefixIndex(make_policy("lru"))
    dice = random.Random(3)
    for _ in range(200):
        path = path_of([dice.randrange(4) for _ in range(dice.randrange(1, 30))])
        first = len(index.match(ROOT, path).ids)
        index.insert(ROOT, path, first, np.zeros(path.n_rows - first, np.int64), 1, Use())
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        while index.n_blocks:
            index.evict(7)
        assert not own_garbage()
        # And a cycle would have been seen:
        cycle = Cycle()
        cycle.append(cycle)
        del cycle
        assert own_garbage() == ["Cycle"]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


class Cycle(list[Any]):
    __module__ = "kvstore.prefix_index.cycle"


def own_garbage() -> list[str]:
    """Kinds of objects of the index that only the collector found; threads of other tests may leave theirs."""
    gc.collect()
    return [type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("kvstore.prefix_index")]


def test_policies_by_name() -> None:
    assert isinstance(make_policy("lru"), LruPolicy)
    with pytest.raises(ConfigError, match=r"'mru'.*lru"):
        make_policy("mru")
    with pytest.raises(ConfigError, match="windows"):
        make_policy("lru", windows=3)


class FadingPolicy(EvictionPolicy):
    """The oldest use first, but what has just been used ranks above everything until ranks are next asked for."""

    name = "fading"

    def accessed(self, ids: At, use: Use) -> float:  # noqa: ARG002
        self.set_ranks(ids, 1e9)
        return 1e9

    def inserted(self, ids: At, use: Use) -> None:
        self.accessed(ids, use)

    def demoted(self, ids: At) -> None:  # noqa: ARG002
        raise AssertionError("nothing is demoted here")

    def rank(self, ids: At, tier: int) -> NDArray[np.float64]:  # noqa: ARG002
        return self.table.last_use_s[ids]


@pytest.mark.parametrize(("moves", "gone"), [(True, [1, 1, 1]), (False, [1, 2, 3])])
def test_a_parent_that_becomes_a_leaf_has_the_rank_of_the_moment_if_ranks_move(moves: bool, gone: list[int]) -> None:
    policy = FadingPolicy()
    policy.moves = moves
    index = PrefixIndex(policy)
    for number, n_blocks in ((1, 3), (2, 1), (3, 1), (4, 1)):
        index.insert(ROOT, path_of([number] * 2 * n_blocks), 0, np.zeros(n_blocks, np.int64), 1, Use(float(number)))
    used_s = index.table.last_use_s.copy()
    assert used_s[index.evict(3).ids].tolist() == gone


def test_blocks_of_some_slots_go_first_and_the_others_keep_their_turn() -> None:
    index = PrefixIndex(make_policy("lru"))
    for number in range(6):  # slots 0..5, oldest first, each a prompt of its own
        index.insert(ROOT, path_of([number, number]), 0, np.array([number]), 1, Use(float(number)))

    def worth(slot: int) -> int:
        return {1: 1, 2: 0, 4: 1}.get(slot, -1)

    gone = index.evict_among(2, worth, most_passed=10)
    assert gone.slots.tolist() == [1, 2, 4]  # the one of no worth goes as well when it is its turn
    assert index.evict(2).slots.tolist() == [0, 3]
    index.check()


def test_blocks_passed_over_are_not_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictor_module, "_SNAPSHOT_MIN", 2)
    index = PrefixIndex(make_policy("lru"))
    for number in range(40):
        index.insert(ROOT, path_of([number, number]), 0, np.array([number]), 1, Use(float(number)))
    gone = index.evict_among(1, lambda slot: 1 if slot == 30 else -1, most_passed=30)
    assert gone.slots.tolist() == [30], "more than a snapshot holds lie before it"
    assert index.evict(40).slots.tolist() == [*range(30), *range(31, 40)]


def test_how_far_the_order_is_bent_is_bounded() -> None:
    index = PrefixIndex(make_policy("lru"))
    for number in range(6):
        index.insert(ROOT, path_of([number, number]), 0, np.array([number]), 1, Use(float(number)))
    assert index.evict_among(1, lambda slot: 1 if slot == 5 else -1, most_passed=3).slots.tolist() == []
    assert index.evict_among(1, lambda slot: 1 if slot == 5 else -1, most_passed=5).slots.tolist() == [5]
    assert index.evict(6).slots.tolist() == [0, 1, 2, 3, 4]
