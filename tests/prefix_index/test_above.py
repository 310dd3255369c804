"""Copies in HBM as the index knows them: who may have one, in which order they go, what is told of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.errors import IntegrityError
from kvstore.prefix_index.above import Above
from kvstore.prefix_index.block_table import DRAM, HBM
from kvstore.prefix_index.copies import Loss
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy, make_tier_policies, with_hbm
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath

ROOT = bytes(16)
Ids = np.ndarray


class Owner:
    """Keeps account of the slots that it is told of."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.held: list[int] = []

    def free(self, slots: np.ndarray) -> None:
        self.freed += slots.tolist()

    def quarantine(self, slots: np.ndarray) -> None:
        self.held += slots.tolist()


class Scene:
    """An index with HBM, whose copies lie in slots 100 above their blocks' numbers."""

    def __init__(self, *, nvme: bool = False, policy: str = "lru") -> None:
        self.index = PrefixIndex(with_hbm(make_policy(policy)), reserve_blocks=16, nvme=nvme, hbm=True)
        self.owner = Owner()
        self.above.places = self.owner
        self._slot = 0

    @property
    def above(self) -> Above:
        assert self.index.above is not None
        return self.index.above

    def put(self, tag: int, n: int) -> Ids:
        path = RowPath.from_tokens(np.arange(2 * n, dtype=np.uint32) + 1000 * tag, 2)
        self._slot += n
        slots = np.arange(self._slot - n, self._slot)
        return self.index.insert(ROOT, path, 0, slots, 4096, Use(0.0)).ids

    def promote(self, ids: Ids) -> Ids:
        self.above.add(ids, ids.astype(np.int64) + 100)
        self.index.check()
        return ids


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_copy_is_of_a_block_that_is_below_and_not_there_yet(scene: Scene) -> None:
    ids = scene.promote(scene.put(1, 3))
    assert scene.above.slots(ids).tolist() == (ids + 100).tolist()
    assert scene.index.resident(ids, HBM).all()
    with pytest.raises(IntegrityError, match="in HBM already"):
        scene.above.add(ids[1:], np.array([7, 8]))
    assert scene.above.n == 3
    scene.index.check()


def test_the_tail_goes_before_the_head_and_the_older_path_first(scene: Scene) -> None:
    old, new = scene.promote(scene.put(1, 3)), scene.promote(scene.put(2, 3))
    assert scene.above.evict(4).tolist() == [old[2], old[1], old[0], new[2]]
    assert scene.owner.freed == [int(block) + 100 for block in (old[2], old[1], old[0], new[2])]
    assert scene.index.resident(old, DRAM).all()
    scene.index.check()


def test_a_use_changes_the_order_there_too(scene: Scene) -> None:
    old, new = scene.promote(scene.put(1, 2)), scene.promote(scene.put(2, 2))
    scene.index.touch(old, Use(1.0))
    assert scene.above.evict(2).tolist() == new[::-1].tolist()


def test_a_block_that_has_a_follower_there_goes_after_it(scene: Scene) -> None:
    ids = scene.promote(scene.put(1, 4))
    scene.index.touch(ids[2:], Use(1.0))
    scene.index.touch(ids[3:], Use(2.0))
    assert scene.above.evict(4).tolist() == ids[::-1].tolist()


def test_what_is_pinned_stays(scene: Scene) -> None:
    ids = scene.promote(scene.put(1, 3))
    scene.index.pin(ids[:2])
    assert scene.above.evict(3).tolist() == [ids[2]]
    scene.index.unpin(ids[:2])
    assert scene.above.evict(3).tolist() == [ids[1], ids[0]]


def test_slots_that_are_worth_nothing_are_passed_over_and_stay(scene: Scene) -> None:
    one, two = scene.promote(scene.put(1, 2)), scene.promote(scene.put(2, 2))
    mine = {int(block) + 100 for block in two}
    assert scene.above.evict(2, worth=lambda slot: int(slot in mine), most_passed=1).tolist() == [two[1], two[0]]
    assert not len(scene.above.evict(1, worth=lambda slot: int(slot in mine), most_passed=5))
    assert scene.above.evict(9).tolist() == [one[1], one[0]]
    scene.index.check()


