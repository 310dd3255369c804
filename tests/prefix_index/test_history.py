"""What is remembered of blocks that left, against a plain list of it; and that an index tells of each that leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.clock import ManualClock
from kvstore.hints import Hints
from kvstore.prefix_index import history as history_module
from kvstore.prefix_index.block_table import DRAM, NVME, BlockTable
from kvstore.prefix_index.hint_columns import HintColumns
from kvstore.prefix_index.history import ENTRY_BYTES, Departure, History, Left, Unwritten
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath

N_KEYS = 12
ROOT = b"r" * 16


def key_of(number: int) -> bytes:
    """Keys of which some have the same lower half."""
    return bytes((number % 5,)) * 8 + bytes((number,)) * 8


def keys_of(numbers: Sequence[int]) -> NDArray[np.uint8]:
    """uint8 [n, 16]."""
    return np.frombuffer(b"".join(map(key_of, numbers)), np.uint8).reshape(-1, 16)


@dataclass
class Remembered:
    """The same as a ``History``, as a list. Times are multiples of a half, so that none is rounded."""

    capacity: int
    clock: ManualClock
    entries: list[tuple[bytes, Left, int, float, float]] = field(default_factory=list)

    def add(self, numbers: list[int], left: Left, tier: int, last_use_s: float) -> None:
        now_s = self.clock.now_s()
        self.entries += [(key_of(number), left, tier, now_s, now_s - last_use_s) for number in numbers]

    def of(self, key: bytes) -> Departure | None:
        for found, left, tier, at_s, idle_s in reversed(self.entries[-self.capacity :]):
            if found == key:
                return Departure(left, tier, self.clock.now_s() - at_s, idle_s, None)
        return None

    @property
    def reach_s(self) -> float:
        began_s = 0.0 if len(self.entries) <= self.capacity else self.entries[-self.capacity][3]
        return self.clock.now_s() - began_s


def table_of_keys() -> tuple[BlockTable, NDArray[np.uint32]]:
    table = BlockTable(N_KEYS)
    ids = table.allocate(N_KEYS)
    for number in range(N_KEYS):
        table.key[ids[number]] = np.frombuffer(key_of(number), np.uint8)
    return table, ids


def same(one: Departure | None, other: Departure | None) -> bool:
    if one is None or other is None:
        return one is other
    return one[:3] == other[:3] and (
        one.idle_s == other.idle_s or (math.isnan(one.idle_s) and math.isnan(other.idle_s))
    )


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["evicted", "corrupt", "not_stored", "wait", "ask"]),
        st.lists(st.integers(0, N_KEYS - 1), min_size=1, max_size=9),
    ),
    max_size=40,
)


@pytest.mark.parametrize("flush", [(1, 1 << 14), (3, 1 << 14), (512, 4), (512, 1 << 14)])
@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 14), steps=STEPS)
def test_the_newest_entries_are_kept_and_the_newest_of_a_key_counts(
    flush: tuple[int, int], capacity: int, steps: list[tuple[str, list[int]]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history_module, "FLUSH_BATCHES", flush[0])
        patch.setattr(history_module, "FLUSH_ENTRIES", flush[1])
        table, ids = table_of_keys()
        clock = ManualClock()
        history, model = History(table, HintColumns(table)), Remembered(capacity, clock)
        history.begin(capacity, clock.now_s)
        table.last_use_s[ids] = last_use_s = -0.5
        for what, numbers in steps:
            at = ids[numbers]
            if what == "evicted":
                history.evicted(at, table.key[at], DRAM)
                model.add(numbers, Left.EVICTED, DRAM, last_use_s)
            elif what == "corrupt":
                history.lost(at, Left.CORRUPT, NVME)
                model.add(numbers, Left.CORRUPT, NVME, last_use_s)
            elif what == "not_stored":
                history.not_stored(keys_of(numbers), Left.NO_ROOM)
                model.add(numbers, Left.NO_ROOM, -1, math.nan)
            elif what == "wait":
                clock.advance(0.5 * len(numbers))
            else:
                distinct = list(dict.fromkeys(numbers))
                keys = keys_of(distinct)
                told = [model.of(key_of(number)) for number in distinct]
                assert all(map(same, history.of(keys), told)), (history.of(keys), told)
        every = [key_of(number) for number in range(N_KEYS)]
        found = history.of(keys_of(range(N_KEYS)))
        assert all(map(same, found, map(model.of, every))), (found, list(map(model.of, every)))
        assert len(history) == min(len(model.entries), capacity)
        assert history.has_forgotten == (len(model.entries) > capacity)
        assert history.reach_s == model.reach_s


def test_nothing_is_kept_or_done_before_it_has_begun() -> None:
    table, ids = table_of_keys()
    history = History(table, HintColumns(table))
    history.lost(ids, Left.CORRUPT, NVME)
    history.not_stored(keys_of([1]), Left.NO_ROOM)
    history.not_written(ids, Unwritten.QUEUE_FULL)
    assert not history
    assert (len(history), history.reach_s, history.of(table.key[ids[:2]])) == (0, 0.0, [None, None])


def test_an_entry_takes_what_the_setting_says() -> None:
    assert ENTRY_BYTES == 31


def test_why_a_block_was_not_written_is_that_block_s_alone() -> None:
    table, ids = table_of_keys()
    history = History(table, HintColumns(table))
    history.begin(100, ManualClock().now_s)
    history.not_written(ids[:2].astype(np.intp), Unwritten.SUSPENDED)
    history.not_written(ids[1:2].astype(np.intp), Unwritten.QUEUE_FULL)
    table.free(ids[:1])
    (again,) = table.allocate(1)
    assert again == ids[0]
    history.evicted(ids[:3], table.key[ids[:3]], DRAM)
    told = history.of(table.key[ids[:3]])
    assert [each and each.unwritten for each in told] == [None, Unwritten.QUEUE_FULL, None]


def test_idle_times_are_left_out_where_callers_have_a_clock_of_their_own() -> None:
    table, ids = table_of_keys()
    history = History(table, HintColumns(table))
    history.begin(100, ManualClock(5.0).now_s, knows_idle=False)
    history.evicted(ids[:1], table.key[ids[:1]], DRAM)
    (told,) = history.of(table.key[ids[:1]])
    assert told is not None
    assert math.isnan(told.idle_s)


# An index tells of all that leaves ---------------------------------------------------------------


class Watched:
    """An index with two tiers, and by key how the block left last, from looking at the table before and after."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)
        self.index.history.begin(1 << 12, self.clock.now_s)
        self.left: dict[bytes, Left] = {}
        self._slots = iter(range(1 << 30))

    def path(self, tag: int, n_rows: int) -> RowPath:
        return RowPath.from_tokens(np.array([1, 1, *([tag] * (2 * n_rows - 2))], np.uint32), 2)

    def root(self, tag: int) -> bytes:
        return bytes((tag % 2,)) * 16

    def with_copies(self) -> set[bytes]:
        """Keys of blocks that have a copy and can be found."""
        table = self.index.table
        ids = np.flatnonzero((table.residency[: table.n_used] != 0) & (table.state[: table.n_used] != 0))
        return {table.key[block].tobytes() for block in ids if not self.index.hiding.is_hidden(np.array([block]))[0]}

    def told(self, keys: Iterable[bytes]) -> set[tuple[bytes, Left]]:
        """What the history says of those of the keys that it knows."""
        asked = list(keys)
        packed = np.frombuffer(b"".join(asked), np.uint8).reshape(-1, 16)
        found = self.index.history.of(packed)
        return {(key, departure.left) for key, departure in zip(asked, found, strict=True) if departure is not None}

    def step(self, what: str, tag: int, n: int) -> None:
        before = self.with_copies()
        index, left = self.index, Left.EVICTED
        if what == "insert":
            path = self.path(tag, n)
            slots = np.array([next(self._slots) for _ in range(n)])
            index.insert(self.root(tag), path, 0, slots, 1, Use(self.clock.now_s(), namespace=tag % 2))
        elif what == "write":
            ids = index.chain_unpersisted(index.match(self.root(tag), self.path(tag, n)).ids)
            index.add_nvme(ids, np.array([next(self._slots) for _ in ids]))
        elif what == "evict":
            index.evict(n)
        elif what == "evict_nvme":
            index.evict_nvme(n)
        elif what == "break":
            ids = index.match(self.root(tag), self.path(tag, n)).ids[-1:]
            index.break_nvme(ids[index.resident(ids, NVME)])
            left = Left.CORRUPT
        elif what == "hide":
            index.hiding.hide([tag % 2])
            left = Left.CLEARED
        elif what == "remove":
            index.hiding.lose_nvme(index.hiding.hidden(0, index.table.n_used))
            index.hiding.remove(0, index.table.n_used, index.table.n_used)
        self.clock.advance(1.0)
        self.left |= dict.fromkeys(before - self.with_copies(), left)
        index.check()


