"""The index against a plain dictionary of paths that shares no code with it."""

from __future__ import annotations

import random

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

from kvstore.prefix_index import tree as tree_module
from kvstore.prefix_index.index import MissingParent, PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from tests.prefix_index.prompts import (
    BLOCK_TOKENS,
    ROOTS,
    Path,
    Prompt,
    draw_prompt,
    draw_relative,
    shared_plain,
)

SEEDS = st.integers(0, (1 << 32) - 1)


class Model:
    """Every block is one dictionary entry, keyed by its whole path."""

    def __init__(self) -> None:
        self.slot: dict[tuple[bytes, Path], int] = {}
        self.used: dict[tuple[bytes, Path], int] = {}
        self.pins: dict[tuple[bytes, Path], int] = {}
        self.clock = 0

    def match(self, root: bytes, rows: Path) -> list[tuple[bytes, Path]]:
        out: list[tuple[bytes, Path]] = []
        for i, row in enumerate(rows):
            if len(row) < BLOCK_TOKENS or (root, rows[: i + 1]) not in self.slot:
                break
            out.append((root, rows[: i + 1]))
        return out

    def partial(self, root: bytes, rows: Path) -> tuple[int, set[tuple[bytes, Path]]]:
        """Most tokens that any block shares with what comes next, and the blocks that share so many."""
        n = len(self.match(root, rows))
        if n == len(rows):
            return 0, set()
        shared = {
            key: shared_plain(key[1][-1], rows[n])
            for key in self.slot
            if key[0] == root and len(key[1]) == n + 1 and key[1][:n] == rows[:n]
        }
        best = max(shared.values(), default=0)
        return best, {key for key, size in shared.items() if size == best and best}

    def access(self, keys: list[tuple[bytes, Path]]) -> None:
        for key in reversed(keys):
            self.clock += 1
            self.used[key] = self.clock

    def next_out(self) -> tuple[bytes, Path] | None:
        parents = {(root, path[:-1]) for root, path in self.slot}
        leaves = [key for key in self.slot if key not in parents and not self.pins.get(key)]
        return min(leaves, key=lambda key: self.used[key], default=None)


