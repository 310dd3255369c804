"""Case 7: ten thousand prefixes are looked up and never read, then the cache fills. Nothing stays pinned."""

from __future__ import annotations

import pytest

from tests.cases.scenes import READER, WRITER, again, read, stored_below
from tests.store.two_tier import TwoTierRig

N_LOOKUPS = 10_000


@pytest.mark.parametrize("where", ["in DRAM", "on NVMe only"])
def test_lookups_pin_nothing(rig: TwoTierRig, where: str) -> None:
    prompts = [rig.rows(4, tag=tag) for tag in range(1, 7)]
    if where == "in DRAM":
        for prompt in prompts:
            rig.put(WRITER, prompt)
    else:
        rig = stored_below(rig, *prompts)
        prompts = [again(rig, prompt) for prompt in prompts]
    for i in range(N_LOOKUPS):
        assert len(rig.store.match(prompts[i % 6]).ids) == 4
        if i % 100 == 0:
            persist = rig.store.begin_persist(prompts[i % 6])  # asks what is durable, and goes away
            assert persist is not None
            rig.store.end_persist(persist)
    rig.settle()
    assert not rig.store.index.table.refs.any()
    assert rig.stat("leases") == 0
    # All of it can go, and new blocks find room in both tiers.
    for tag in range(10, 40):
        assert rig.put(WRITER, rig.rows(8, tag=tag)).n_committed == 8
        rig.settle()
        rig.unmap_retired()
    assert all(rig.found(prompt) == 0 for prompt in prompts)
    assert not rig.store.index.table.refs.any()
    rig.store.check()
    if not rig.ended:
        rig.close()


def test_prefetches_that_nobody_reads_pin_nothing(rig: TwoTierRig) -> None:
    prompts = [rig.rows(5, tag=tag) for tag in range(1, 9)]
    rig = stored_below(rig, *prompts)
    prompts = [again(rig, prompt) for prompt in prompts]
    for i in range(400):
        load = rig.store.begin_load(prompts[i % 8])
        if load is not None:
            rig.store.end_load(load)  # a prefetch that is not waited for
        if i % 3 == 0:
            rig.jobs.all()
    rig.settle()
    assert not rig.store.index.table.refs.any()
    assert rig.dram_bytes()["reserved"] == 0
    assert rig.stat("onboard_waiting_blocks") == 0
    for prompt in prompts:
        assert read(rig, prompt) == rig.expected(prompt, 5)
    assert rig.store.lease(READER, rig.rows(1, tag=99)).id == 0
    rig.close()
