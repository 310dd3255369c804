"""Parts of blocks in the index: found, kept, given up and recognised each by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.keys import block_key, part_key
from kvstore.prefix_index.parts import Rule
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath

ROOT = b"root of the test"
WIDTH = 4
WINDOW, STATE = Rule(1, 3), Rule(2, 1, is_state=True)


class Scene:
    """An index with prompts of whole blocks; slots are numbers that never come again."""

    def __init__(self, nvme: bool = False) -> None:
        self.index = PrefixIndex(make_policy("lru"), nvme=nvme)
        self.now_s = 0.0
        self._slot = 0

    def path(self, tokens: Sequence[int]) -> RowPath:
        return RowPath.from_tokens(np.repeat(np.array(tokens, np.uint32), WIDTH), WIDTH)

    def slots(self, n: int) -> NDArray[np.int64]:
        self._slot += n
        return np.arange(self._slot - n, self._slot, dtype=np.int64)

    def ids(self, tokens: Sequence[int]) -> NDArray[np.intp]:
        """The blocks that are stored of a prompt; a block's tokens are one number."""
        return self.index.match(ROOT, self.path(tokens)).ids.astype(np.intp)

    def put(self, tokens: Sequence[int]) -> NDArray[np.intp]:
        self.now_s += 1
        first = len(self.ids(tokens))
        self.index.insert(
            ROOT, self.path(tokens), first, self.slots(len(tokens) - first), 10, Use(self.now_s, namespace=1)
        )
        return self.ids(tokens)

    def put_parts(self, tokens: Sequence[int], rule: Rule, first: int, n: int) -> NDArray[np.intp]:
        done = self.index.parts.insert(
            self.ids(tokens), first, rule, self.slots(n), 20, Use(self.now_s, namespace=1 + rule.number)
        )
        return done.ids.astype(np.intp)

    def reach(self, tokens: Sequence[int], *rules: Rule) -> int:
        return self.index.parts.reach(self.ids(tokens), rules)

    def evict_all_but(self, n: int) -> list[int]:
        """Ids in the order in which they go."""
        gone = self.index.evict(self.index.n_dram_blocks - n)
        self.index.check()
        return [int(block) for block in gone.ids]


def test_a_hit_has_the_window_and_the_state_at_its_end() -> None:
    scene = Scene()
    tokens = list(range(9))
    scene.put(tokens)
    assert [scene.reach(tokens, *rules) for rules in ((), (WINDOW,), (STATE,))] == [9, 0, 0]
    scene.put_parts(tokens, WINDOW, 2, 4)
    assert scene.reach(tokens, WINDOW) == 6
    assert scene.reach(tokens[:4], WINDOW) == 0, "block 1 is missing in the window of the first four"
    scene.put_parts(tokens, WINDOW, 0, 1)
    assert scene.reach(tokens[:2], WINDOW) == 1, "at the beginning there is less to look back at"
    scene.put_parts(tokens, STATE, 4, 1)
    assert scene.reach(tokens, WINDOW, STATE) == 5
    spans = scene.index.parts.needed(scene.ids(tokens)[:5], 0, (WINDOW, STATE))
    assert [(span.number, span.first_row, len(span.ids)) for span in spans] == [(1, 2, 3), (2, 4, 1)]
    spans = scene.index.parts.needed(scene.ids(tokens)[:5], 3, (WINDOW, STATE))
    assert [(span.number, span.first_row, len(span.ids)) for span in spans] == [(1, 3, 2), (2, 4, 1)]
    scene.index.check()


def test_parts_go_before_their_block_and_take_nothing_else_along() -> None:
    scene = Scene()
    tokens = list(range(4))
    ids = scene.put(tokens)
    window, state = scene.put_parts(tokens, WINDOW, 1, 3), scene.put_parts(tokens, STATE, 3, 1)
    scene.index.touch(ids, Use(9.0))
    order = scene.evict_all_but(0)
    assert sorted(order[:4]) == sorted([*window.tolist(), *state.tolist()])
    assert order[4:] == ids[::-1].tolist()
    assert scene.index.n_blocks == scene.index.n_parts == 0


