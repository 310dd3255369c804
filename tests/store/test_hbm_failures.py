"""A GPU that fails, or has no room: it costs copies in HBM, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import DeviceError, DeviceMemoryError
from tests.store.three_tier import BLOCK_BYTES, ThreeTierRig


@pytest.fixture
def rig(three_tiers: ThreeTierRig) -> ThreeTierRig:
    return three_tiers


def failing(*_: object) -> None:
    raise DeviceError("cudaErrorIllegalAddress")


def test_a_device_that_fails_costs_the_copies_and_nothing_else(
    rig: ThreeTierRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.settle()

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedDevice, "sync_stream", failing)
        rig.promote(prompt)
    assert rig.in_hbm(prompt) == [False] * 4
    assert rig.count("hbm_failed_blocks") == 4
    assert rig.stat("hbm_suspended") == 1
    assert rig.hbm.stats()["reserved_bytes"] == 0
    rig.store.check()
    rig.promote(prompt)
    assert rig.in_hbm(prompt) == [False] * 4
    rig.clock.advance(31.0)
    rig.promote(prompt)
    assert rig.in_hbm(prompt) == [True] * 4


def test_memory_that_a_failing_device_does_not_take_back_reaches_nobody(
    rig: ThreeTierRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a client gives its regions back, on the daemon's loop: the device may only cost HBM."""
    a, b = rig.namespace(tenant="a"), rig.namespace(tenant="b")
    for tag in range(4):
        rig.put(1, rig.rows(4, tag, namespace=a))
        lease = rig.use(1, rig.rows(4, tag, namespace=a))
        rig.settle()
        lease = rig.use(7, rig.rows(4, tag, namespace=a))
        rig.open_regions(7, rig.hbm_slots(lease))
    rig.store.forget_session(1)
    other = rig.rows(4, 50, namespace=b)
    rig.put(2, other)
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedDevice, "free", failing)
        rig.store.forget_session(7)
        rig.promote(other, session=2)
    rig.settle()
    lost_bytes = rig.stat("hbm_lost_bytes")
    assert lost_bytes == 4 * BLOCK_BYTES
    assert rig.stat("hbm_suspended") == 1
    rig.store.check()
    kept = rig.rows(4, 3, namespace=a)
    assert rig.in_hbm(kept) == [True] * 4
    lease = rig.use(2, kept)
    assert lease.hbm_slots is None, "nothing is read there for now"
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(kept, 4)
    rig.store.release(2, lease.id)
    rig.clock.advance(31.0)
    rig.promote(other, session=2)
    assert rig.in_hbm(other) == [True] * 4
    assert rig.stat("hbm_lost_bytes") == lost_bytes
    rig.store.check()


def test_a_device_that_gives_no_memory_costs_the_copies_and_nothing_else(
    rig: ThreeTierRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.settle()
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedDevice, "malloc", failing)
        rig.promote(prompt)
    assert rig.in_hbm(prompt) == [False] * 4
    assert rig.stat("hbm_suspended") == 1
    assert rig.count("hbm_skipped_blocks") == 4
    rig.store.check()
    rig.clock.advance(31.0)
    rig.promote(prompt)
    assert rig.in_hbm(prompt) == [True] * 4


def test_a_full_device_leaves_the_tier_as_large_as_it_got(rig: ThreeTierRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there gives up its places as if that was all; the device is asked again, but not all the time."""
    asked: list[int] = []

    def full(_: SimulatedDevice, size_bytes: int) -> int:
        asked.append(size_bytes)
        raise DeviceMemoryError(f"no {size_bytes} bytes")

    rig.put(1, rig.rows(4, 0))
    rig.promote(rig.rows(4, 0))
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedDevice, "malloc", full)
        for tag in range(1, 4):
            rig.put(1, rig.rows(4, tag))
            rig.promote(rig.rows(4, tag))
            assert rig.in_hbm(rig.rows(4, tag)) == [True] * 4
        assert len(asked) == 2
        assert rig.stat("hbm_suspended") == 0
        assert "no memory for a region" in rig.hbm.stats()["memory_failure"]  # type: ignore[operator]
    rig.store.check()
    rig.clock.advance(31.0)
    rig.put(1, rig.rows(4, 9))
    rig.promote(rig.rows(4, 9))
    assert rig.in_hbm(rig.rows(4, 9)) == rig.in_hbm(rig.rows(4, 3)) == [True] * 4
    assert rig.hbm.stats()["memory_failure"] == ""


def test_the_end_of_a_store_whose_device_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ThreeTierRig(tmp_path / "nvme")
    made.put(1, made.rows(4, 1))
    made.promote(made.rows(4, 1))
    assert made.store.hbm is not None
    with monkeypatch.context() as patch:
        for name in ("free", "free_stream", "host_unregister"):
            patch.setattr(SimulatedDevice, name, failing)
        made.store.hbm.close()
