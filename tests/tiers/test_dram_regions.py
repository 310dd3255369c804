"""Regions of the DRAM tier: where slots lie, generations, who maps what, and what ``check`` finds."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.errors import IntegrityError
from kvstore.native import Mapping
from kvstore.tiers.dram import DAEMON_WRITER, DramTier
from tests.tiers.dram_scene import PAGE, Scene, array, live, regions_of, scene

MIB = 1 << 20


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


def test_a_stale_memory_of_usable_regions_is_found(tier: DramTier) -> None:
    slots = tier.allocate(1, "a", PAGE, 3)
    assert tier.usable_regions(1, "a", PAGE) == set(regions_of(slots))
    tier.check()
    region = tier.region(int(slots[0]) >> 20)
    region.draining = True  # past the book
    with pytest.raises(IntegrityError, match="remembered as usable"):
        tier.check()
    region.draining = False
