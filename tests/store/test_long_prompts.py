"""Prompts that are longer than what NVMe holds: their head stays, and no start meets a block without its parent."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore.store.hierarchy import WriteBehind
from tests.store.two_tier import KIB, MIB, Settings, Sizes, TwoTierRig, nvme_bytes_for

ALICE = 1
FRAME_BYTES = 8 * KIB
N_BLOCKS = 100
SETTINGS = Settings(Sizes(MIB, 32 * KIB, 8 * KIB, nvme_bytes=nvme_bytes_for(6)), WriteBehind(queue_bytes_max=2 * MIB))


@pytest.fixture
def rig(tmp_path: Path) -> TwoTierRig:
    return TwoTierRig(tmp_path / "nvme", SETTINGS)


def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made anew for every few blocks."""
    monkeypatch.setattr("kvstore.offload.WRITE_BYTES_MAX", 4 * FRAME_BYTES)


def test_the_head_of_a_prompt_longer_than_the_tier_is_durable_and_stays(
    rig: TwoTierRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_batches(monkeypatch)
    n_fit = rig.nvme.live_capacity_bytes // FRAME_BYTES
    assert n_fit < N_BLOCKS - 20
    prompt = rig.rows(N_BLOCKS, tag=1)
    assert rig.put(ALICE, prompt).n_committed == N_BLOCKS
    for _ in range(3):
        assert rig.persist(prompt) == n_fit
    assert rig.count("nvme_evicted_blocks") == 0
    assert rig.stat("nvme_written_frames") == n_fit
    rig.store.forget_session(ALICE)
    after = rig.killed()
    assert after.found(after.rows(N_BLOCKS, tag=1)) == n_fit
    after.close()


@pytest.mark.parametrize("n_held", [0, 5, 20])
@pytest.mark.parametrize("seed", range(3))
def test_kills_while_the_tier_overflows_leave_nothing_that_a_start_can_not_take(
    rig: TwoTierRig, monkeypatch: pytest.MonkeyPatch, n_held: int, seed: int
) -> None:
    """A long prompt is written to a full tier, the process is killed in the middle, the prompt is stored again..."""
    small_batches(monkeypatch)
    dice = random.Random(seed)
    for life in range(4):
        if n_held and not life:
            held = rig.rows(n_held, tag=9)
            rig.put(ALICE, held)
            assert rig.persist(held) == n_held
            rig.store.lease(ALICE, held)
        rig.put(ALICE, rig.rows(N_BLOCKS, tag=1))
        for _ in range(dice.randrange(60, 120)):
            rig.jobs.step(dice)
        rig = rig.killed()
        assert rig.stat("nvme_dropped_orphans") == 0
    assert rig.found(rig.rows(N_BLOCKS, tag=1)) > 0
    rig.close()
