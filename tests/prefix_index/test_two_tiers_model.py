"""The index over DRAM and NVMe against a plain dictionary of paths."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.prefix_index import evictor as evictor_module
from kvstore.prefix_index import tree as tree_module
from kvstore.prefix_index.block_table import COLD, DRAM, NVME
from kvstore.prefix_index.index import Evicted, MissingParent, PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from tests.prefix_index.prompts import BLOCK_TOKENS, ROOTS, Prompt, draw_prompt, draw_relative
from tests.prefix_index.tier_oracle import Key, Oracle, Refused

SEEDS = st.integers(0, (1 << 32) - 1)
COUNTS = st.sampled_from([0, 1, 1, 2, 3, 5, 40])


class TwoTierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)
        self.oracle = Oracle()
        self.ids: dict[Key, int] = {}
        self.names: dict[int, Key] = {}
        self.next_slot = 0
        self.seen: list[tuple[bytes, Prompt]] = []

    @initialize(seeds=st.lists(SEEDS, min_size=4, max_size=4))
    def start(self, seeds: list[int]) -> None:
        for seed in seeds:
            self.insert(seed)
            self.persist(seed)

    # Asking

    def draw(self, dice: random.Random) -> tuple[bytes, Prompt]:
        what = dice.random()
        if what < 0.2 or not self.seen:
            return dice.choice(ROOTS), draw_prompt(dice)
        root, prompt = dice.choice(self.seen)
        return root, prompt if what < 0.5 else draw_relative(dice, prompt)

    def vector(self, keys: list[Key]) -> NDArray[np.uint32]:
        return np.array([self.ids[key] for key in keys], np.uint32)

    def some(self, dice: random.Random, keys: list[Key]) -> list[Key]:
        return dice.sample(keys, dice.randrange(len(keys) + 1))

    def slots(self, n: int) -> NDArray[np.int64]:
        self.next_slot += n
        return np.arange(self.next_slot - n, self.next_slot)

    def forget(self) -> None:
        """Names of blocks that left."""
        for key in [key for key in self.ids if key not in self.oracle.blocks]:
            del self.ids[key]

    @rule(seeds=st.lists(SEEDS, min_size=1, max_size=5))
    def match(self, seeds: list[int]) -> None:
        for seed in seeds:
            root, prompt = self.draw(random.Random(seed))
            match = self.index.match(root, prompt.path)
            keys, tokens, blocks = self.oracle.match(root, prompt.rows)
            assert match.ids.tolist() == [self.ids[key] for key in keys]
            assert match.partial_tokens == tokens
            assert match.n_tokens == BLOCK_TOKENS * len(keys) + tokens
            assert match.partial_id in ({self.ids[key] for key in blocks} if tokens else {-1})

    @rule(n=COUNTS)
    def coldest(self, n: int) -> None:
        expected = self.oracle.in_order(self.oracle.evictable_dram)[:n]
        assert self.index.coldest(n).tolist() == [self.ids[key] for key in expected]

    # Gaining

    @rule(seed=SEEDS)
    def insert(self, seed: int) -> None:
        dice = random.Random(seed)
        root, prompt = self.draw(dice)
        n = len(prompt.rows)
        first = dice.randrange(n + 1) if dice.random() < 0.3 else 0
        end = dice.randrange(first, n + 1) if dice.random() < 0.3 else n
        slots = self.slots(end - first)
        self.seen.append((root, prompt))
        try:
            taken = self.oracle.insert(root, prompt.rows, first, slots.tolist())
        except Refused:
            with pytest.raises(MissingParent):
                self.index.insert(root, prompt.path, first, slots, 7, Use())
            return
        result = self.index.insert(root, prompt.path, first, slots, 7, Use(0.0, namespace=5))
        assert result.is_new.tolist() == taken
        for i, block in enumerate(result.ids.tolist()):
            key = (root, prompt.rows[: first + i + 1])
            assert self.ids.setdefault(key, block) == block

    @rule(seed=SEEDS)
    def persist(self, seed: int) -> None:
        """Write some blocks of DRAM with what they need, as far as the writing gets."""
        dice = random.Random(seed)
        keys = self.some(dice, [key for key, block in self.oracle.blocks.items() if block.dram is not None])
        chain = self.oracle.unpersisted(keys)
        assert self.index.chain_unpersisted(self.vector(keys)).tolist() == [self.ids[key] for key in chain]
        chain = chain[: dice.randrange(len(chain) + 1)] if dice.random() < 0.3 else chain
        slots = self.slots(len(chain))
        assert self.index.may_join_nvme(self.vector(chain)).all()
        self.index.add_nvme(self.vector(chain), slots)
        for key, slot in zip(chain, slots.tolist(), strict=True):
            self.oracle.blocks[key].nvme = slot

    @rule(seed=SEEDS)
    def persist_anything(self, seed: int) -> None:
        """Of any blocks, only those may join NVMe whose parent is there or joins before."""
        dice = random.Random(seed)
        keys = self.some(dice, list(self.oracle.blocks))
        joined: list[Key] = []
        for key in keys:
            before = self.oracle.before(key)
            above = before is None or before in joined or self.oracle.blocks[before].nvme is not None
            if self.oracle.blocks[key].nvme is None and above:
                joined.append(key)
        ready = self.index.may_join_nvme(self.vector(keys))
        assert [key for key, may in zip(keys, ready.tolist(), strict=True) if may] == joined
        if len(joined) < len(keys):
            with pytest.raises(IntegrityError, match="may_join_nvme"):
                self.index.add_nvme(self.vector(keys), np.zeros(len(keys), np.int64))

    @rule(seed=SEEDS)
    def onboard(self, seed: int) -> None:
        dice = random.Random(seed)
        keys = self.some(dice, [key for key, block in self.oracle.blocks.items() if block.dram is None])
        slots = self.slots(len(keys))
        self.index.add_dram(self.vector(keys), slots)
        for key, slot in zip(keys, slots.tolist(), strict=True):
            self.oracle.blocks[key].dram = slot

    # Using

    def line(self, dice: random.Random) -> list[Key]:
        if not self.oracle.blocks:
            return []
        keys = self.oracle.line(dice.choice(list(self.oracle.blocks)))
        return keys[: dice.randrange(len(keys) + 1)]

    @rule(seed=SEEDS)
    def touch(self, seed: int) -> None:
        keys = self.line(random.Random(seed))
        self.index.touch(self.vector(keys), Use(1.0, category=3))
        self.oracle.access(keys)

    @rule(seed=SEEDS)
    def pin(self, seed: int) -> None:
        keys = self.line(random.Random(seed))
        self.index.pin(self.vector(keys))
        for key in keys:
            self.oracle.blocks[key].pins += 1

    @rule(seed=SEEDS)
    def unpin(self, seed: int) -> None:
        dice = random.Random(seed)
        keys = self.some(dice, [key for key, block in self.oracle.blocks.items() if block.pins])
        self.index.unpin(self.vector(keys))
        for key in keys:
            self.oracle.blocks[key].pins -= 1
        for key in keys:
            self.oracle.leave(key)
        self.forget()

    # Losing

    def lose(self, evicted: Evicted, expected: list[tuple[int, int | None, bool]]) -> None:
        got = zip(evicted.ids.tolist(), evicted.slots.tolist(), evicted.gone.tolist(), strict=True)
        assert list(got) == expected
        assert evicted.size_bytes.tolist() == [7] * len(expected)
        self.forget()

    @rule(n=COUNTS)
    def evict(self, n: int) -> None:
        expected: list[tuple[int, int | None, bool]] = []
        while len(expected) < n and (order := self.oracle.in_order(self.oracle.evictable_dram)):
            slot = self.oracle.blocks[order[0]].dram
            expected.append((self.ids[order[0]], slot, self.oracle.evict_dram(order[0])))
        self.lose(self.index.evict(n), expected)

    @rule(n=COUNTS)
    def evict_nvme(self, n: int) -> None:
        expected: list[tuple[int, int | None, bool]] = []
        while len(expected) < n and (order := self.oracle.in_order(self.oracle.evictable_nvme)):
            slot = self.oracle.blocks[order[0]].nvme
            expected.append((self.ids[order[0]], slot, self.oracle.evict_nvme(order[0])))
        self.lose(self.index.evict_nvme(n), expected)

    @rule(n=COUNTS, most_passed=st.integers(0, 4))
    def evict_among(self, n: int, most_passed: int) -> None:
        def worth(slot: int) -> int:
            return slot % 3 - 1

        expected: list[tuple[int, int | None, bool]] = []
        gained, passed = 0, set[Key]()
        while gained < n and len(passed) <= most_passed:
            order = [key for key in self.oracle.in_order(self.oracle.evictable_dram) if key not in passed]
            if not order:
                break
            slot = self.oracle.blocks[order[0]].dram
            assert slot is not None
            if worth(slot) < 0:
                passed.add(order[0])
                continue
            gained += worth(slot)
            expected.append((self.ids[order[0]], slot, self.oracle.evict_dram(order[0])))
        self.lose(self.index.evict_among(n, worth, most_passed), expected)

    @rule(seed=SEEDS)
    def break_some(self, seed: int) -> None:
        dice = random.Random(seed)
        keys = [key for key, block in self.oracle.blocks.items() if block.nvme is not None]
        what = dice.random()
        if what < 0.3:
            keys = [key for key in keys if self.oracle.blocks[key].pins]
        elif what < 0.8:  # the last copies of blocks that others follow
            keys = [key for key in keys if self.oracle.blocks[key].dram is None and self.oracle.children(key)]
        keys = dice.sample(keys, min(len(keys), dice.randrange(3)))
        assert self.index.break_nvme(self.vector(keys)).tolist() == [self.oracle.blocks[key].nvme for key in keys]
        for key in keys:
            self.oracle.blocks[key].nvme = None
        for key in keys:
            self.oracle.leave(key)
        self.forget()

    @rule(seed=SEEDS)
    def break_what_is_not_there(self, seed: int) -> None:
        keys = [key for key, block in self.oracle.blocks.items() if block.nvme is None]
        if keys:
            with pytest.raises(IntegrityError, match="resident"):
                self.index.break_nvme(self.vector([random.Random(seed).choice(keys)]))

    @rule(seed=SEEDS)
    def relocate(self, seed: int) -> None:
        dice = random.Random(seed)
        keys = self.some(dice, [key for key, block in self.oracle.blocks.items() if block.dram is not None])
        slots = self.slots(len(keys))
        self.index.relocate(self.vector(keys), slots)
        for key, slot in zip(keys, slots.tolist(), strict=True):
            self.oracle.blocks[key].dram = slot

    # A new process

    @rule(seed=SEEDS)
    def reopen(self, seed: int) -> None:
        dice = random.Random(seed)
        if dice.random() < 0.6:
            return  # not each time: what is left is less
        order = sorted(self.oracle.durable(), key=lambda key: (len(key[1]), dice.random()))
        dram: list[Key] = []
        if dice.random() < 0.5:
            for key in sorted(self.oracle.blocks, key=lambda key: len(key[1])):
                before = self.oracle.before(key)
                if self.oracle.blocks[key].dram is not None and (before is None or before in order + dram):
                    dram.append(key)
        old, self.index = self.index, PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)
        ids: dict[Key, int] = {}
        for keys, tier, slots in ((order, NVME, old.nvme_slots), (dram, DRAM, old.slots)):
            at = self.vector(keys)
            n = len(keys)
            found = self.index.insert_cold(
                old.table.key[at], old.parent_keys(at), slots(at), np.full(n, 7), np.full(n, 5), 0.0, tier
            )
            ids.update(zip(keys, found.tolist(), strict=True))
        self.ids = ids
        self.oracle.reopen(order, dram)

    @invariant()
    def consistent(self) -> None:
        index, blocks = self.index, self.oracle.blocks
        index.check()
        keys = list(blocks)
        assert sorted(self.ids) == sorted(keys)
        ids = self.vector(keys)
        assert index.slots(ids).tolist() == [-1 if blocks[k].dram is None else blocks[k].dram for k in keys]
        assert index.nvme_slots(ids).tolist() == [-1 if blocks[k].nvme is None else blocks[k].nvme for k in keys]
        assert index.resident(ids, DRAM).tolist() == [blocks[k].dram is not None for k in keys]
        assert index.resident(ids, NVME).tolist() == [blocks[k].nvme is not None for k in keys]
        assert index.table.hits[ids].tolist() == [blocks[k].hits for k in keys]
        assert (index.table.namespace[ids] == 5).all()
        assert (index.table.state[ids] == COLD).tolist() == [blocks[k].cold for k in keys]
        assert index.n_blocks == len(keys)
        assert index.n_dram_blocks == sum(block.dram is not None for block in blocks.values())
        assert index.n_nvme_blocks == sum(block.nvme is not None for block in blocks.values())
        assert index.n_broken_blocks == sum(block.broken for block in blocks.values())
        assert index.n_cold_blocks == sum(block.cold for block in blocks.values())
        assert index.n_roots == len({root for (root, _), block in blocks.items() if not block.cold})

    @invariant()
    def keys_are_chained(self) -> None:
        """By the hash as documented: parent, row, digest, length of the digest."""
        index = self.index
        keys = [key for key, block in self.oracle.blocks.items() if not block.cold]
        ids = self.vector(keys)
        parents = index.parent_keys(ids)
        for i, (key, (row, digest)) in enumerate(zip(keys, index.frame_rows(ids), strict=True)):
            before = self.oracle.before(key)
            assert parents[i].tobytes() == (key[0] if before is None else index.table.key[self.ids[before]].tobytes())
            assert row == b"".join(int(symbol[1]).to_bytes(4, "little") for symbol in key[1][-1])  # type: ignore[call-overload]
            assert bool(digest) == any(symbol[0] == "covered" for symbol in key[1][-1])
            message = parents[i].tobytes() + row + digest + bytes((len(digest),))
            made = blake2b(message, digest_size=16, person=b"kvstore.block.1").digest()
            assert index.table.key[ids[i]].tobytes() == made
        cold = [key for key, block in self.oracle.blocks.items() if block.cold]
        for i, key in enumerate(cold):
            before = self.oracle.before(key)
            expected = key[0] if before is None else index.table.key[self.ids[before]].tobytes()
            assert index.parent_keys(self.vector(cold))[i].tobytes() == expected


@pytest.fixture(params=["as it is", "small"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with edges that split and merge and snapshots that hold few blocks."""
    if request.param == "small":
        monkeypatch.setattr(tree_module, "_MERGE_BYTES_MAX", 24)
        monkeypatch.setattr(evictor_module, "_SNAPSHOT_MIN", 3)
        monkeypatch.setattr(evictor_module, "_CHUNK", 2)
        monkeypatch.setattr(evictor_module, "_HEAP_SLACK", 4)