def test_a_pinned_part_keeps_its_block() -> None:
    scene = Scene()
    tokens = list(range(3))
    ids = scene.put(tokens)
    part = scene.put_parts(tokens, STATE, 1, 1)
    scene.index.pin(part)
    assert scene.evict_all_but(0) == [ids[2]]
    assert scene.reach(tokens, STATE) == 2
    scene.index.unpin(part)
    assert scene.evict_all_but(0) == [part[0], ids[1], ids[0]]


def test_what_no_window_needs_goes_first_but_not_at_a_fork() -> None:
    scene = Scene()
    old = list(range(100, 106))
    scene.put(old)
    kept = scene.put_parts(old, WINDOW, 3, 3)
    tokens = list(range(9))
    scene.put(tokens)
    parts = scene.put_parts(tokens, WINDOW, 0, 9)
    assert scene.index.parts.is_spare(parts).tolist() == [True] * 6 + [False] * 3
    assert not scene.index.parts.is_spare(kept).any()
    assert scene.evict_all_but(scene.index.n_dram_blocks - 2) == parts[:2].tolist()
    # Another prompt leaves this one behind block 4: the window there is needed again, though it is older.
    fork = [*range(5), 50, 51]
    scene.put(fork)
    scene.put_parts(fork, WINDOW, 5, 2)
    assert scene.index.parts.is_spare(parts[2:]).tolist() == [False] * 3 + [True] + [False] * 3
    assert scene.evict_all_but(scene.index.n_dram_blocks - 1) == [parts[5]]


def test_a_spare_part_that_is_used_is_as_good_as_any() -> None:
    scene = Scene()
    tokens = list(range(9))
    scene.put(tokens)
    parts = scene.put_parts(tokens, WINDOW, 0, 9)
    scene.index.parts.touch(parts[1:4], Use(5.0))
    assert scene.index.parts.is_spare(parts).tolist() == [True] + [False] * 3 + [True] * 2 + [False] * 3
    scene.index.check()
    assert scene.evict_all_but(scene.index.n_dram_blocks - 3) == parts[[0, 4, 5]].tolist()


def test_a_hit_ends_inside_a_block_that_has_its_window_parts_and_no_state() -> None:
    scene = Scene(nvme=True)
    tokens = list(range(3))
    ids = scene.put(tokens)
    parts = scene.index.parts
    assert not parts.reaches_into(int(ids[2]), (WINDOW,))
    scene.put_parts(tokens, WINDOW, 2, 1)
    scene.put_parts(tokens, STATE, 2, 1)
    assert parts.reaches_into(int(ids[2]), (WINDOW,))
    assert parts.reaches_into(int(ids[2]), (WINDOW,), DRAM)
    assert not parts.reaches_into(int(ids[2]), (WINDOW,), NVME)
    assert not parts.reaches_into(int(ids[2]), (WINDOW, STATE))


def test_blocks_with_parts_are_not_looked_for_among_the_cold_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = Scene(nvme=True), Scene(nvme=True)
    for tokens in ([1, 2, 3], [7, 8]):
        before.put(tokens)
        before.put_parts(tokens, STATE, len(tokens) - 1, 1)
    table = before.index.table
    ids = before.index.chain_unpersisted(table.alive())
    after.index.insert_cold(
        table.key[ids], before.index.parent_keys(ids), after.slots(len(ids)), table.size_bytes[ids],
        table.namespace[ids], 1.0,
    )  # fmt: skip
    assert after.reach([1, 2, 3], STATE) == 3
    assert after.index.n_cold_blocks == 2
    monkeypatch.setattr(after.index._cold, "follow", lambda *_: pytest.fail("nothing cold follows this prompt"))
    assert after.reach([1, 2, 3, 4], STATE) == 3


