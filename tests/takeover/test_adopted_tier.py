"""A tier that takes over another's memory: what is served, what may be used again and when, what counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.native import Mapping
from kvstore.prefix_index.policy import Use
from kvstore.tiers.adopted import Former, FormerRegion, plan_adoption
from kvstore.tiers.directory import Labels
from kvstore.tiers.dram import DAEMON_WRITER

PAGE = 4096
Lives = Callable[..., Any]


def path(start: int, n: int) -> list[int]:
    return list(range(start, start + n))


def test_blocks_are_found_again_with_their_bytes_in_place(lives: Lives) -> None:
    old = lives()
    old.put(old.client(1), path(100, 20))
    old.put(old.client(2), path(500, 9))
    old.put(DAEMON_WRITER, path(900, 3))
    new = lives(old)
    assert new.n_adopted == 32
    assert (new.found(path(100, 20)), new.found(path(500, 9)), new.found(path(900, 3))) == (20, 9, 3)
    stats = new.tier.stats()
    assert stats["used_bytes"] == 32 * PAGE
    assert stats["adopted_bytes"] == sum(region.size_bytes for region in old.tier.regions.values())
    for region_id, region in new.tier.regions.items():
        assert os.fstat(region.fd).st_ino == os.fstat(old.tier.region(region_id).fd).st_ino, "another memory"
        with pytest.raises(PermissionError):
            Mapping(region.fd, region.size_bytes, writable=True)


@pytest.mark.parametrize("unsealed", [False, True])
def test_what_was_left_unsealed_is_sealed_and_found_again(lives: Lives, unsealed: bool) -> None:
    old = lives(unsealed=True)
    slots = old.put(old.client(1), path(100, 5))
    Mapping(old.tier.region(int(slots[0]) >> 20).fd, PAGE, writable=True)
    new = lives(old, unsealed=unsealed)
    assert new.found(path(100, 5)) == 5
    for region in new.tier.regions.values():
        with pytest.raises(PermissionError):
            Mapping(region.fd, region.size_bytes, writable=True)


def test_what_was_not_committed_is_seen_by_nobody(lives: Lives) -> None:
    old = lives()
    writer = old.client(1)
    old.put(writer, path(0, 6))
    reserved = old.reserve(writer, 4)
    held = old.reserve(writer, 2)
    old.tier.quarantine(held)
    freed = old.evict(2)
    new = lives(old)
    assert new.found(path(0, 6)) == 4
    assert new.tier.stats()["used_bytes"] == 4 * PAGE
    assert new.tier.stats()["reserved_bytes"] == new.tier.stats()["quarantined_bytes"] == 0
    # They are nothing but room, and not even that before the writer has settled.
    gone = {*reserved.tolist(), *held.tolist(), *freed.tolist()}
    assert not gone & set(new.reserve(writer, 40).tolist())


def test_a_block_whose_label_is_not_yet_written_is_left_out(lives: Lives) -> None:
    old = lives()
    writer = old.client(1)
    old.put(writer, path(0, 3))
    slots = old.reserve(writer, 1)
    old.tier.commit(slots, np.array([77]))
    new = lives(old)
    assert new.n_adopted == 3
    assert new.tier.stats()["used_bytes"] == 3 * PAGE
    old.tier.free(slots)


def test_slots_that_are_gone_before_they_are_labelled_are_passed_over(lives: Lives) -> None:
    old = lives()
    writer = old.client(1)
    kept, freed = old.reserve(writer, 2), old.reserve(writer, 30)
    for slots in (kept, freed):
        old.tier.commit(slots, np.arange(len(slots)))
    old.tier.free(freed)
    for region_id in old.tier.retire_empty((2, "a", PAGE)):
        old.tier.remove_mapper(region_id, writer)
    again = old.reserve(writer, 1)
    fresh = old.tier.labelling.fresh()
    assert sorted(fresh.tags.tolist()) == [0, 1]
    assert fresh.places.tolist() == old.tier.generation_index(kept).tolist()
    assert len(old.tier.labelling.fresh().tags) == 0
    old.tier.free(np.concatenate((kept, again)))


def test_the_writer_goes_on_once_all_have_settled(lives: Lives) -> None:
    old = lives()
    writer, reader = old.client(1), old.client(2)
    first = old.put(writer, path(0, 2))
    region_id = int(first[0]) >> 20
    old.map(reader, region_id)
    size = old.tier.region(region_id).n_slots
    new = lives(old)
    assert new.tier.settling
    assert region_id not in new.tier.usable_regions(writer, "a", PAGE)
    assert new.tier.settle(writer)
    assert not new.tier.settle(writer)
    assert region_id not in new.tier.usable_regions(writer, "a", PAGE)
    assert new.tier.settling
    assert new.tier.settle(reader)
    assert not new.tier.settling
    assert new.tier.usable_regions(writer, "a", PAGE) == {region_id}
    new.mapped[(writer, region_id)] = old.mapped[(writer, region_id)]
    more = new.put(writer, path(50, size - 2))
    assert set((more >> 20).tolist()) == {region_id}
    assert new.found(path(50, size - 2)) == size - 2
    assert new.found(path(0, 2)) == 2
    third = lives(new)
    assert third.found(path(50, size - 2)) == size - 2
    assert third.found(path(0, 2)) == 2


@pytest.mark.parametrize("how", ["unmaps", "ends"])
def test_who_unmaps_or_ends_has_settled(lives: Lives, how: str) -> None:
    old = lives()
    writer, reader = old.client(1), old.client(2)
    region_id = int(old.put(writer, path(0, 4))[0]) >> 20
    old.map(reader, region_id)
    new = lives(old)
    new.tier.settle(writer)
    if how == "unmaps":
        new.tier.remove_mapper(region_id, reader)
    else:
        new.tier.drop_client(reader)
    assert new.tier.usable_regions(writer, "a", PAGE) == {region_id}
    assert new.tier.region(region_id).mappers == {writer}


def test_time_ends_the_waiting_but_frees_nothing(lives: Lives) -> None:
    old = lives()
    region_id = int(old.put(old.client(1), path(0, 4))[0]) >> 20
    new = lives(old)
    new.keeper.tick(new.index, bytes, 1.9)
    assert new.tier.settling
    new.keeper.tick(new.index, bytes, 2.0)
    assert not new.tier.settling
    assert region_id not in new.tier.usable_regions(1, "a", PAGE)
    assert new.tier.stats()["unsettled_bytes"] == new.tier.region(region_id).size_bytes


def test_a_slot_of_the_old_epoch_is_never_written_while_its_reader_may_look(lives: Lives) -> None:
    """Everything that can be evicted and written again is; what an unsettled client maps stays as it was."""
    old = lives()
    writer, reader = old.client(1), old.client(2)
    slots = old.put(writer, path(0, 40))
    regions = np.unique(slots >> 20).tolist()
    seen = old.map(reader, regions[0])
    before = seen.array().copy()
    new = lives(old)
    for client in (writer,):
        new.tier.settle(client)
    for key, mapping in old.mapped.items():
        if key[0] == writer:
            new.mapped[key] = mapping
    new.evict(64)
    for region_id in new.tier.retire_empty((writer, "a", PAGE)):
        new.tier.remove_mapper(region_id, writer)
    written = 0
    for start in range(1000, 3000, 10):
        n = new.tier.free_slots(writer, "a", PAGE)
        if n < 10:
            new.evict(10)
            continue
        written += len(new.put(writer, path(start, 10)))
    assert written > 200
    np.testing.assert_array_equal(seen.array(), before)
    assert seen.length_bytes in (new.tier.stats()["unsettled_bytes"], new.tier.stats()["retired_mapped_bytes"])


def test_regions_of_those_who_are_gone_are_stale(lives: Lives, dead_pidfd: int) -> None:
    old = lives()
    gone = old.client(1, dead_pidfd)
    slots = old.put(gone, path(0, 30))
    new = lives(old)
    assert new.found(path(0, 30)) == 30
    assert new.tier.stats()["orphan_regions"] == len(new.tier.regions)
    assert new.tier.orphan_regions() == frozenset()
    assert not new.tier.settling
    assert not any(region.mappers for region in new.tier.regions.values())
    new.evict(5)
    for writer in (DAEMON_WRITER, 9):
        taken = new.tier.allocate(writer, "a", PAGE, 64)
        assert not set((taken >> 20).tolist()) & set((slots >> 20).tolist())
        new.tier.free(taken)


def test_a_full_tier_of_stale_regions_gives_room_by_moves(lives: Lives, dead_pidfd: int) -> None:
    """One region's room is left for that, and every move gains what was evicted."""
    old = lives()
    old.put(old.client(1, dead_pidfd), path(0, 64))
    assert old.tier.stats()["used_bytes"] == old.tier.capacity_bytes
    new = lives(old)
    assert 40 <= new.n_adopted < 64
    assert new.tier.free_slots(2, "a", PAGE) == 0
    writer, wrote, kept = new.client(2), 0, new.n_adopted
    while wrote < 200:
        if new.tier.free_slots(writer, "a", PAGE) >= 2:
            wrote += len(new.put(writer, [10_000 + wrote, 1]))
            continue
        new.evict(2)
        new.tier.retire_empty((writer, "a", PAGE))
        reclaim = new.tier.plan_reclaim(writer, "a", PAGE, lambda tags: np.ones(len(tags), np.bool_))
        if reclaim is not None:
            new.tier.copy_moves(reclaim)
            new.index.relocate(reclaim.tags.astype(np.uint32), reclaim.dst_slots)
            new.tier.finish_reclaim(reclaim)
        for client, region_ids in new.tier.pending_unmaps().items():
            for region_id in region_ids:
                new.tier.remove_mapper(region_id, client)
        new.tier.check()
    assert new.found(path(0, kept)) < kept
    assert new.tier.stats()["adopted_bytes"] == 0