@pytest.mark.usefixtures("sizes")
def test_two_tiers_equal_the_dictionary() -> None:
    run_state_machine_as_test(
        TwoTierMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("seed", range(3))
def test_two_tiers_equal_the_dictionary_over_a_long_run(seed: int) -> None:
    dice = random.Random(seed)
    machine = TwoTierMachine()
    machine.start([dice.getrandbits(32) for _ in range(4)])
    counted: list[Callable[[int], None]] = [machine.evict, machine.evict_nvme, machine.coldest]
    drawn: list[Callable[[int], None]] = [
        machine.insert, machine.insert, machine.insert, machine.persist, machine.persist, machine.onboard,
        machine.persist_anything, machine.touch, machine.pin, machine.unpin, machine.break_some, machine.break_some,
        machine.relocate, machine.break_what_is_not_there,
    ]  # fmt: skip
    for step in range(300):
        what = dice.random()
        if what < 0.5:
            dice.choice(drawn)(dice.getrandbits(32))
        elif what < 0.75:
            machine.match([dice.getrandbits(32) for _ in range(4)])
        elif what < 0.95:
            dice.choice(counted)(dice.choice([1, 2, 3, 5]))
        else:
            machine.evict_among(dice.randrange(4), dice.randrange(4))
        if step % 60 == 59:
            machine.reopen(dice.getrandbits(32))
        machine.consistent()
    machine.keys_are_chained()