def test_blocks_that_are_given_up_take_their_parts_along() -> None:
    scene = Scene()
    for tokens in ([1, 2], [3, 4]):
        scene.put(tokens)
        scene.put_parts(tokens, WINDOW, 0, 2)
        scene.put_parts(tokens, STATE, 1, 1)
    young = scene.ids([3, 4])
    scene.index.demote(young)
    gone = scene.evict_all_but(5)
    assert set(gone[-2:]) == set(young.tolist())
    assert scene.reach([1, 2], WINDOW, STATE) == 2


def test_what_is_there_stays_and_what_is_not_in_dram_takes_the_slot() -> None:
    scene = Scene(nvme=True)
    tokens = list(range(4))
    ids = scene.put(tokens)
    first = scene.put_parts(tokens, STATE, 2, 1)
    scene.index.add_nvme(np.append(ids, first).astype(np.uint32), scene.slots(5))
    assert scene.index.may_join_nvme(scene.put_parts(tokens, WINDOW, 0, 1).astype(np.uint32)).all()
    scene.index.evict(6)
    scene.index.check()
    assert scene.index.n_dram_blocks == 0
    assert scene.reach(tokens, STATE) == 3
    assert scene.reach(tokens, WINDOW) == 0, "it was in DRAM only"
    slots = scene.slots(3)
    done = scene.index.parts.insert(scene.ids(tokens), 1, STATE, slots, 20, Use(9.0, namespace=3))
    assert done.is_new.all()
    assert done.ids[1] == first[0]
    assert scene.index.slots(done.ids).tolist() == slots.tolist()
    again = scene.index.parts.insert(scene.ids(tokens), 1, STATE, scene.slots(3), 20, Use(9.0, namespace=3))
    assert not again.is_new.any()
    assert scene.index.slots(again.ids).tolist() == slots.tolist()
    assert scene.index.parts.reach(scene.ids(tokens), (STATE,), NVME) == 3
    assert scene.index.parts.reach(scene.ids(tokens), (STATE,), DRAM) == 0, "the blocks themselves are not there"
    assert scene.index.parts.reach(scene.ids(tokens), (STATE,), DRAM, 4) == 4
    scene.index.check()


def test_a_part_goes_to_nvme_behind_its_block_and_leaves_before_it() -> None:
    scene = Scene(nvme=True)
    tokens = list(range(2))
    ids = scene.put(tokens).astype(np.uint32)
    part = scene.put_parts(tokens, STATE, 1, 1).astype(np.uint32)
    assert not scene.index.may_join_nvme(part).any()
    assert scene.index.chain_unpersisted(part).tolist() == [*ids.tolist(), part[0]]
    (row,) = scene.index.frame_rows(part)
    above = scene.index.parent_keys(part).tobytes()
    assert above == scene.index.table.key[ids[1]].tobytes()
    assert block_key(above, *row) == scene.index.table.key[part[0]].tobytes(), "row and digest prove the key"
    scene.index.add_nvme(np.append(ids, part), scene.slots(3))
    scene.index.evict(3)
    assert scene.index.evict_nvme(1).ids.tolist() == part.tolist()
    assert scene.index.evict_nvme(2).gone.all()
    scene.index.check()


def test_a_bad_copy_makes_the_hit_shorter_until_the_part_is_stored_again() -> None:
    scene = Scene(nvme=True)
    tokens = list(range(3))
    ids = scene.put(tokens)
    states = scene.put_parts(tokens, STATE, 1, 2)
    scene.index.add_nvme(np.concatenate([ids, states]).astype(np.uint32), scene.slots(5))
    scene.index.evict(5)
    scene.index.pin(states[1:])
    scene.index.break_nvme(states[1:].astype(np.uint32))
    scene.index.check()
    assert scene.reach(tokens, STATE) == 2
    assert scene.index.n_broken_blocks == 1
    scene.put_parts(tokens, STATE, 2, 1)
    assert scene.reach(tokens, STATE) == 3
    assert scene.index.n_broken_blocks == 0
    scene.index.unpin(states[1:])
    scene.index.check()


