"""Eviction from two tiers under a policy of arbitrary, moving ranks: always the lowest of those that may go."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.prefix_index import evictor as evictor_module
from kvstore.prefix_index.block_table import DRAM, NVME, At, BlockTable
from kvstore.prefix_index.index import Evicted, PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import EvictionPolicy, Use
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16


class DriftingPolicy(EvictionPolicy):
    """Ranks from a few values, others in each tier; they come into force when drawn, or when next asked for."""

    name = "drifting"

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.wanted: dict[tuple[int, int], float] = {}
        self.n_evicted = 0

    def accessed(self, ids: At, use: Use) -> float:  # noqa: ARG002
        self.forget(ids)
        for tier in self.tiers:
            self.table.ranks(tier)[ids] = [self.random.randrange(50) for _ in ids]
        return -math.inf

    def inserted(self, ids: At, use: Use) -> None:
        self.accessed(ids, use)

    def demoted(self, ids: At) -> None:
        self.forget(ids)
        self.set_ranks(ids, -1.0)

    def entered(self, ids: At, tier: int) -> None:
        self.table.ranks(tier)[ids] = [self.random.randrange(50) for _ in ids]
        for block in ids.tolist():
            self.wanted.pop((tier, block), None)

    def evicted(self, ids: At) -> None:
        self.n_evicted += len(ids)
        self.forget(ids)

    def forget(self, ids: At) -> None:
        for block in ids.tolist():
            for tier in self.tiers:
                self.wanted.pop((tier, block), None)

    def rank(self, ids: At, tier: int) -> NDArray[np.float64]:
        ranks = self.table.ranks(tier)
        return np.array([self.wanted.get((tier, b), ranks[b]) for b in ids.tolist()], np.float64)


def path_of(tokens: list[int]) -> RowPath:
    return RowPath.from_tokens(np.array(tokens, np.uint32), 2)


def may_go(index: PrefixIndex, tier: int) -> list[int]:
    """By brute force over parents and copies, without the table's counts."""
    table = index.table
    alive = table.alive().tolist()
    copies = {block: index.resident(np.array([block]), tier)[0] for block in alive}
    followed = set(table.parent[alive].tolist())
    followed_here = {int(table.parent[block]) for block in alive if copies[block]}
    out = []
    for block in alive:
        if not copies[block] or block in followed_here or table.refs[block]:
            continue
        if tier == DRAM or block not in followed or index.resident(np.array([block]), DRAM)[0]:
            out.append(block)
    return out


def evict_one(index: PrefixIndex, tier: int) -> None:
    candidates = may_go(index, tier)
    evicted = index.evict(1) if tier == DRAM else index.evict_nvme(1)
    if not candidates:
        assert len(evicted.ids) == 0
        return
    # Asking may have brought new ranks into force; those of blocks that left can still be read.
    ranks = index.table.ranks(tier)
    assert evicted.ids[0] in candidates
    assert ranks[evicted.ids].tolist() == [ranks[candidates].min()]


