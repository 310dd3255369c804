"""What holds whatever a policy says, for every policy there is: against a plain model of prompts, tiers and pins."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.hints import Hints
from kvstore.prefix_index import evictor as evictor_module
from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.index import Evicted, PrefixIndex
from kvstore.prefix_index.policies import POLICIES, make_policy, make_tier_policies
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16
BLOCK_TOKENS = 2
Ids = NDArray[np.uint32]
Row = tuple[int, ...]
"""A block as the model knows it: all tokens up to its end."""

SEEDS = st.integers(0, 1 << 30)


class Machine:
    """An index in use, and next to it what must be so: which prefixes are where, and which are pinned."""

    def __init__(self, policy: str, seed: int, nvme_policy: str = "", *, nvme: bool = True) -> None:
        self.dice = random.Random(seed)
        self.index = PrefixIndex(make_tier_policies(policy, nvme_policy), reserve_blocks=16, nvme=nvme)
        self.has_nvme = nvme
        self.capacity = {DRAM: self.dice.randrange(3, 25), NVME: self.dice.randrange(3, 50)}
        self.tiers: dict[int, set[Row]] = {DRAM: set(), NVME: set()}
        self.pins: list[tuple[Ids, list[Row]]] = []
        self.now_s = 0.0
        self.names: dict[int, Row] = {}
        """What each block stands for, by its id."""
        self.log: list[tuple[str, Row]] = []

    # What is done ----------------------------------------------------------------------------------

    def request(self) -> None:
        """A prompt is looked up, comes up from NVMe, is stored as far as there is room, and is used again."""
        tokens = [self.dice.randrange(3) for _ in range(BLOCK_TOKENS * self.dice.randrange(1, 9))]
        rows = [tuple(tokens[: end + BLOCK_TOKENS]) for end in range(0, len(tokens), BLOCK_TOKENS)]
        path = RowPath.from_tokens(np.array(tokens, np.uint32), BLOCK_TOKENS)
        self.now_s += self.dice.expovariate(1.0)
        hints = self.dice.choice([None, Hints(request_type="chat", turn=self.dice.randrange(4)), Hints(no_reuse=True)])
        use = Use(self.now_s, len(tokens), 0, hints, block_tokens=BLOCK_TOKENS)
        found = self.index.match(ROOT, path).ids
        stored = self.tiers[DRAM] | self.tiers[NVME]
        assert len(found) == next((n for n, row in enumerate(rows) if row not in stored), len(rows))
        self.index.touch(found, use)
        if self.has_nvme:
            absent = found[~self.index.resident(found, DRAM)]
            self.index.add_dram(absent, np.zeros(len(absent), np.int64))
        self.tiers[DRAM].update(rows[: len(found)])
        inserted = self.index.insert(ROOT, path, len(found), np.zeros(len(rows) - len(found), np.int64), 1, use)
        self.tiers[DRAM].update(rows)
        ids = np.concatenate((found, inserted.ids))
        self.index.touch(ids, replace(use, is_again=True))
        if self.dice.random() < 0.3:
            self.index.ended(ids, replace(use, output_tokens=self.dice.randrange(1, 100)))
        if self.has_nvme and self.dice.random() < 0.5:
            chosen = self.index.admitted(ids, use, NVME)
            chain = self.index.chain_unpersisted(chosen.astype(np.uint32))
            self.index.add_nvme(chain, np.zeros(len(chain), np.int64))
            last = int(np.flatnonzero(np.isin(ids, chosen))[-1]) if len(chosen) else -1
            self.tiers[NVME].update(rows[: last + 1])
        if self.dice.random() < 0.2:
            n = self.dice.randrange(len(rows)) + 1
            self.index.pin(ids[:n])
            self.pins.append((ids[:n], rows[:n]))
        self.names.update(zip(ids.tolist(), rows, strict=True))
        self.shrink()

    def unpin(self) -> None:
        if self.pins:
            ids, _ = self.pins.pop(self.dice.randrange(len(self.pins)))
            self.index.unpin(ids)

    def demote(self) -> None:
        """Some blocks are said to be of no more use."""
        alive = self.index.table.alive()
        self.index.demote(alive[[self.dice.random() < 0.2 for _ in alive]])

    def peek(self) -> None:
        """A look at what goes next changes nothing that can be seen."""
        ids = self.index.coldest(5)
        assert self.index.resident(ids, DRAM).all()

    # What must hold --------------------------------------------------------------------------------

    def shrink(self) -> None:
        """Each tier gives up what is over its capacity, unless pins keep it."""
        for tier in (DRAM, NVME) if self.has_nvme else (DRAM,):
            excess = len(self.tiers[tier]) - self.capacity[tier]
            while excess > 0:
                n = self.dice.randrange(1, excess + 1)
                evicted = self.index.evict(n) if tier == DRAM else self.index.evict_nvme(n)
                self.gone(evicted, tier)
                if len(evicted.ids) < n:
                    assert not self.may_go(tier)
                    break
                excess -= n
            held = self.index.n_dram_blocks if tier == DRAM else self.index.n_nvme_blocks
            assert held == len(self.tiers[tier])

    def gone(self, evicted: Evicted, tier: int) -> None:
        for block in evicted.ids.tolist():
            row = self.names[block]
            assert row in self.may_go(tier), f"{row} is pinned, not there, or not a tail in tier {tier}"
            self.tiers[tier].remove(row)
            self.log.append(("dram" if tier == DRAM else "nvme", row))

    def may_go(self, tier: int) -> set[Row]:
        """By the model alone: tails of the tier that nobody has pinned; from NVMe the last copy if nothing follows."""
        pinned = {row for _, rows in self.pins for row in rows}
        here, anywhere = self.tiers[tier], self.tiers[DRAM] | self.tiers[NVME]
        followed_here = {row[:-BLOCK_TOKENS] for row in here}
        followed = {row[:-BLOCK_TOKENS] for row in anywhere}
        free = here - pinned - followed_here
        return free if tier == DRAM else {row for row in free if row in self.tiers[DRAM] or row not in followed}

    def check(self) -> None:
        self.index.check()
        stored = self.tiers[DRAM] | self.tiers[NVME]
        for row in self.tiers[NVME]:
            assert len(row) == BLOCK_TOKENS or row[:-BLOCK_TOKENS] in self.tiers[NVME]
        assert all(len(row) == BLOCK_TOKENS or row[:-BLOCK_TOKENS] in stored for row in stored)
        for tier in self.tiers if self.has_nvme else (DRAM,):
            ranks = self.index.rank(self.index.table.alive(), tier)
            assert not np.isnan(ranks).any()

    def run(self, n: int) -> Machine:
        for _ in range(n):
            what = self.dice.choices([self.request, self.unpin, self.demote, self.peek], [8, 2, 0.5, 0.5])[0]
            what()
        self.check()
        return self


@pytest.fixture(autouse=True)
def _small_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were millions of blocks."""
    monkeypatch.setattr(evictor_module, "_SNAPSHOT_MIN", 4)
    monkeypatch.setattr(evictor_module, "_CHUNK", 2)
    monkeypatch.setattr(evictor_module, "_RANKED_LATER_MIN", 8)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("nvme", [False, True])
