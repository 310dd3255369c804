"""The HBM tier beyond what all tiers have in common: regions of tenants, handles, what clients have open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.device import open_device
from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import BadInputError, DeviceError, IntegrityError
from kvstore.tiers.any_region import DAEMON_WRITER
from kvstore.tiers.device_memory import at_once
from kvstore.tiers.hbm import HbmTier
from kvstore.types import FIRST_HBM_REGION_ID
from tests.tiers.dram_scene import region_file_bytes, regions_of
from tests.tiers.hbm_harness import DEVICE_FILES

PAGE = 4096
A, B = (DAEMON_WRITER, "a", PAGE), (DAEMON_WRITER, "b", PAGE)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    opened = open_device("simulated", total_bytes=64 * PAGE)
    assert isinstance(opened, SimulatedDevice)
    yield opened
    opened.close()


@pytest.fixture
def tier(device: SimulatedDevice) -> Iterator[HbmTier]:
    made = HbmTier(device, 32 * PAGE, region_bytes=8 * PAGE)
    yield made
    made.check()
    made.close()


def live(tier: HbmTier, whose: tuple[int, str, int], n: int) -> np.ndarray:
    slots = tier.allocate(*whose, n)
    tier.commit(slots, slots)
    return slots


def test_a_region_is_one_tenants_and_its_id_is_none_of_dram(tier: HbmTier) -> None:
    mine, theirs = live(tier, A, 3), live(tier, B, 3)
    assert not set(regions_of(mine)) & set(regions_of(theirs))
    assert all(region_id > FIRST_HBM_REGION_ID for region_id in tier.regions)
    assert {tier.region(region_id).tenant for region_id in regions_of(mine)} == {"a"}


def test_slots_lie_apart_in_memory_of_the_device(tier: HbmTier) -> None:
    slots = live(tier, A, 20)
    addresses = np.sort(tier.addresses(slots))
    assert (np.diff(addresses) >= PAGE).all()
    for region_id in regions_of(slots):
        region = tier.region(region_id)
        assert region.address <= addresses[-1]
        assert len(region.handle) == 64


def test_memory_that_a_client_has_open_is_not_given_back_before_it_is_closed(tier: HbmTier) -> None:
    """cudaFree of what another process has open is undefined."""
    slots = live(tier, A, 32)
    open_there = regions_of(slots)[0]
    tier.add_mapper(open_there, 7)
    tier.free(slots)
    bytes_before = region_file_bytes(DEVICE_FILES)
    tier.retire_empty(keep_for=B)
    assert bytes_before - region_file_bytes(DEVICE_FILES) == 24 * PAGE
    assert tier.pending_unmaps() == {7: [open_there]}
    assert tier.retired_mapped_bytes == 8 * PAGE
    assert len(tier.allocate(*B, 32)) == 24
    tier.remove_mapper(open_there, 7)
    assert tier.retired_mapped_bytes == 0
    assert len(tier.allocate(*B, 32)) == 8


def test_a_client_that_is_gone_has_nothing_open(tier: HbmTier) -> None:
    slots = live(tier, A, 32)
    for region_id in regions_of(slots):
        tier.add_mapper(region_id, 7)
    assert tier.is_mapped_by(7)
    tier.free(slots)
    tier.retire_empty(keep_for=B)
    assert tier.free_slots(*B) == 0
    tier.drop_client(7)
    assert not tier.is_mapped_by(7)
    assert tier.free_slots(*B) == 32


def test_a_device_without_room_is_a_tier_without_room(device: SimulatedDevice, tier: HbmTier) -> None:
    device.malloc(64 * PAGE - 12 * PAGE)
    slots = tier.allocate(*A, 32)
    assert len(slots) == 8
    assert "8192" not in tier.stats()["memory_failure"]  # type: ignore[operator]
    assert "no memory for a region" in tier.stats()["memory_failure"]  # type: ignore[operator]
    tier.check()


def test_what_is_held_back_is_not_reused_and_counts(tier: HbmTier) -> None:
    slots = live(tier, A, 32)
    tier.quarantine(slots[:5])
    tier.free(slots[5:])
    assert tier.stats()["quarantined_bytes"] == 5 * PAGE
    assert len(tier.allocate(*A, 32)) == 27
    tier.free(slots[:5])
    assert len(tier.allocate(*A, 32)) == 5


def test_regions_are_whole_grains(device: SimulatedDevice) -> None:
    made = HbmTier(device, 33 * PAGE, region_bytes=3 * PAGE, grain_bytes=4 * PAGE)
    slots = live(made, (DAEMON_WRITER, "a", 3 * PAGE), 8)
    assert made.capacity_bytes == 32 * PAGE
    assert len(slots) == 8
    assert all(region.size_bytes == 4 * PAGE for region in made.regions.values())
    made.check()
    made.close()


@pytest.mark.parametrize("sizes", [(PAGE - 1, PAGE), (8 * PAGE, 100), (8 * PAGE, 0)])
def test_sizes_that_can_not_be_are_refused(device: SimulatedDevice, sizes: tuple[int, int]) -> None:
    with pytest.raises(BadInputError, match="must be"):
        HbmTier(device, *sizes)


def test_closing_gives_all_back_also_what_is_open_elsewhere(device: SimulatedDevice) -> None:
    before = region_file_bytes(DEVICE_FILES)
    made = HbmTier(device, 32 * PAGE, region_bytes=8 * PAGE)
    slots = live(made, A, 32)
    made.add_mapper(regions_of(slots)[0], 7)
    made.free(slots[:8])
    made.retire_empty(keep_for=B)
    made.close()
    made.close()
    assert region_file_bytes(DEVICE_FILES) == before
    with pytest.raises(IntegrityError):
        made.region(regions_of(slots)[0])


class FailingMemory:
    """A device whose calls fail while it is told so."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.fails = False

    def malloc(self, size_bytes: int) -> int:
        self._may_fail("cudaMalloc")
        return self.device.malloc(size_bytes)

    def free(self, address: int) -> None:
        self._may_fail("cudaFree")
        self.device.free(address)

    def ipc_export(self, address: int) -> bytes:
        return self.device.ipc_export(address)

    def _may_fail(self, call: str) -> None:
        if self.fails:
            raise DeviceError(f"{call} failed with cudaErrorIllegalAddress")