class Scene:
    """An index and what may be done to it, by name."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.policy = DriftingPolicy(seed)
        self.index = PrefixIndex(self.policy, reserve_blocks=16, nvme=True)
        self.pinned: list[NDArray[np.uint32]] = []

    def path(self) -> RowPath:
        return path_of([self.dice.randrange(2) for _ in range(self.dice.randrange(1, 14))])

    def found(self) -> NDArray[np.uint32]:
        return self.index.match(ROOT, self.path()).ids

    def insert(self) -> None:
        path = self.path()
        self.index.insert(ROOT, path, 0, np.arange(path.n_rows), 1, Use())

    def touch(self) -> None:
        self.index.touch(self.found(), Use())

    def pin(self) -> None:
        self.pinned.append(self.found())
        self.index.pin(self.pinned[-1])

    def unpin(self) -> None:
        if self.pinned:
            self.index.unpin(self.pinned.pop(self.dice.randrange(len(self.pinned))))

    def persist(self) -> None:
        chain = self.index.chain_unpersisted(self.found())
        self.index.add_nvme(chain, np.arange(len(chain)))

    def onboard(self) -> None:
        ids = self.found()
        absent = ids[~self.index.resident(ids, DRAM)]
        self.index.add_dram(absent, np.arange(len(absent)))

    def lose(self) -> None:
        ids = self.found()
        self.index.break_nvme(ids[self.index.resident(ids, NVME)][-1:])

    def drift(self) -> None:
        alive = self.index.table.alive().tolist()
        pairs = [(tier, block) for block in alive for tier in self.policy.tiers]
        self.policy.wanted = {pair: float(self.dice.randrange(50)) for pair in pairs if self.dice.random() < 0.5}

    def version(self) -> None:
        alive = self.index.table.alive()
        for tier in self.policy.tiers:
            self.index.table.ranks(tier)[alive] = self.policy.rank(alive, tier)
        self.policy.version += 1

    def evict(self) -> None:
        for _ in range(self.dice.randrange(4)):
            evict_one(self.index, DRAM)

    def evict_nvme(self) -> None:
        for _ in range(self.dice.randrange(4)):
            evict_one(self.index, NVME)


KINDS = ["insert", "touch", "pin", "unpin", "persist", "onboard", "lose", "drift", "version", "evict", "evict_nvme"]
WEIGHTS = [6, 3, 1, 1, 6, 3, 1, 1, 0.5, 5, 5]


@pytest.mark.parametrize("snapshot_min", [1, 3, 4096])
@given(seed=st.integers(0, 1 << 30))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_each_evicted_copy_has_the_lowest_rank_of_those_that_may_go(snapshot_min: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evictor_module, "_SNAPSHOT_MIN", snapshot_min)
        patch.setattr(evictor_module, "_CHUNK", 2)
        patch.setattr(evictor_module, "_HEAP_SLACK", 4)
        scene = Scene(seed)
        index, policy = scene.index, scene.policy
        for _ in range(60):
            getattr(scene, scene.dice.choices(KINDS, WEIGHTS)[0])()
        index.check()
        for ids in scene.pinned:
            index.unpin(ids)
        index.check()
        n_left, policy.n_evicted = index.n_blocks, 0
        while index.n_blocks:
            evict_one(index, scene.dice.choice([DRAM, NVME]))
        assert policy.n_evicted == n_left


def evict_all(index: PrefixIndex, dice: random.Random, most: int) -> list[tuple[bool, int, bool]]:
    """Everything out of both tiers in turns, at most ``most`` at a time: (from DRAM, slot, gone)."""
    out: list[tuple[bool, int, bool]] = []
    while index.n_blocks:
        from_dram, n = dice.random() < 0.5, dice.randrange(1, 12)
        while n:
            now = min(n, most)
            evicted: Evicted = index.evict(now) if from_dram else index.evict_nvme(now)
            index.check()
            rows = zip(evicted.slots.tolist(), evicted.gone.tolist(), strict=True)
            out += [(from_dram, slot, gone) for slot, gone in rows]
            n -= now
    return out


@pytest.mark.parametrize("cold", [False, True])
@given(seed=st.integers(0, 1 << 30))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_many_at_once_are_the_same_as_one_by_one(cold: bool, seed: int) -> None:
    results = []
    for most in (100, 1):
        dice = random.Random(seed)
        index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)
        for _ in range(10):
            path = path_of([dice.randrange(3) for _ in range(dice.randrange(1, 24))])
            index.touch(index.match(ROOT, path).ids, Use())
            ids = index.insert(
                ROOT, path, 0, np.array([dice.randrange(1 << 40) for _ in range(path.n_rows)]), 1, Use()
            ).ids
            chain = index.chain_unpersisted(ids[: dice.randrange(len(ids) + 1)])
            index.add_nvme(chain, np.array([dice.randrange(1 << 40) for _ in chain.tolist()], np.int64))
            if dice.random() < 0.2:
                index.evict(dice.randrange(9))
        if cold:
            index = reopened(index)
        results.append(evict_all(index, dice, most))
    assert results[0] == results[1]


def reopened(index: PrefixIndex) -> PrefixIndex:
    """The blocks on NVMe as a new index knows them; some of them in DRAM again."""
    table = index.table
    ids = table.alive()
    ids = ids[index.resident(ids, NVME)]
    depth = {int(block): depth_of(table, int(block)) for block in ids}
    ids = np.array(sorted(ids.tolist(), key=depth.__getitem__), np.uint32)
    fresh = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)
    n = np.ones(len(ids), np.uint32)
    known = fresh.insert_cold(table.key[ids], index.parent_keys(ids), index.nvme_slots(ids), n, n, 0.0)
    fresh.add_dram(known[::2], np.arange(len(known[::2])))
    return fresh


def depth_of(table: BlockTable, block: int) -> int:
    n = 0
    while (block := int(table.parent[block])) != 0xFFFFFFFF:
        n += 1
    return n


def test_a_snapshot_looks_only_once_at_a_tier_that_gives_up_much(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = BlockTable.all_evictable

    def counted(table: BlockTable, tier: int = DRAM) -> NDArray[np.uint32]:
        looks.append(tier)
        return look(table, tier)

    monkeypatch.setattr(BlockTable, "all_evictable", counted)
    index = PrefixIndex(make_policy("lru"), nvme=True)
    for i in range(1000):
        ids = index.insert(ROOT, path_of([i, 1, 2, 3, 4, 5, 6, 7]), 0, np.arange(4), 1, Use(float(i))).ids
        index.add_nvme(ids, np.arange(4))
        index.evict(index.n_dram_blocks - 200)
        index.evict_nvme(max(index.n_nvme_blocks - 800, 0))
    assert (index.n_dram_blocks, index.n_nvme_blocks, index.n_blocks) == (200, 800, 800)
    # No look is in vain: each is paid for by what it finds.
    assert looks.count(DRAM) <= 1000 * 4 // 200 + 2
    assert looks.count(NVME) <= 1000 * 4 // 800 + 2
