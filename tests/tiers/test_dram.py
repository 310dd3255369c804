"""Slots of the DRAM tier: who gets which, their states, generations, regions and mappers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import BadInputError, IntegrityError
from kvstore.native import Mapping
from kvstore.tiers.dram import DAEMON_WRITER, DramTier, SlotState

PAGE = 4096
KIB = 1 << 10
MIB = 1 << 20
Int64s = NDArray[np.int64]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def tier() -> Iterator[DramTier]:
    """64 pages, regions of 16, starters of 4."""
    before = open_files()
    made = DramTier(64 * PAGE, region_bytes=16 * PAGE, starter_bytes=4 * PAGE, prefault=False)
    yield made
    made.check()
    made.close()
    made.close()
    assert open_files() == before


def regions_of(slots: Int64s) -> list[int]:
    return sorted(set((slots >> 20).tolist()))


def array(*slots: int) -> Int64s:
    return np.array(slots, np.int64)


def live(tier: DramTier, writer: int, n: int, slot_bytes: int = PAGE, tenant: str = "a") -> Int64s:
    slots = tier.allocate(writer, tenant, slot_bytes, n)
    tier.commit(slots, slots)
    return slots


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


@dataclass
class Scene:
    """A tier with two slots in each of three states."""

    tier: DramTier
    reserved: Int64s
    live: Int64s
    free: Int64s


def scene(tier: DramTier) -> Scene:
    slots = tier.allocate(1, "a", PAGE, 6)
    tier.commit(slots[2:4], array(7, 8))
    tier.free(slots[4:])
    return Scene(tier, slots[:2], slots[2:4], slots[4:])


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


# -- where slots lie ----------------------------------------------------------------------------


def test_locations_lead_a_reader_to_the_bytes(tier: DramTier) -> None:
    slots = np.concatenate((tier.allocate(1, "a", 2 * PAGE, 9), tier.allocate(2, "a", PAGE, 2)))
    for slot in slots.tolist():
        view = tier.view(slot)
        assert len(view) == tier.region(slot >> 20).slot_bytes
        view[:] = slot % 251
    at = tier.locate(slots)
    assert [str(part.dtype) for part in (at.region_ids, at.offsets, at.generations)] == [
        "uint32",
        "uint64",
        "uint64",
    ]
    for slot, region_id, offset in zip(slots.tolist(), at.region_ids.tolist(), at.offsets.tolist(), strict=True):
        region = tier.region(region_id)
        bytes_there = os.pread(region.fd, region.slot_bytes, offset)
        assert bytes_there == bytes([slot % 251]) * region.slot_bytes
    firsts = [tier.view(slot).ctypes.data for slot in slots.tolist()]
    assert tier.addresses(slots).tolist() == firsts
    shuffled = slots[::-2].copy()
    assert tier.addresses(shuffled).tolist() == firsts[::-2]


@pytest.mark.parametrize("which", [slice(0, 9), slice(9, 11), slice(None), slice(0, 0), slice(None, None, -2)])
def test_a_description_is_enough_to_find_slots(tier: DramTier, which: slice) -> None:
    slots = np.concatenate((tier.allocate(1, "a", 2 * PAGE, 9), tier.allocate(2, "a", PAGE, 2)))[which]
    found = tier.describe(slots)
    regions = dict(zip(found.region_ids, zip(found.slot_bytes, found.generation_bases, strict=True), strict=True))
    assert set(regions) == set(regions_of(slots))
    at = tier.locate(slots)
    for i, slot in enumerate(slots.tolist()):
        slot_bytes, base = regions[slot >> 20]
        assert (slot & 0xFFFFF) * slot_bytes == at.offsets[i]
        assert base + (slot & 0xFFFFF) == tier.generation_index(slots)[i]
        assert found.generations[i] == at.generations[i]
    for unknown in (array(99 << 20), np.append(slots[:1], (1 << 20) + 500), array(-5)):
        with pytest.raises(IntegrityError, match=r"no region|not in the tier"):
            tier.describe(unknown)


def test_generations_move_when_a_slot_is_handed_out_and_when_it_is_given_up(tier: DramTier) -> None:
    slots = tier.allocate(1, "a", PAGE, 3)
    reader = Mapping(tier.generations_fd, tier.generations_bytes, writable=False).array().view(np.uint64)
    places = tier.generation_index(slots)

    def now() -> list[int]:
        assert reader[places].tolist() == tier.locate(slots).generations.tolist()
        return [int(value) for value in reader[places]]

    seen = [now()]
    tier.commit(slots, slots)
    assert now() == seen[-1]
    tier.free(slots[:1])
    seen.append(now())
    assert [after - before for before, after in zip(*seen[-2:], strict=True)] == [1, 0, 0]
    tier.allocate(1, "a", PAGE, 1)
    seen.append(now())
    assert [after - before for before, after in zip(*seen[-2:], strict=True)] == [1, 0, 0]
    tier.quarantine(slots[1:])
    tier.free(slots[1:])
    assert now()[1] > seen[-1][1]


def test_generations_never_go_back_when_places_serve_another_region(tier: DramTier) -> None:
    reader = Mapping(tier.generations_fd, tier.generations_bytes, writable=False).array().view(np.uint64)
    highest = np.zeros(64, np.uint64)
    for round_ in range(6):
        slots = live(tier, round_ + 1, 64 // (round_ % 3 + 1), (round_ % 3 + 1) * PAGE)
        places = tier.generation_index(slots)
        assert (reader[places] > highest[places]).all()
        highest = np.maximum(highest, reader[:64])
        tier.free(slots)
        assert (reader[places] > highest[places]).all()
        highest = np.maximum(highest, reader[:64])
        tier.retire_empty((99, "a", PAGE))


# -- regions and mappers ------------------------------------------------------------------------


def test_only_the_writer_gets_an_unsealed_region(tier: DramTier) -> None:
    (region_id,) = regions_of(tier.allocate(1, "a", PAGE, 1))
    tier.add_mapper(region_id, 1)
    with pytest.raises(IntegrityError, match="not sealed"):
        tier.add_mapper(region_id, 2)
    tier.seal(region_id)
    tier.add_mapper(region_id, 2)
    assert tier.region(region_id).mappers == {1, 2}
    assert dict(tier.regions) == {region_id: tier.region(region_id)}


def test_a_retired_region_counts_until_all_have_unmapped(tier: DramTier) -> None:
    slots = live(tier, 1, 64)
    ids = regions_of(slots)
    fds = [tier.region(i).fd for i in ids]
    for i in ids:
        tier.add_mapper(i, 1)
        tier.seal(i)
    tier.add_mapper(ids[0], 2)
    tier.free(slots)
    assert tier.retire_empty((1, "a", PAGE)) == []
    assert tier.retire_empty((2, "a", PAGE)) == ids
    assert tier.retire_empty((2, "a", PAGE)) == []
    for fd in fds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    assert tier.stats()["retired_mapped_bytes"] == 64 * PAGE
    assert tier.stats()["free_bytes"] == 0
    assert len(tier.allocate(2, "a", PAGE, 1)) == 0
    assert tier.pending_unmaps() == {1: ids, 2: ids[:1]}
    with pytest.raises(IntegrityError, match="retired"):
        tier.add_mapper(ids[0], 3)

    tier.remove_mapper(ids[0], 1)
    assert tier.free_slots(2, "a", PAGE) == 0
    tier.remove_mapper(ids[0], 2)
    tier.remove_mapper(ids[0], 2)  # says so twice
    assert tier.free_slots(2, "a", PAGE) == 16
    tier.check()
    tier.drop_client(1)
    assert tier.pending_unmaps() == {}
    assert tier.free_slots(2, "a", PAGE) == 64


def test_retiring_stops_when_enough_is_retired(tier: DramTier) -> None:
    tier.free(live(tier, 1, 64))
    first = tier.retire_empty((2, "a", PAGE), limit_bytes=17 * PAGE)
    assert len(first) == 2
    assert tier.retire_empty((2, "a", PAGE), limit_bytes=0) == []
    assert len(tier.retire_empty((2, "a", PAGE))) == 2


@pytest.mark.parametrize("asker", [(2, "a", PAGE), (1, "b", PAGE), (1, "a", 2 * PAGE)])
def test_what_the_asker_cannot_use_is_retired_and_the_rest_stays(tier: DramTier, asker: tuple[int, str, int]) -> None:
    mine = tier.allocate(*asker, 1)
    other = tier.allocate(1, "a", PAGE, 1)
    busy = tier.allocate(3, "a", PAGE, 1)
    tier.free(np.append(mine, other))
    assert tier.retire_empty(asker) == regions_of(other)
    assert set(tier.regions) == set(regions_of(np.append(mine, busy)))


@pytest.mark.parametrize("state", ["reserved", "live", "quarantined"])
def test_a_region_in_use_is_not_retired(tier: DramTier, state: str) -> None:
    slots = tier.allocate(1, "a", PAGE, 1)
    if state == "live":
        tier.commit(slots, slots)
    elif state == "quarantined":
        tier.quarantine(slots)
    assert tier.retire_empty((2, "a", PAGE)) == []


def test_a_gone_client_leaves_orphans_and_no_mappings(tier: DramTier) -> None:
    slots = live(tier, 1, 3)
    (region_id,) = regions_of(slots)
    tier.add_mapper(region_id, 1)
    assert not tier.region(region_id).sealed
    tier.drop_client(1)
    region = tier.region(region_id)
    assert region.writer is None
    assert region.sealed
    assert region.mappers == set()
    assert tier.stats()["orphan_regions"] == 1
    tier.add_mapper(region_id, 2)
    assert tier.tags(slots).tolist() == slots.tolist()
    with pytest.raises(IntegrityError, match="daemon"):
        tier.writer_gone(DAEMON_WRITER)


def test_views_kept_beyond_the_tier_stay_readable() -> None:
    tier = DramTier(4 * PAGE, region_bytes=4 * PAGE, starter_bytes=4 * PAGE, prefault=False)
    view = tier.view(int(tier.allocate(1, "a", PAGE, 1)[0]))
    view[:] = 5
    tier.close()
    assert int(view.sum()) == 5 * PAGE


def test_prefault_covers_assigned_regions(tier: DramTier) -> None:
    with DramTier(4 * MIB, region_bytes=MIB, starter_bytes=MIB) as filled:
        assert filled.wait_prefaulted(60)
        filled.allocate(1, "a", MIB, 2)
        stats = filled.stats()
        assert stats["prefaulted_bytes"] == 4 * MIB
        assert stats["raw_bytes"] == 2 * MIB
        assert isinstance(stats["huge_pages"], bool)
        assert stats["huge_pages"] == (stats["huge_pages_note"] == "")
    tier.allocate(1, "a", PAGE, 1)
    assert tier.stats()["prefaulted_bytes"] == 0


# -- check --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda s: s.tier._table.counts.__setitem__((0, 0), 99), "counts"),
        (lambda s: s.tier._table.tags.__setitem__(s.tier.generation_index(s.reserved)[0], 5), "not live"),
        (lambda s: s.tier._table.states.__setitem__(s.tier.generation_index(s.live)[0], 3), "counts"),
        (lambda s: s.tier._source.give_back(PAGE), "are counted"),
        (lambda s: setattr(s.tier._source, "capacity_bytes", PAGE), "exceed"),
        (lambda s: setattr(s.tier.region(int(s.live[0]) >> 20), "writer", 9), "class"),
        (lambda s: s.tier._book._classes.clear(), "no class"),
        (lambda s: s.tier._table.bases.__setitem__(1, 0), "share places"),
        (lambda s: s.tier._generations.ranges.take(1), "ranges"),
        (lambda s: s.tier._book.regions.pop(int(s.live[0]) >> 20), "are counted"),
    ],
)
def test_check_finds_damage(damage: Callable[[Scene], object], words: str) -> None:
    with DramTier(64 * PAGE, region_bytes=16 * PAGE, starter_bytes=4 * PAGE, prefault=False) as tier:
        live(tier, 2, 2)
        set_up = scene(tier)
        tier.check()
        damage(set_up)
        with pytest.raises(IntegrityError, match=words):
            tier.check()
