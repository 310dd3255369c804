"""Blocks of a namespace that is cleared: hidden at once, taken bit by bit, in step with the orders of both tiers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath

ROOTS = (b"a" * 16, b"b" * 16)


def path_of(dice: random.Random) -> RowPath:
    rows = [dice.choice([1, 1, 2]) for _ in range(dice.randint(1, 6))]
    return RowPath.from_tokens(np.repeat(np.array(rows, np.uint32), 2), 2)


def grow(index: PrefixIndex, dice: random.Random, n_prompts: int) -> None:
    """Prompts of two namespaces in DRAM, and parts of them on NVMe as well."""
    for turn in range(n_prompts):
        namespace = dice.randrange(2)
        path = path_of(dice)
        n_known = len(index.match(ROOTS[namespace], path).ids)
        n_new = path.n_rows - n_known
        if not n_new:
            continue
        slots = np.arange(n_new) + 100 * turn
        index.insert(ROOTS[namespace], path, n_known, slots, 1, Use(float(turn), namespace=namespace))
        if index.table.nvme:
            ids = index.match(ROOTS[namespace], path).ids[: dice.randint(0, path.n_rows)]
            joining = ids[index.may_join_nvme(ids)]
            index.add_nvme(joining, np.arange(len(joining)) + 1000 + 100 * turn)


@pytest.mark.parametrize("nvme", [False, True])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_orders_of_eviction_keep_in_step_with_hidden_blocks_that_go(nvme: bool, seed: int) -> None:
    dice = random.Random(seed)
    index = PrefixIndex(make_policy("lru"), reserve_blocks=64, nvme=nvme)
    grow(index, dice, 12)
    evict = [index.evict, index.evict_nvme] if nvme else [index.evict]
    dice.choice(evict)(dice.randint(0, 3))
    counts = index.hiding.hide([0])[0]
    assert index.n_hidden_blocks == counts.n_blocks
    index.check()
    others = index.n_blocks
    while index.n_hidden_blocks:
        first = dice.randrange(index.table.n_used)
        end = dice.randint(first, index.table.n_used) + 1
        if nvme:
            index.hiding.lose_nvme(index.hiding.hidden(first, end))
            index.check()
        index.hiding.remove(first, end, dice.randint(1, 3))
        index.check()
        if dice.random() < 0.2:
            dice.choice(evict)(1)
            index.check()
    assert index.n_blocks <= others
    everything = index.match(ROOTS[0], RowPath.from_tokens(np.ones(2, np.uint32), 2))
    assert not len(everything.ids)
    for tier, leave in zip((DRAM, NVME), evict, strict=False):
        left = index.n_dram_blocks if tier == DRAM else index.n_nvme_blocks
        assert len(leave(100).ids) == left
    assert index.n_blocks == 0