class IndexMachine(RuleBasedStateMachine):
    nvme = False

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=self.nvme)
        self.model = Model()
        self.ids: dict[tuple[bytes, Path], int] = {}
        self.next_slot = 0
        self.seen: list[tuple[bytes, Prompt]] = []

    @initialize(seeds=st.lists(SEEDS, min_size=4, max_size=4))
    def start(self, seeds: list[int]) -> None:
        for seed in seeds:
            self.insert(seed)

    def draw(self, dice: random.Random) -> tuple[bytes, Prompt]:
        """Any prompt, one that was stored, or a relative of one."""
        what = dice.random()
        if what < 0.2 or not self.seen:
            return dice.choice(ROOTS), draw_prompt(dice)
        root, prompt = dice.choice(self.seen)
        return root, prompt if what < 0.4 else draw_relative(dice, prompt)

    def path_keys(self, dice: random.Random) -> list[tuple[bytes, Path]]:
        root, prompt = dice.choice(self.seen)
        keys = self.model.match(root, prompt.rows)
        return keys[: dice.randrange(len(keys) + 1)]

    def vector(self, keys: list[tuple[bytes, Path]]) -> NDArray[np.uint32]:
        return np.array([self.ids[key] for key in keys], np.uint32)

    @rule(seed=SEEDS)
    def insert(self, seed: int) -> None:
        dice = random.Random(seed)
        root, prompt = self.draw(dice)
        n = len(prompt.rows)
        first = dice.randrange(n + 1) if dice.random() < 0.3 else 0
        end = dice.randrange(first, n + 1) if dice.random() < 0.3 else n
        slots = np.arange(self.next_slot, self.next_slot + end - first)
        self.next_slot += end - first
        keys = [(root, prompt.rows[: i + 1]) for i in range(n)]
        self.seen.append((root, prompt))
        if end > first and any(key not in self.model.slot for key in keys[:first]):
            with pytest.raises(MissingParent):
                self.index.insert(root, prompt.path, first, slots, 7, Use())
            return
        result = self.index.insert(root, prompt.path, first, slots, 7, Use())
        wanted = keys[first:end]
        assert result.is_new.tolist() == [key not in self.model.slot for key in wanted]
        new = [key for key in wanted if key not in self.model.slot]
        for key, block, slot in zip(wanted, result.ids.tolist(), slots.tolist(), strict=True):
            assert self.ids.setdefault(key, block) == block
            self.model.slot.setdefault(key, slot)
        self.model.access(new)

    @rule(seeds=st.lists(SEEDS, min_size=1, max_size=6))
    def match(self, seeds: list[int]) -> None:
        for seed in seeds:
            root, prompt = self.draw(random.Random(seed))
            match = self.index.match(root, prompt.path)
            keys = self.model.match(root, prompt.rows)
            assert match.ids.tolist() == [self.ids[key] for key in keys]
            tokens, blocks = self.model.partial(root, prompt.rows)
            assert match.partial_tokens == tokens
            assert match.n_tokens == BLOCK_TOKENS * len(keys) + tokens
            assert match.partial_id in ({self.ids[key] for key in blocks} if tokens else {-1})

    @rule(seed=SEEDS)
    def touch(self, seed: int) -> None:
        keys = self.path_keys(random.Random(seed))
        self.index.touch(self.vector(keys), Use(1.0, category=3))
        self.model.access(keys)

    @rule(seed=SEEDS)
    def pin(self, seed: int) -> None:
        keys = self.path_keys(random.Random(seed))
        self.index.pin(self.vector(keys))
        for key in keys:
            self.model.pins[key] = self.model.pins.get(key, 0) + 1

    @rule(seed=SEEDS)
    def unpin(self, seed: int) -> None:
        pinned = [key for key, n in self.model.pins.items() if n]
        dice = random.Random(seed)
        keys = dice.sample(pinned, dice.randrange(len(pinned) + 1))
        self.index.unpin(self.vector(keys))
        for key in keys:
            self.model.pins[key] -= 1

    @rule(seed=SEEDS)
    def relocate(self, seed: int) -> None:
        keys = self.path_keys(random.Random(seed))
        slots = np.arange(self.next_slot, self.next_slot + len(keys))
        self.next_slot += len(keys)
        self.index.relocate(self.vector(keys), slots)
        self.model.slot.update(zip(keys, slots.tolist(), strict=True))

    @rule(n=st.sampled_from([0, 1, 1, 2, 3, 5, 40]))
    def evict(self, n: int) -> None:
        gone = self.index.evict(n)
        expected: list[tuple[int, int]] = []
        while len(expected) < n and (key := self.model.next_out()) is not None:
            expected.append((self.ids.pop(key), self.model.slot.pop(key)))
            del self.model.used[key]
        assert list(zip(gone.ids.tolist(), gone.slots.tolist(), strict=True)) == expected
        assert gone.size_bytes.tolist() == [7] * len(expected)

    @invariant()
    def consistent(self) -> None:
        self.index.check()
        assert self.index.n_blocks == len(self.model.slot)
        assert self.index.n_roots == len({root for root, _ in self.model.slot})
        keys = list(self.model.slot)
        assert self.index.slots(self.vector(keys)).tolist() == [self.model.slot[key] for key in keys]


class NvmeIndexMachine(IndexMachine):
    """With room for an NVMe tier that holds nothing, all answers stay the same."""

    nvme = True


MACHINES = [IndexMachine, NvmeIndexMachine]


@pytest.fixture(params=[1 << 16, 24])
def merge_bytes_max(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tree_module, "_MERGE_BYTES_MAX", request.param)
    return int(request.param)


@pytest.mark.parametrize("machine", MACHINES)
def test_index_equals_the_dictionary(machine: type[IndexMachine], merge_bytes_max: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("machine_type", MACHINES)
@pytest.mark.parametrize("seed", range(3))
def test_index_equals_the_dictionary_over_a_long_run(
    machine_type: type[IndexMachine], seed: int, merge_bytes_max: int
) -> None:
    dice = random.Random(seed)
    machine = machine_type()
    machine.start([dice.getrandbits(32) for _ in range(4)])
    for _ in range(400):
        what = dice.random()
        if what < 0.35:
            machine.insert(dice.getrandbits(32))
        elif what < 0.65:
            machine.match([dice.getrandbits(32) for _ in range(4)])
        elif what < 0.9:
            dice.choice([machine.touch, machine.pin, machine.unpin, machine.relocate])(dice.getrandbits(32))
        else:
            machine.evict(dice.choice([1, 2, 3, 5, 20]))
        machine.consistent()