@pytest.mark.parametrize("tier", [DRAM, NVME])
def test_a_tier_that_is_opened_again_has_its_parts(tier: int) -> None:
    before, after = Scene(nvme=True), Scene(nvme=True)
    tokens = list(range(6))
    before.put(tokens)
    before.put_parts(tokens, WINDOW, 2, 4)
    before.put_parts(tokens, STATE, 3, 1)
    table = before.index.table
    ids = before.index.chain_unpersisted(table.alive())
    taken = after.index.insert_cold(
        table.key[ids], before.index.parent_keys(ids), after.slots(len(ids)), table.size_bytes[ids],
        table.namespace[ids], 1.0, tier,
    )  # fmt: skip
    assert len(taken) == 11
    assert (after.index.n_parts, after.index.n_cold_blocks) == (5, 6)
    after.index.check()
    assert after.reach(tokens, WINDOW) == 6
    assert after.reach(tokens, WINDOW, STATE) == 0
    assert after.reach(tokens[:4], STATE) == 4
    assert after.index.n_cold_blocks == 0
    other = NVME if tier == DRAM else DRAM
    if other == NVME:
        after.index.add_nvme(taken, after.slots(len(taken)))
    else:
        after.index.add_dram(taken, after.slots(len(taken)))
    after.index.check()


def test_both_tiers_of_an_earlier_process_give_a_part_two_copies() -> None:
    before, after = Scene(nvme=True), Scene(nvme=True)
    tokens = list(range(3))
    before.put(tokens)
    before.put_parts(tokens, STATE, 1, 2)
    table = before.index.table
    ids = before.index.chain_unpersisted(table.alive())
    for tier in (DRAM, NVME):
        after.index.insert_cold(
            table.key[ids], before.index.parent_keys(ids), after.slots(5), table.size_bytes[ids],
            table.namespace[ids], 1.0, tier,
        )  # fmt: skip
        after.index.check()
    assert (after.index.n_blocks, after.index.n_dram_blocks, after.index.n_nvme_blocks) == (5, 5, 5)
    assert after.reach(tokens, STATE) == 3


def test_a_key_that_does_not_prove_a_part_makes_none() -> None:
    scene, after = Scene(nvme=True), Scene(nvme=True)
    ids = scene.put([1, 2])
    keys = scene.index.table.key[ids].tobytes()
    good, bad = part_key(keys[16:], 2), part_key(keys[:16], 2)
    names = np.frombuffer(keys + good + bad, np.uint8).reshape(4, 16)
    parents = np.frombuffer(ROOT + keys[:16] + keys[16:] + keys[16:], np.uint8).reshape(4, 16)
    after.index.insert_cold(
        names, parents, after.slots(4), np.full(4, 9, np.uint32), np.array([0, 0, 5, 5], np.uint32), 1.0
    )
    assert after.index.n_parts == 1
    assert after.reach([1, 2], STATE) == 2
    after.index.check()


def test_rows_that_are_not_stored_have_no_parts() -> None:
    scene = Scene()
    scene.put([1, 2])
    with pytest.raises(BadInputError, match="parts of rows 1 to 2 of a path of 2 stored blocks"):
        scene.index.parts.insert(scene.ids([1, 2]), 1, STATE, scene.slots(2), 9, Use(1.0))
    with pytest.raises(BadInputError, match="at most 15 parts"):
        scene.index.parts.insert(scene.ids([1, 2]), 0, Rule(16, 1), scene.slots(1), 9, Use(1.0))


@pytest.mark.parametrize("nvme", [False, True])
def test_a_table_that_grows_and_is_used_again_keeps_its_parts(nvme: bool) -> None:
    dice = random.Random(7)
    scene = Scene(nvme)
    scene.index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=nvme)
    for round_ in range(60):
        tokens = [dice.randrange(3) for _ in range(6)]
        scene.put(tokens)
        for rule in (WINDOW, STATE):
            first = dice.randrange(6)
            scene.put_parts(tokens, rule, first, dice.randint(1, 6 - first))
        if round_ % 5 == 0:
            scene.evict_all_but(dice.randrange(scene.index.n_dram_blocks))
        scene.index.check()
    scene.evict_all_but(0)
    assert scene.index.n_blocks == scene.index.n_parts == scene.index.table.n_spare == 0