def test_tails_first_never_a_pinned_one_and_capacity_holds(policy: str, nvme: bool) -> None:
    @given(seed=SEEDS)
    @settings(derandomize=True, deadline=None, max_examples=12)
    def check(seed: int) -> None:
        machine = Machine(policy, seed, nvme=nvme).run(40)
        for ids, _ in machine.pins:
            machine.index.unpin(ids)
        machine.pins.clear()
        machine.capacity = {DRAM: 0, NVME: 0}
        machine.shrink()
        assert machine.index.n_blocks == 0, "all that nobody uses can go"

    check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_calls_give_the_same_order(policy: str) -> None:
    for seed in range(4):
        first, second = Machine(policy, seed).run(60), Machine(policy, seed).run(60)
        assert len(first.log) > 20
        assert first.log == second.log


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_each_tier_may_have_a_policy_of_its_own(policy: str) -> None:
    other = "lru" if policy != "lru" else "fifo"
    for seed in range(3):
        Machine(policy, seed, other).run(40)
        Machine(other, seed, policy).run(40)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_demoted_blocks_go_first_until_they_are_used_again(policy: str) -> None:
    index = PrefixIndex(make_policy(policy), reserve_blocks=16)
    ids = []
    for i in range(8):
        path = RowPath.from_tokens(np.array([i, i], np.uint32), BLOCK_TOKENS)
        ids.append(int(index.insert(ROOT, path, 0, np.array([i]), 1, Use(float(i), block_tokens=2)).ids[0]))
    index.touch(np.array(ids[4:6]), Use(9.0, block_tokens=2))
    index.demote(np.array([ids[4], ids[6], ids[7]]))
    index.touch(np.array([ids[7]]), Use(10.0, block_tokens=2))
    assert set(index.evict(2).ids.tolist()) == {ids[4], ids[6]}
    assert ids[7] in index.table.alive().tolist()