def test_nothing_moves_to_where_this_daemon_cannot_write(lives: Lives, dead_pidfd: int) -> None:
    old = lives()
    old.put(old.client(1, dead_pidfd), path(0, 40))
    new = lives(old)
    new.evict(10)
    reclaim = new.tier.plan_reclaim(2, "a", PAGE, lambda tags: np.ones(len(tags), np.bool_))
    assert reclaim is not None
    others = [region for region in new.tier.regions.values() if region.id != reclaim.source_region_id]
    assert any(region.read_only for region in others)
    assert not any(new.tier.region(region_id).read_only for region_id in np.unique(reclaim.dst_slots >> 20).tolist())
    new.tier.abort_reclaim(reclaim)


def test_moved_blocks_are_found_after_the_next_restart(lives: Lives, dead_pidfd: int) -> None:
    old = lives()
    old.put(old.client(1, dead_pidfd), path(0, 20))
    new = lives(old)
    reclaim = new.tier.plan_reclaim(2, "a", PAGE, lambda tags: np.ones(len(tags), np.bool_))
    assert reclaim is not None
    new.tier.copy_moves(reclaim)
    new.index.relocate(reclaim.tags.astype(np.uint32), reclaim.dst_slots)
    new.tier.finish_reclaim(reclaim)
    new.label()
    third = lives(new)
    assert third.found(path(0, 20)) == 20


