"""No block is found without its ancestors, whatever was evicted when; no names on the disk keep a tier from opening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore.tiers.nvme.names import FIRST, RECORD, seal
from kvstore.tiers.nvme.recovery import closed_and_ordered
from kvstore.tiers.nvme.tier import FrameState

PAGE = 4096
ROOT = b"r" * 16


def write(rig: Any, keys: Sequence[bytes], parents: Sequence[bytes], firsts: Sequence[bool]) -> list[bytes]:
    """As ``rig.put``, saying which are first blocks."""
    begin_write = rig.tier.begin_write
    rig.tier.begin_write = lambda *given, **more: begin_write(*given, np.array(firsts), **more)
    try:
        pending = rig.begin(list(keys), list(parents), 3)
    finally:
        rig.tier.begin_write = begin_write
    pending.job.write()
    pending.job.name()
    kept: list[bytes] = rig.finish(pending)
    return kept


def test_a_block_without_its_parent_is_never_named(rig: Any) -> None:
    parent, child, other = (rig.new_key() for _ in range(3))
    assert write(rig, [parent], [ROOT], [True]) == [parent]
    rig.free([parent])
    assert write(rig, [child, other], [parent, ROOT], [False, True]) == [other]
    names = rig.tier._opened.book.catalog.read()
    assert [value[:16] for value in names.values()] == [other]
    rig.abandon()
    rig.open()
    assert rig.take_recovered() == [other]


def test_nor_one_below_it_in_the_same_job_or_the_next(rig: Any) -> None:
    missing, child, below, later = (rig.new_key() for _ in range(4))
    jobs = []
    begin_write = rig.tier.begin_write
    rig.tier.begin_write = lambda *given, **more: begin_write(*given, np.zeros(len(given[0]), np.bool_), **more)
    jobs.append(rig.begin([child, below], [missing, child], 3))
    jobs.append(rig.begin([later], [below], 3))
    for pending in jobs:
        pending.job.write()
    for pending in jobs:
        pending.job.name()
        assert rig.finish(pending) == []
    assert rig.tier.n_live == 0
    assert (rig.tier._ledger.table.state == FrameState.FREE).all()
    rig.tier.check()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_a_block_that_calls_itself_first_comes_after_the_parent_that_it_has(order: list[int]) -> None:
    """Names like that were made by earlier versions: the parent was written again after the block."""
    keys = np.arange(48, dtype=np.uint8).reshape(3, 16)
    records = np.zeros(3, RECORD)
    ages = {0: 7, 1: 3, 2: 5}  # 0 is the parent of 1, 1 that of 2
    for at, block in enumerate(order):
        records["value"]["key"][at] = keys[block]
        records["value"]["parent"][at] = keys[block - 1] if block else np.frombuffer(ROOT, np.uint8)
        records["value"]["flags"][at] = FIRST if block < 2 else 0
        records["value"]["age"][at] = ages[block]
    seal(records)
    assert [order[at] for at in closed_and_ordered(records).tolist()] == [0, 1, 2]