def test_a_block_that_leaves_takes_its_copy_along(scene: Scene) -> None:
    ids = scene.promote(scene.put(1, 3))
    gone = scene.index.evict(2)
    assert gone.ids.tolist() == [ids[2], ids[1]]
    assert sorted(scene.owner.freed) == sorted(int(block) + 100 for block in gone.ids)
    assert scene.above.n == 1
    scene.index.check()


def test_what_is_in_use_is_held_back_until_it_is_not() -> None:
    scene = Scene(nvme=True)
    ids = scene.put(1, 3)
    scene.index.add_nvme(ids, np.arange(3))
    scene.promote(ids)
    scene.index.evict(3)
    scene.index.pin(ids[1:2])
    scene.index.pin(ids[1:2])
    scene.index.break_nvme(ids[1:2])
    slot = int(ids[1]) + 100
    assert (scene.owner.held, scene.owner.freed) == ([slot], [])
    assert scene.above.n_held == 1
    scene.index.check()
    scene.index.unpin(ids[1:2])
    assert scene.owner.freed == []
    scene.index.unpin(ids[1:2])
    assert scene.owner.freed == [slot]
    scene.index.check()


def test_witness_and_tenants_are_told(scene: Scene) -> None:
    told: list[tuple[str, int, list[int]]] = []

    class Watcher:
        def gained(self, at: np.ndarray, tier: int, *, first: np.ndarray) -> None:
            assert not first.any()
            told.append(("gained", tier, at.tolist()))

        def lost(self, at: np.ndarray, tier: int, reason: Loss, last: np.ndarray) -> None:
            assert reason is Loss.EVICTED
            assert not last.any()
            told.append(("lost", tier, at.tolist()))

    ids = scene.put(1, 2)
    scene.index.witness = Watcher()
    scene.promote(ids)
    scene.above.evict(1)
    assert told == [("gained", HBM, ids.tolist()), ("lost", HBM, [ids[1]])]
    assert scene.index.tenants.used_bytes[HBM].sum() == 4096


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda table, ids: table.hbm_slot.__setitem__(ids[0], -1), "are counted"),
        (lambda table, ids: table.hbm_slot.__setitem__(ids[0], table.hbm_slot[ids[1]]), "same slot"),
        (lambda table, ids: table.n_hbm_children.__setitem__(ids[0], 5), "counted wrong"),
        (lambda table, ids: table.residency.__setitem__(ids[2], 0), "none below"),
    ],
)
def test_check_finds_planted_contradictions(scene: Scene, damage: Callable[[object, Ids], None], words: str) -> None:
    ids = scene.promote(scene.put(1, 3))
    damage(scene.index.table, ids)
    with pytest.raises(IntegrityError, match=words):
        scene.above.check()


def test_hbm_is_in_the_order_of_lru_whatever_the_others_are() -> None:
    assert make_tier_policies("hazard", hbm=True).name == "hazard, lru in HBM"
    assert make_tier_policies("lru", "fifo", hbm=True).name == "lru, fifo on NVMe, lru in HBM"
    scene = Scene(policy="fifo")
    one, two = scene.promote(scene.put(1, 1)), scene.promote(scene.put(2, 1))
    scene.index.touch(one, Use(1.0))
    assert scene.above.evict(1).tolist() == two.tolist()
    assert scene.index.evict(1).ids.tolist() == one.tolist()


def test_a_policy_that_weighs_newcomers_goes_on_doing_so() -> None:
    assert with_hbm(make_policy("hazard")).weighs
    assert not with_hbm(make_policy("lru")).weighs


def test_an_index_without_hbm_has_none() -> None:
    index = PrefixIndex(make_policy("lru"), reserve_blocks=16)
    assert index.above is None
    ids = index.insert(ROOT, RowPath.from_tokens(np.arange(4, dtype=np.uint32), 2), 0, np.arange(2), 1, Use(0.0)).ids
    assert not index.resident(ids, HBM).any()