def test_less_capacity_keeps_what_fits_and_counts_what_is_mapped(lives: Lives) -> None:
    old = lives()
    writer = old.client(1)
    old.put(writer, path(0, 60))
    old_bytes = sum(region.size_bytes for region in old.tier.regions.values())
    new = lives(old, capacity_bytes=24 * PAGE, region_bytes=8 * PAGE)
    stats = new.tier.stats()
    assert 0 < stats["used_bytes"] <= 24 * PAGE
    assert new.found(path(0, 60)) == new.n_adopted
    kept_bytes = sum(region.size_bytes for region in new.tier.regions.values())
    assert kept_bytes + stats["retired_mapped_bytes"] == old_bytes
    assert stats["free_bytes"] == 0
    assert new.tier.free_slots(2, "a", PAGE) == 0
    assert len(new.tier.allocate(2, "a", PAGE, 1)) == 0
    for region_id in new.tier.pending_unmaps()[writer]:
        new.tier.remove_mapper(region_id, writer)
    assert new.tier.stats()["retired_mapped_bytes"] == 0
    assert new.tier.free_slots(2, "a", PAGE) == (24 * PAGE - kept_bytes) // PAGE


def test_retired_memory_counts_over_two_restarts(lives: Lives) -> None:
    old = lives()
    writer = old.client(1)
    old.put(writer, path(0, 30))
    old.evict(30)
    old.tier.retire_empty((2, "a", PAGE))
    retired_bytes = old.tier.stats()["retired_mapped_bytes"]
    assert retired_bytes > 0
    third = lives(lives(old))
    assert third.tier.stats()["retired_mapped_bytes"] == retired_bytes
    for region_id in third.tier.pending_unmaps()[writer]:
        third.tier.remove_mapper(region_id, writer)
    assert third.tier.stats()["retired_mapped_bytes"] == 0
    fourth = lives(third)
    assert fourth.tier.stats()["retired_mapped_bytes"] == 0
    assert fourth.keeper._entries.keys() & {"region", "map"} == set()


