"""Blocks by label into an index: exactly those whose whole path is there, whatever else the labels say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.takeover.blocks import adopt_blocks
from kvstore.tiers.adopted import FormerBlocks
from kvstore.tiers.directory import Labels
from kvstore.tiers.dram import DramTier

PAGE = 4096
Lives = Callable[..., Any]
MANY = 48


class OldTier(DramTier):
    """A tier whose blocks count as taken over, with labels made up by a test."""

    def __init__(self, labels: Labels) -> None:
        super().__init__(MANY * PAGE, 16 * PAGE, 4 * PAGE, prefault=False)
        slots = self.allocate(0, "a", PAGE, len(labels))
        self.commit(slots, np.arange(len(slots)))
        self.former_blocks = FormerBlocks(slots, labels)


def key_of(name: int) -> bytes:
    return name.to_bytes(1, "little") * 8 + name.to_bytes(8, "big")


def labels_of(blocks: list[tuple[int, int]], sizes: list[int] | None = None) -> Labels:
    """(name, name of the parent; 0 for a root) each; a later block ranks higher."""
    n = len(blocks)

    def column(values: list[bytes]) -> Any:
        return np.frombuffer(b"".join(values), np.uint8).reshape(n, 16)

    return Labels(
        column([key_of(name) for name, _ in blocks]),
        column([key_of(parent) for _, parent in blocks]),
        np.array([parent == 0 for _, parent in blocks], np.bool_),
        np.zeros((n, 16), np.uint8),
        np.array(sizes or [PAGE] * n, np.uint32),
        np.arange(n, dtype=np.float64),
    )


def adopt(labels: Labels, index: PrefixIndex | None = None) -> tuple[set[int], DramTier, PrefixIndex]:
    index = index or PrefixIndex(make_policy("lru"), reserve_blocks=64)
    tier = OldTier(labels)
    n = adopt_blocks(index, tier, {bytes(16): 0}.get, 0.0)
    alive = index.table.alive()
    in_dram = alive[index.table.slot[alive] >= 0]
    assert len(in_dram) == n
    tier.check()
    index.check()
    assert tier.stats()["used_bytes"] == n * PAGE
    assert tier.tags(index.slots(in_dram)).tolist() == in_dram.tolist()
    return {int(key[0]) for key in index.table.key[in_dram]}, tier, index


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=MANY).filter(
        lambda blocks: all(name != parent for name, parent in blocks)
    )
)
@settings(deadline=None)
def test_those_whose_path_is_whole_are_found_and_only_they(blocks: list[tuple[int, int]]) -> None:
    """Against a walk from block to block, over the first copy of each."""
    first: dict[int, int] = {}
    for name, parent in blocks:
        first.setdefault(name, parent)

    def whole(name: int) -> bool | None:
        seen = set()
        while name:
            if name in seen:
                return None  # a circle
            seen.add(name)
            if name not in first:
                return False
            name = first[name]
        return True

    answers = {name: whole(name) for name in first}
    found, tier, _ = adopt(labels_of(blocks))
    if None in answers.values():
        assert found == set()  # such labels were never written: nothing of them is believed
    else:
        assert found == {name for name, answer in answers.items() if answer}
    tier.close()


def test_a_long_path_in_any_order(lives: Lives) -> None:
    rng = np.random.default_rng(0)
    blocks = [(name, name - 1) for name in range(1, MANY + 1)]
    shuffled = [blocks[i] for i in rng.permutation(MANY)]
    found, tier, index = adopt(labels_of(shuffled))
    assert len(found) == MANY
    depth = {int(index.table.key[i][0]): i for i in index.table.alive().tolist()}
    for name, parent in blocks[1:]:
        assert index.table.parent[depth[name]] == depth[parent]
    tier.close()


def test_blocks_that_do_not_fit_their_slots_are_left_out() -> None:
    found, tier, _ = adopt(labels_of([(1, 0), (2, 1), (3, 0), (4, 0)], [PAGE, PAGE + 1, 0, 17]))
    assert found == {1, 4}
    tier.close()


def test_a_namespace_that_is_not_known_leaves_its_blocks_out() -> None:
    labels = labels_of([(1, 0), (2, 1), (3, 0)])
    labels.namespaces[0] = 5
    found, tier, _ = adopt(labels)
    assert found == {3}
    tier.close()


def test_a_parent_on_another_tier_will_do_and_copies_meet() -> None:
    """What NVMe had was made known first; DRAM holds the end of a path, and a block of it too."""
    index = PrefixIndex(make_policy("lru"), reserve_blocks=64, nvme=True)
    nvme = labels_of([(1, 0), (2, 1), (3, 2)])
    sizes = np.full(3, PAGE, np.uint32)
    index.insert_cold(nvme.keys, nvme.parents, np.arange(3), sizes, np.zeros(3, np.uint32), 0.0)
    found, tier, index = adopt(labels_of([(4, 3), (2, 1), (6, 5)]), index)
    assert found == {2, 4}
    assert index.n_blocks == 4
    tier.close()


def test_a_prompt_finds_them_and_they_are_evicted_in_their_order() -> None:
    index = PrefixIndex(make_policy("lru"), reserve_blocks=64)
    root = b"r" * 16
    paths = [RowPath.from_tokens(np.arange(10 * i, 10 * i + 4, dtype=np.uint32), 1) for i in range(3)]
    keys = [path.chain(root, 0, 4) for path in paths]
    parents = [np.vstack([np.frombuffer(root, np.uint8), key[:-1]]) for key in keys]
    ranks = np.array([[7, 6, 5, 4], [3, 2, 1, 0], [11, 10, 9, 8]], np.float64)
    first = np.tile([True, False, False, False], 3)
    labels = Labels(np.vstack(keys), np.vstack(parents), first, np.zeros((12, 16), np.uint8),
                    np.full(12, PAGE, np.uint32), ranks.reshape(-1))  # fmt: skip
    _, tier, index = adopt(labels, index)
    slots = tier.former_blocks.slots.reshape(3, 4)
    gone = [int(index.evict(1).slots[0]) for _ in range(5)]
    assert gone == [*slots[1, ::-1].tolist(), int(slots[0, 3])]
    assert [len(index.match(root, path).ids) for path in paths] == [3, 0, 4]
    assert index.slots(index.match(root, paths[2]).ids).tolist() == slots[2].tolist()
    tier.close()


def test_an_index_that_is_in_use_already_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    index = PrefixIndex(make_policy("lru"), reserve_blocks=64)
    path = RowPath.from_tokens(np.arange(3, dtype=np.uint32), 1)
    index.insert(b"r" * 16, path, 0, np.array([-5, -6, -7]), PAGE, Use())
    tier = OldTier(labels_of([(1, 0)]))
    assert adopt_blocks(index, tier, {bytes(16): 0}.get, 0.0) == 0
    assert tier.stats()["used_bytes"] == 0
    assert "cold" in caplog.text
    tier.close()
