"""More namespaces than the NVMe directory has room to list: the latest stay in DRAM for now, nobody else notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.store.hierarchy import NAMESPACE_RETRY_S
from kvstore.tiers.nvme import layout
from tests.store.two_tier import KIB, MIB, Settings, Sizes, TwoTierRig, nvme_bytes_for

ALICE, BOB = 1, 2


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoTierRig:
    """Room for about a dozen descriptions, or 35 namespaces without."""
    monkeypatch.setattr(layout, "_NAMESPACES_BYTES_MIN", 4096)
    return TwoTierRig(tmp_path / "nvme", Settings(Sizes(2 * MIB, 32 * KIB, 8 * KIB, nvme_bytes=nvme_bytes_for(30))))


def test_one_tenants_many_namespaces_stop_nobody(rig: TwoTierRig) -> None:
    victim = rig.rows(2, tag=1, namespace=rig.namespace(tenant="victim"))
    rig.put(ALICE, victim)
    assert rig.persist(victim) == 2
    durable = []
    for i in range(60):
        prompt = rig.rows(1, tag=1, namespace=rig.namespace(tenant="mallory", revision=f"x{i}"))
        rig.put(BOB, prompt)
        durable.append(rig.persist(prompt))
    n_listed = sum(durable)
    assert 20 < n_listed < 50
    assert durable == [1] * n_listed + [0] * (60 - n_listed)
    assert rig.count("offload_skipped_blocks") >= 60 - n_listed
    texts = rig.store.stats()[1]
    assert texts["nvme_health"] == "ok"
    more = rig.rows(6, tag=2, namespace=rig.namespace(tenant="victim"))
    rig.put(ALICE, more)
    assert rig.persist(more) == 6
    rig.store.forget_session(ALICE)
    rig.store.forget_session(BOB)
    after = rig.killed()
    assert after.stat("nvme_live_frames") == 8 + n_listed
    after.close()


def test_a_namespace_that_was_turned_away_is_asked_for_again(rig: TwoTierRig) -> None:
    prompts = [rig.rows(1, tag=1, namespace=rig.namespace(tenant="mallory", revision=f"x{i}")) for i in range(60)]
    for prompt in prompts:
        rig.put(BOB, prompt)
        rig.settle()
    n_written = rig.stat("nvme_written_frames")
    assert n_written == rig.stat("nvme_live_frames") < 50
    late = prompts[-1]
    assert rig.persist(late) == 0
    hierarchy = rig.store.hierarchy
    assert hierarchy is not None
    evicted = rig.store.index.evict_nvme(10)
    hierarchy.nvme.free(evicted.slots)
    rig.put(ALICE, rig.rows(1, tag=3, namespace=prompts[0].namespace))  # takes their names out
    rig.settle()
    assert rig.persist(late) == 0
    rig.clock.advance(NAMESPACE_RETRY_S)
    rig.store.tick()
    assert rig.persist(late) == 1
    rig.store.forget_session(ALICE)
    rig.store.forget_session(BOB)
    rig.close()