def test_what_a_failing_device_does_not_take_back_is_lost_and_counts(device: SimulatedDevice) -> None:
    memory = FailingMemory(device)
    made = HbmTier(memory, 32 * PAGE, region_bytes=8 * PAGE)
    told: list[str] = []
    made.make_calls(at_once, told.append)
    mine, theirs = live(made, A, 8), live(made, B, 8)
    made.add_mapper(regions_of(mine)[0], 7)
    made.free(mine)
    made.retire_empty(keep_for=B)
    memory.fails = True
    made.drop_client(7)
    assert made.lost_bytes == made.stats()["lost_bytes"] == 8 * PAGE
    assert made.retired_mapped_bytes == 0
    made.check()
    assert made.stats()["free_bytes"] == 16 * PAGE
    made.free(theirs)
    made.retire_empty(keep_for=A)
    assert made.lost_bytes == 16 * PAGE
    assert len(made.allocate(*A, 32)) == 0
    assert len(told) == 3
    assert all("cudaErrorIllegalAddress" in each for each in told)
    memory.fails = False
    assert len(made.allocate(*A, 32)) == 16, "what is lost is nobody's any more"
    made.check()
    memory.fails = True
    made.close()
    made.close()


def test_calls_that_wait_for_the_device_are_handed_out(device: SimulatedDevice) -> None:
    """Capacity holds at every step: what comes or leaves counts before it is there, and until it is gone."""
    made = HbmTier(device, 16 * PAGE, region_bytes=8 * PAGE)
    calls: list[tuple[Callable[[], None], Callable[[], None]]] = []
    made.make_calls(lambda run, done: calls.append((run, done)), lambda _: None)

    def call() -> None:
        run, done = calls.pop(0)
        run()
        made.check()
        done()
        made.check()

    before = region_file_bytes(DEVICE_FILES)
    slots = made.allocate(*A, 16)
    assert (len(slots), len(calls), made.awaits_memory) == (0, 1, True)
    assert len(made.allocate(*A, 16)) == 0
    assert len(calls) == 1, "asked for once"
    call()
    assert not made.awaits_memory
    slots = np.append(made.allocate(*A, 8), made.allocate(*A, 8))
    assert len(slots) == 8
    call()
    slots = np.append(slots, made.allocate(*A, 8))
    assert len(slots) == 16
    made.commit(slots, slots)
    made.free(slots)
    made.retire_empty(keep_for=B)
    assert (made.leaving_bytes, made.free_slots(*B)) == (16 * PAGE, 0)
    assert region_file_bytes(DEVICE_FILES) - before == 16 * PAGE
    call()
    assert (made.leaving_bytes, made.free_slots(*B)) == (8 * PAGE, 8)
    assert len(made.allocate(*B, 8)) == 0
    made.close()
    made.close()
    assert region_file_bytes(DEVICE_FILES) == before


def test_memory_that_came_for_another_size_goes_back(device: SimulatedDevice) -> None:
    made = HbmTier(device, 32 * PAGE, region_bytes=8 * PAGE)
    calls: list[tuple[Callable[[], None], Callable[[], None]]] = []
    made.make_calls(lambda run, done: calls.append((run, done)), lambda _: None)

    def call() -> None:
        run, done = calls.pop(0)
        run()
        done()
        made.check()

    assert len(made.allocate(*A, 1)) == 0
    call()
    large = (DAEMON_WRITER, "b", 12 * PAGE)
    assert len(made.allocate(*large, 1)) == 0
    call()
    call()
    assert len(made.allocate(*large, 1)) == 1
    made.check()
    made.close()
