"""Slots of the DRAM tier: sizes, who gets which, and their states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.errors import BadInputError, IntegrityError
from kvstore.tiers.dram import DAEMON_WRITER, DramTier, SlotState
from tests.tiers.dram_scene import PAGE, Scene, array, live, open_files, regions_of, scene

KIB = 1 << 10
MIB = 1 << 20


# -- sizes --------------------------------------------------------------------------------------


def test_a_slot_is_whole_pages(tier: DramTier) -> None:
    assert [tier.slot_bytes(n) for n in (1, PAGE, PAGE + 1)] == [PAGE, PAGE, 2 * PAGE]
    with pytest.raises(BadInputError, match="block_bytes is 0"):
        tier.slot_bytes(0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity_bytes": 100}, "capacity_bytes is 100"),
        ({"capacity_bytes": PAGE, "region_bytes": 5000}, "region_bytes is 5000"),
        ({"capacity_bytes": PAGE, "region_bytes": (1 << 32) + PAGE}, "region_bytes is 4294971392"),
        ({"capacity_bytes": PAGE, "starter_bytes": 0}, "starter_bytes is 0"),
    ],
)
def test_impossible_sizes_are_named(arguments: dict[str, int], words: str) -> None:
    before = open_files()
    with pytest.raises(BadInputError, match=words):
        DramTier(**arguments)  # type: ignore[arg-type]
    assert open_files() == before


@pytest.mark.parametrize(("slot_bytes", "n", "words"), [(0, 1, "0"), (5000, 1, "5000"), (PAGE, -1, "n is -1")])
def test_impossible_requests_are_named(tier: DramTier, slot_bytes: int, n: int, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        tier.allocate(1, "a", slot_bytes, n)


# -- allocation ---------------------------------------------------------------------------------


def test_first_regions_are_small_and_later_ones_large(tier: DramTier) -> None:
    first = tier.allocate(1, "a", PAGE, 1)
    assert tier.region(regions_of(first)[0]).size_bytes == 4 * PAGE
    rest = tier.allocate(1, "a", PAGE, 4)
    assert [tier.region(i).size_bytes // PAGE for i in regions_of(rest)] == [4, 16]
    large_at_once = tier.allocate(2, "a", PAGE, 5)
    assert [tier.region(i).size_bytes // PAGE for i in regions_of(large_at_once)] == [16]


def test_many_small_writers_share_the_tier(tier: DramTier) -> None:
    slots = [tier.allocate(writer, "a", PAGE, 1) for writer in range(1, 17)]
    assert all(len(one) == 1 for one in slots)
    assert len(tier.allocate(17, "a", PAGE, 1)) == 0
    assert tier.free_slots(17, "a", PAGE) == 0
    assert tier.free_slots(5, "a", PAGE) == 3


@pytest.mark.parametrize("prefault", [False, True])
@pytest.mark.parametrize(("slot_pages", "n"), [(1, 139), (3, 47), (5, 29), (20, 7)])
def test_one_writer_can_use_the_whole_capacity(slot_pages: int, n: int, prefault: bool) -> None:
    capacity = slot_pages * PAGE * n
    with DramTier(capacity, region_bytes=16 * PAGE, starter_bytes=4 * PAGE, prefault=prefault) as tier:
        slots = tier.allocate(1, "a", slot_pages * PAGE, n + 5)
        assert len(np.unique(slots)) == len(slots) == n
        tier.check()
        stats = tier.stats()
        assert stats["reserved_bytes"] == capacity
        assert stats["free_bytes"] == stats["raw_bytes"] == 0


@pytest.mark.parametrize("prefault", [False, True])
def test_9139_slots_of_64_kib_in_small_and_large_steps(prefault: bool) -> None:
    with DramTier(9139 * 64 * KIB, prefault=prefault) as tier:
        assert tier.free_slots(1, "a", 64 * KIB) == 9139
        steps = [len(tier.allocate(1, "a", 64 * KIB, n)) for n in (1, 7, 4000, 100, 9000)]
        assert steps == [1, 7, 4000, 100, 5031]
        tier.check()


def test_odd_slot_sizes_waste_nothing_of_a_region() -> None:
    with DramTier(1 << 30, prefault=False) as tier:
        for writer, slot_bytes in enumerate((68 * KIB, 3 * MIB, 40 * MIB, 65 * MIB), start=1):
            slots = tier.allocate(writer, "a", slot_bytes, 1 + 64 * MIB // slot_bytes)
            sizes = [tier.region(i).size_bytes for i in regions_of(slots)]
            assert all(size % slot_bytes == 0 for size in sizes)
            assert all(size == slot_bytes or size >= 0.9 * 64 * MIB for size in sizes)


def test_a_region_has_one_writer_one_tenant_and_one_slot_size(tier: DramTier) -> None:
    asked = [(1, "a", PAGE), (2, "a", PAGE), (1, "b", PAGE), (1, "a", 2 * PAGE)]
    got = [regions_of(tier.allocate(*key, 2)) for key in asked]
    assert len({region for ids in got for region in ids}) == 4
    for key, (region_id,) in zip(asked, got, strict=True):
        region = tier.region(region_id)
        assert (region.writer, region.tenant, region.slot_bytes) == key


def test_free_slots_are_reused_lowest_first_unless_a_run_fits(tier: DramTier) -> None:
    slots = tier.allocate(1, "a", PAGE, 16)
    assert (np.diff(slots) == 1).all()
    tier.free(slots[[1, 5, 6, 9, 10, 11]])
    assert tier.allocate(1, "a", PAGE, 1).tolist() == slots[[1]].tolist()
    assert tier.allocate(1, "a", PAGE, 3).tolist() == slots[[9, 10, 11]].tolist()
    assert tier.allocate(1, "a", PAGE, 2).tolist() == slots[[5, 6]].tolist()
    tier.free(slots[[2, 4, 8]])
    assert tier.allocate(1, "a", PAGE, 3).tolist() == slots[[2, 4, 8]].tolist()


def test_the_daemon_may_fill_orphans_and_others_may_not(tier: DramTier) -> None:
    slots = live(tier, 1, 2)
    tier.writer_gone(1)
    assert regions_of(tier.allocate(DAEMON_WRITER, "a", PAGE, 1)) == regions_of(slots)
    assert regions_of(tier.allocate(1, "a", PAGE, 1)) != regions_of(slots)


# -- states -------------------------------------------------------------------------------------


def test_states_tags_and_bytes(tier: DramTier) -> None:
    slots = tier.allocate(1, "a", 2 * PAGE, 5)
    tier.commit(slots[:3], array(10, 11, 12))
    tier.quarantine(slots[[2, 3]])
    assert tier.tags(slots).tolist() == [10, 11, -1, -1, -1]
    assert tier.states(slots).tolist() == [
        SlotState.LIVE,
        SlotState.LIVE,
        SlotState.QUARANTINED,
        SlotState.QUARANTINED,
        SlotState.RESERVED,
    ]
    stats = tier.stats()
    assert (stats["used_bytes"], stats["quarantined_bytes"], stats["reserved_bytes"]) == (
        4 * PAGE,
        4 * PAGE,
        2 * PAGE,
    )
    assert stats["free_bytes"] == 54 * PAGE
    tier.set_tags(slots[[1]], array(99))
    assert tier.tags(slots[:2]).tolist() == [10, 99]
    tier.check()
    tier.free(slots)
    assert tier.stats()["free_bytes"] == 64 * PAGE
    assert tier.tags(slots).tolist() == [-1] * 5


def test_quarantined_slots_are_not_handed_out(tier: DramTier) -> None:
    slots = tier.allocate(1, "a", PAGE, 64)
    tier.quarantine(slots)
    assert tier.free_slots(1, "a", PAGE) == 0
    assert len(tier.allocate(1, "a", PAGE, 1)) == 0
    tier.free(slots[:1])
    assert tier.allocate(1, "a", PAGE, 2).tolist() == slots[:1].tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.tier.commit(np.append(s.reserved, s.live), np.zeros(4, np.int64)), "live, not reserved"),
        (lambda s: s.tier.commit(s.reserved, array(1)), "2 slots but 1 tags"),
        (lambda s: s.tier.commit(s.reserved, array(1, -1)), "tag -1"),
        (lambda s: s.tier.commit(s.reserved[[0, 0]], array(1, 2)), "given twice"),
        (lambda s: s.tier.free(np.append(s.reserved, s.free)), "free, not reserved or live or quarantined"),
        (lambda s: s.tier.free(np.concatenate((s.live, s.live[:1]))), "given twice"),
        (lambda s: s.tier.quarantine(np.append(s.reserved, s.free)), "free, not reserved or live"),
        (
            lambda s: s.tier.set_tags(np.append(s.live, s.reserved), np.zeros(4, np.int64)),
            "reserved, not live",
        ),
        (lambda s: s.tier.set_tags(s.live, array(5)), "2 slots but 1 tags"),
        (lambda s: s.tier.free(np.append(s.live, array(99 << 20))), "region 99"),
        (lambda s: s.tier.free(np.append(s.live, array(-1))), "no region"),
        (lambda s: s.tier.locate(s.live + 1000), "no region"),
    ],
)
def test_wrong_changes_are_refused_before_anything_changes(
    tier: DramTier, change: Callable[[Scene], object], words: str
) -> None:
    set_up = scene(tier)
    slots = np.concatenate((set_up.reserved, set_up.live, set_up.free))
    before = (tier.states(slots).tolist(), tier.tags(slots).tolist(), tier.locate(slots).generations.tolist())
    with pytest.raises(IntegrityError, match=words):
        change(set_up)
    after = (tier.states(slots).tolist(), tier.tags(slots).tolist(), tier.locate(slots).generations.tolist())
    assert before == after


def test_slots_of_an_empty_tier_are_refused(tier: DramTier) -> None:
    with pytest.raises(IntegrityError, match="it has none"):
        tier.free(array(1 << 20))
    none = array()
    tier.free(none)
    assert len(tier.locate(none).offsets) == len(tier.addresses(none)) == 0