def test_an_unsealed_region_is_memory_and_nothing_else(lives: Lives) -> None:
    old = lives()
    writer = old.client(1)
    old.put(writer, path(0, 4))
    made = old.tier.allocate(writer, "a", 2 * PAGE, 1)
    region_id = int(made[0]) >> 20
    old.tier.add_mapper(region_id, writer)
    new = lives(old)
    assert region_id not in new.tier.regions
    assert new.tier.pending_unmaps() == {writer: [region_id]}
    assert new.tier.stats()["retired_mapped_bytes"] == old.tier.region(region_id).size_bytes


def test_ids_of_regions_are_never_given_again(lives: Lives) -> None:
    """What a client says late of a region that is gone must not be taken for another."""
    old = lives()
    writer = old.client(1)
    slots = old.put(writer, path(0, 20))
    last = int(slots.max()) >> 20
    old.evict(20)
    for region_id in old.tier.retire_empty((2, "a", PAGE)):
        old.tier.remove_mapper(region_id, writer)
    new = lives(old)
    assert not new.tier.regions
    assert int(new.put(writer, path(0, 1))[0]) >> 20 > last


def test_the_order_of_eviction_is_the_one_last_noted(lives: Lives) -> None:
    old = lives()
    writer = old.client(1)
    for start in (0, 100, 200, 300):
        old.put(writer, path(start, 5))
    old.index.touch(old.index.match(b"r" * 16, _rows(path(100, 5))).ids, Use())
    old.keeper.tick(old.index, bytes, 0.0)
    new = lives(old)
    assert [new.found(path(start, 5)) for start in (0, 100, 200, 300)] == [5] * 4
    order = []
    while new.index.n_blocks:
        before = {start: new.found(path(start, 5)) for start in (0, 100, 200, 300)}
        new.evict(1)
        order += [start for start, n in before.items() if new.found(path(start, 5)) < n]
    assert order == [0] * 5 + [200] * 5 + [300] * 5 + [100] * 5


def _rows(tokens: list[int]) -> Any:
    from kvstore.prefix_index.rows import RowPath

    return RowPath.from_tokens(np.array(tokens, np.uint32), 1)


def test_without_a_ledger_nothing_is_labelled(lives: Lives) -> None:
    from kvstore.tiers.dram import DramTier

    with DramTier(64 * PAGE, 16 * PAGE, 4 * PAGE, prefault=False) as tier:
        assert tier.labelling is None
        assert len(tier.former_blocks) == 0


# -- what is kept, for any estate ------------------------------------------------------------------


@st.composite
def formers(draw: st.DrawFn) -> Former:
    regions = []
    for region_id in range(1, draw(st.integers(0, 12)) + 1):
        size = draw(st.integers(1, 16))
        n_live = draw(st.integers(0, size))
        mappers = draw(st.frozensets(st.integers(1, 3), max_size=2))
        writer = draw(st.sampled_from([None, *mappers]))
        none = Labels.join([])
        many = Labels(*(np.zeros((n_live, *getattr(none, name).shape[1:]), getattr(none, name).dtype)
                        for name in Labels.__dataclass_fields__))  # fmt: skip
        fd = draw(st.sampled_from([-1, 1000 + region_id]))
        regions.append(FormerRegion(region_id, fd, size * PAGE, PAGE, "a", writer, mappers, np.arange(n_live), many))
    return Former(regions, 99)


@given(formers(), st.integers(1, 150))
def test_every_plan_keeps_within_the_capacity(former: Former, pages: int) -> None:
    capacity = pages * PAGE
    plan = plan_adoption(former, capacity)
    everything = [*plan.kept, *plan.retired, *plan.dropped]
    assert sorted(region.id for region in everything) == [region.id for region in former.regions]
    assert all(region.serves for region in plan.kept)
    assert [region.id for region in plan.kept] == sorted(region.id for region in plan.kept)
    kept = sum(region.size_bytes for region in plan.kept)
    assert kept <= capacity
    # Whoever maps something goes on counting; nothing else makes it exceed the capacity.
    assert all(region.mappers for region in plan.retired)
    assert not any(region.mappers for region in plan.dropped)
    mapped = sum(region.size_bytes for region in former.regions if region.mappers)
    assert plan.out_bytes <= max(capacity, mapped)
    stale = [region.size_bytes for region in plan.kept if region.writer is None]
    if stale:
        assert kept + max(stale) <= capacity, "no room for moves"
    elif all(region.serves and region.writer for region in former.regions) and mapped <= capacity:
        assert not plan.retired
        assert not plan.dropped
