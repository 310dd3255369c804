"""What is written ahead of eviction or of the end: only what is worth its room, and what is worth most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.offload import WritePolicy
from kvstore.store.hierarchy import WriteBehind
from tests.store.two_tier import Settings, Sizes, TwoTierRig, nvme_bytes_for

ALICE = 1
KIB, MIB = 1 << 10, 1 << 20

Make = Callable[[WriteBehind, Sizes], TwoTierRig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[TwoTierRig] = []

    def start(write: WriteBehind, sizes: Sizes) -> TwoTierRig:
        made.append(TwoTierRig(tmp_path / "disk", Settings(sizes, write)))
        return made[-1]

    yield start
    for rig in made:
        if not rig.ended:
            rig.close()


SMALL_NVME = Sizes(1 * MIB, 64 * KIB, 8 * KIB, nvme_bytes=nvme_bytes_for(6))
"""256 blocks in DRAM, far fewer on NVMe."""


def drain(rig: TwoTierRig) -> int:
    """As a daemon does before it ends; returns how many rounds it took."""
    assert rig.store.hierarchy is not None
    for n_rounds in range(100):
        if rig.store.hierarchy.cleaner.drain():
            return n_rounds
        rig.settle()
    raise AssertionError("it goes on writing")


def test_the_end_keeps_the_blocks_of_most_value_and_writes_each_once(make: Make) -> None:
    rig = make(WriteBehind(WritePolicy.SELECTIVE, 100, 128 * KIB), SMALL_NVME)
    prompts = [rig.rows(1, tag=tag) for tag in range(1, 201)]
    for prompt in prompts:
        assert rig.put(ALICE, prompt).n_committed == 1
    assert rig.stat("nvme_live_frames") == 0
    drain(rig)
    n_live = int(rig.stat("nvme_live_frames"))
    assert 10 < n_live < 150
    assert rig.stat("nvme_written_frames") == n_live
    after = rig.killed()
    again = [after.found(after.rows(1, tag=tag)) for tag in range(1, 201)]
    assert again == [0] * (200 - n_live) + [1] * n_live
    after.close()


def test_back_does_not_push_out_again_what_it_has_just_written(make: Make) -> None:
    rig = make(WriteBehind(WritePolicy.BACK, 2, MIB), SMALL_NVME)
    for tag in range(1, 401):
        assert rig.put(ALICE, rig.rows(1, tag=tag)).n_committed == 1
        rig.settle()
    assert rig.stat("nvme_written_frames") <= 400


def test_persist_goes_on_queueing_while_somebody_waits(make: Make) -> None:
    """The prompt is many times what the queue holds."""
    rig = make(WriteBehind(WritePolicy.BACK, 2, 32 * KIB), Sizes(1 * MIB, 64 * KIB, 8 * KIB, nvme_bytes_for(40)))
    prompt = rig.rows(60, tag=1)
    assert rig.put(ALICE, prompt).n_committed == 60
    persist = rig.store.begin_persist(prompt)
    assert persist is not None
    assert persist.n_waiting == 60
    assert rig.stat("offload_pending_bytes") <= 32 * KIB
    while persist.n_waiting:
        assert rig.store.jobs or rig.jobs.runnable()
        rig.jobs.all()
        assert rig.stat("offload_pending_bytes") <= 32 * KIB
    assert rig.store.n_durable(persist) == 60
    assert rig.store.why_not_durable(persist) == ""
    rig.store.end_persist(persist)