@settings(max_examples=150, deadline=None)
@example([("insert", 0, 5), ("write", 0, 2), ("evict", 0, 5)])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "write", "evict", "evict_nvme", "break", "hide", "remove"]),
            st.integers(0, 2),
            st.integers(1, 5),
        ),
        min_size=4,
        max_size=30,
    )
)
def test_an_index_tells_of_each_block_that_loses_its_last_copy(steps: list[tuple[str, int, int]]) -> None:
    watched = Watched()
    for step in steps:
        watched.step(*step)
        assert watched.told(watched.with_copies() - watched.left.keys()) == set()
    assert watched.told(watched.left) == set(watched.left.items())


def test_what_nobody_wanted_and_what_had_run_out_is_told_apart() -> None:
    clock = ManualClock(100.0)
    index = PrefixIndex(make_policy("lru"), reserve_blocks=16)
    index.history.begin(100, clock.now_s)
    keys = []
    for tag, hints in enumerate((Hints(no_reuse=True), Hints(ttl_s=5.0), Hints(turn=1), None)):
        path = RowPath.from_tokens(np.array([tag] * 4, np.uint32), 4)
        ids = index.insert(ROOT, path, 0, np.array([tag]), 1, Use(100.0)).ids
        if hints is not None:
            index.hints.stored(ids, np.ones(1, np.bool_), b"root", hints, 100.0, 100.0)
        keys.append(path.keys(ROOT))
    clock.advance(10.0)
    assert len(index.hints.take_overdue(clock.now_s())) == 1
    index.evict(4)
    told = index.history.of(np.concatenate(keys))
    assert [each and each.left for each in told] == [Left.UNWANTED, Left.EXPIRED, Left.EVICTED, Left.EVICTED]
    assert [each and each.idle_s for each in told] == [10.0] * 4


def test_a_clearing_leaves_most_of_the_room_to_what_left_before() -> None:
    index = PrefixIndex(make_policy("lru"), reserve_blocks=16)
    index.history.begin(40, ManualClock().now_s)
    paths = [RowPath.from_tokens(np.full(n, tag, np.uint32), 1) for tag, n in ((1, 30), (2, 60))]
    index.insert(ROOT, paths[0], 0, np.arange(30), 1, Use(namespace=1))
    index.evict(30)
    index.insert(ROOT, paths[1], 0, np.arange(60), 1, Use(namespace=2))
    index.hiding.hide([2])
    told = [index.history.of(path.keys(ROOT)) for path in paths]
    assert [sum(each is not None for each in found) for found in told] == [30, 10]
