"""The index against a plain dictionary of paths that shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.prefix_index import tree as tree_module
from kvstore.prefix_index.index import MissingParent, PrefixIndex
from kvstore.prefix_index.policy import make_policy
from kvstore.prefix_index.rows import RowPath
from kvstore.types import ExtraKey

BLOCK_TOKENS = 3
# Ids that share low bytes, high bytes or none, so that an order by bytes is put to the test.
TOKENS = [0, 1, 256, 257, 1 << 24, (1 << 32) - 1]
ROOTS = [b"a" * 16, b"b" * 16]

Symbol = tuple[object, ...]
Path = tuple[tuple[Symbol, ...], ...]


class Prompt:
    """Tokens with extras, once as a RowPath and once as plain symbols, one per token."""

    def __init__(self, tokens: list[int], extras: list[ExtraKey]) -> None:
        self.tokens = tokens
        self.extras = extras
        self.path = RowPath.from_tokens(np.array(tokens, np.uint32), BLOCK_TOKENS, extras)
        symbols: list[Symbol] = [("plain", t) for t in tokens]
        for extra in extras:
            for i in range(extra.n_tokens):
                at = extra.start_token + i
                if at < len(tokens):
                    symbols[at] = ("covered", tokens[at], extra.digest, i)
        self.rows: Path = tuple(
            tuple(symbols[i : i + BLOCK_TOKENS]) for i in range(0, len(symbols), BLOCK_TOKENS)
        )

    def __repr__(self) -> str:
        return f"Prompt({self.rows})"


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    tokens = draw(st.lists(st.sampled_from(TOKENS[: draw(st.integers(1, len(TOKENS)))]), max_size=14))
    extras = []
    at = 0
    for gap, size, digest in draw(
        st.lists(
            st.tuples(st.integers(0, 8), st.integers(1, 5), st.sampled_from([b"img", b"pic"])), max_size=2
        )
    ):
        extras.append(ExtraKey(at + gap, size, digest))
        at += gap + size
    return Prompt(tokens, extras if draw(st.booleans()) else [])


def shared_plain(row: tuple[Symbol, ...], other: tuple[Symbol, ...]) -> int:
    n = 0
    for mine, theirs in zip(row, other, strict=False):
        if mine != theirs or mine[0] != "plain":
            break
        n += 1
    return n


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
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(make_policy("lru"), reserve_blocks=16)
        self.model = Model()
        self.ids: dict[tuple[bytes, Path], int] = {}
        self.next_slot = 0
        self.seen: list[tuple[bytes, Prompt]] = []

    @initialize()
    def start(self) -> None:
        self.index.check()

    def known(self, data: st.DataObject) -> tuple[bytes, Prompt]:
        return data.draw(st.sampled_from(self.seen), label="known prompt")

    def relative(self, data: st.DataObject) -> tuple[bytes, Prompt]:
        """A known prompt cut, continued, with one token changed, or with other content behind some tokens."""
        root, prompt = self.known(data)
        tokens = list(prompt.tokens[: data.draw(st.integers(0, len(prompt.tokens)), label="kept")])
        tokens += data.draw(st.lists(st.sampled_from(TOKENS), max_size=5), label="continued")
        if tokens and data.draw(st.booleans(), label="change one"):
            tokens[data.draw(st.integers(0, len(tokens) - 1))] = data.draw(st.sampled_from(TOKENS))
        extras = prompt.extras
        if data.draw(st.booleans(), label="change extras"):
            at = data.draw(st.integers(0, 12), label="covered from")
            extras = [ExtraKey(at, data.draw(st.integers(1, 4)), b"img")] if at < len(tokens) else []
        return root, Prompt(tokens, extras)

    def path_keys(self, data: st.DataObject) -> list[tuple[bytes, Path]]:
        root, prompt = self.known(data)
        keys = self.model.match(root, prompt.rows)
        return keys[: data.draw(st.integers(0, len(keys)), label="first blocks")]

    def vector(self, keys: list[tuple[bytes, Path]]) -> np.ndarray:
        return np.array([self.ids[key] for key in keys], np.uint32)

    @rule(root=st.sampled_from(ROOTS), prompt=prompts(), data=st.data())
    def insert_any(self, root: bytes, prompt: Prompt, data: st.DataObject) -> None:
        self.insert(root, prompt, data)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def insert_relative(self, data: st.DataObject) -> None:
        self.insert(*self.relative(data), data)

    def insert(self, root: bytes, prompt: Prompt, data: st.DataObject) -> None:
        n = len(prompt.rows)
        first = data.draw(st.integers(0, n), label="first row") if data.draw(st.booleans()) else 0
        end = data.draw(st.integers(first, n), label="end row")
        slots = np.arange(self.next_slot, self.next_slot + end - first)
        self.next_slot += end - first
        keys = [(root, prompt.rows[: i + 1]) for i in range(n)]
        self.seen.append((root, prompt))
        if end > first and any(key not in self.model.slot for key in keys[:first]):
            with pytest.raises(MissingParent):
                self.index.insert(root, prompt.path, first, slots, 7, 0.0)
            return
        result = self.index.insert(root, prompt.path, first, slots, 7, 0.0)
        wanted = keys[first:end]
        assert result.is_new.tolist() == [key not in self.model.slot for key in wanted]
        new = [key for key in wanted if key not in self.model.slot]
        for key, block, slot in zip(wanted, result.ids.tolist(), slots.tolist(), strict=True):
            assert self.ids.setdefault(key, block) == block
            self.model.slot.setdefault(key, slot)
        self.model.access(new)

    def check_match(self, root: bytes, prompt: Prompt) -> None:
        match = self.index.match(root, prompt.path)
        keys = self.model.match(root, prompt.rows)
        assert match.ids.tolist() == [self.ids[key] for key in keys]
        tokens, blocks = self.model.partial(root, prompt.rows)
        assert match.partial_tokens == tokens
        assert match.n_tokens == BLOCK_TOKENS * len(keys) + tokens
        assert match.partial_id in ({self.ids[key] for key in blocks} if tokens else {-1})

    @rule(root=st.sampled_from(ROOTS), prompt=prompts())
    def match_any(self, root: bytes, prompt: Prompt) -> None:
        self.check_match(root, prompt)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def match_known(self, data: st.DataObject) -> None:
        self.check_match(*self.known(data))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def match_relative(self, data: st.DataObject) -> None:
        self.check_match(*self.relative(data))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        keys = self.path_keys(data)
        self.index.touch(self.vector(keys), 1.0, category=3)
        self.model.access(keys)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        keys = self.path_keys(data)
        self.index.pin(self.vector(keys))
        for key in keys:
            self.model.pins[key] = self.model.pins.get(key, 0) + 1

    @precondition(lambda self: any(self.model.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = sorted((key for key, n in self.model.pins.items() if n), key=lambda key: self.ids[key])
        keys = data.draw(st.lists(st.sampled_from(pinned), unique=True), label="unpinned")
        self.index.unpin(self.vector(keys))
        for key in keys:
            self.model.pins[key] -= 1

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def relocate(self, data: st.DataObject) -> None:
        keys = self.path_keys(data)
        slots = np.arange(self.next_slot, self.next_slot + len(keys))
        self.next_slot += len(keys)
        self.index.relocate(self.vector(keys), slots)
        self.model.slot.update(zip(keys, slots.tolist(), strict=True))

    @rule(n=st.integers(0, 12))
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


@pytest.fixture(params=[1 << 16, 24])
def merge_bytes_max(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tree_module, "_MERGE_BYTES_MAX", request.param)
    return int(request.param)


def test_index_equals_the_dictionary(merge_bytes_max: int) -> None:
    run_state_machine_as_test(
        IndexMachine,
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
