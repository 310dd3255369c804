"""Blocks move so that a scattered tier can serve others, and never to where the wrong client may write."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.tiers.dram import DAEMON_WRITER, DramTier, Reclaim, SlotState

PAGE = 4096
Int64s = NDArray[np.int64]


@pytest.fixture
def tier() -> Iterator[DramTier]:
    """64 pages in regions of 16."""
    with DramTier(64 * PAGE, region_bytes=16 * PAGE, starter_bytes=16 * PAGE, prefault=False) as made:
        yield made
        made.check()


def anything(tags: Int64s) -> NDArray[np.bool_]:
    return np.ones(len(tags), np.bool_)


def store(tier: DramTier, writer: int, n: int, slot_bytes: int = PAGE, tenant: str = "a") -> Int64s:
    """Live slots that bear their own id as tag and as bytes."""
    slots = tier.allocate(writer, tenant, slot_bytes, n)
    assert len(slots) == n
    for slot in slots.tolist():
        tier.view(slot).view(np.int64)[:] = slot
    tier.commit(slots, slots)
    for region_id in np.unique(slots >> 20).tolist():
        tier.seal(region_id)  # the writer has mapped it
    return slots


def holds(tier: DramTier, slots: Int64s) -> bool:
    return all((tier.view(slot).view(np.int64) == tag).all() for slot, tag in zip(slots, tier.tags(slots), strict=True))


def planned(tier: DramTier, writer: int, tenant: str, slot_bytes: int) -> Reclaim:
    reclaim = tier.plan_reclaim(writer, tenant, slot_bytes, anything)
    assert reclaim is not None
    return reclaim


def test_the_emptiest_region_moves_into_holes_of_the_same_writer(tier: DramTier) -> None:
    slots = store(tier, 1, 64).reshape(4, 16)
    tier.free(np.concatenate((slots[0, 3:], slots[1, 7:], slots[2, :1])))
    generations = tier.locate(slots[0, :3]).generations
    reclaim = planned(tier, 2, "a", PAGE)
    assert reclaim.source_region_id == slots[0, 0] >> 20
    assert reclaim.src_slots.tolist() == reclaim.tags.tolist() == slots[0, :3].tolist()
    # Fullest first: the one hole of the third region, then the second's.
    assert reclaim.dst_slots.tolist() == [slots[2, 0], slots[1, 7], slots[1, 8]]
    assert (tier.states(reclaim.dst_slots) == SlotState.RESERVED).all()
    tier.copy_moves(reclaim.moves)
    assert tier.still_valid(reclaim).all()
    assert tier.finish_reclaim(reclaim) == [reclaim.source_region_id]
    assert tier.tags(reclaim.dst_slots).tolist() == slots[0, :3].tolist()
    assert holds(tier, reclaim.dst_slots)
    assert len(generations) == 3
    assert tier.free_slots(2, "a", PAGE) == 16
    with pytest.raises(IntegrityError, match="no region"):
        tier.locate(slots[0, :3])


def test_readers_see_the_generation_of_a_moved_slot_move(tier: DramTier) -> None:
    slots = store(tier, 1, 64).reshape(4, 16)
    tier.free(np.concatenate((slots[0, 1:], slots[1, :1])))
    place, before = tier.generation_index(slots[0, :1]), tier.locate(slots[0, :1]).generations
    reclaim = planned(tier, 2, "a", PAGE)
    assert tier._generations.values[place] == before
    tier.finish_reclaim(reclaim)
    assert tier._generations.values[place] > before


def test_other_classes_tenants_and_writers_take_no_copies(tier: DramTier) -> None:
    source = store(tier, 1, 16)
    tier.free(source[4:])
    for other in ((2, "a", PAGE), (1, "b", PAGE), (1, "a", 2 * PAGE)):
        tier.free(tier.allocate(*other, 16 * PAGE // other[2])[1:])
    # All others have holes enough, but the blocks may not go there.
    assert tier.stats()["regions"] == 4
    assert tier.plan_reclaim(3, "c", PAGE, lambda tags: np.isin(tags, source)) is None
    tier.writer_gone(2)  # now nobody writes there any more
    reclaim = tier.plan_reclaim(3, "c", PAGE, lambda tags: np.isin(tags, source))
    assert reclaim is not None
    assert {tier.region(i).writer for i in (reclaim.dst_slots >> 20).tolist()} == {None}
    tier.abort_reclaim(reclaim)


def test_blocks_without_a_writer_never_move_to_where_a_client_writes(tier: DramTier) -> None:
    orphan = store(tier, 1, 16)
    tier.free(orphan[2:])
    tier.writer_gone(1)
    mine = store(tier, 2, 48)
    tier.free(mine[:16:2])
    assert tier.plan_reclaim(3, "a", PAGE, lambda tags: np.isin(tags, orphan)) is None
    # The writer's own blocks may go to the orphan, and would rather.
    reclaim = planned(tier, 3, "b", PAGE)
    assert reclaim.source_region_id == mine[0] >> 20 or reclaim.source_region_id == orphan[0] >> 20
    assert set((reclaim.dst_slots >> 20).tolist()) <= {int(orphan[0] >> 20)}
    tier.abort_reclaim(reclaim)


def test_a_region_that_its_writer_has_yet_to_map_takes_no_copies(tier: DramTier) -> None:
    """Readers could not get its descriptor yet."""
    old = store(tier, 1, 16)
    fresh = int(tier.allocate(1, "a", PAGE, 1)[0]) >> 20
    store(tier, 3, 32)
    tier.free(old[4:])
    assert not tier.region(fresh).sealed

    def is_old(tags: Int64s) -> NDArray[np.bool_]:
        return np.isin(tags, old)

    assert tier.plan_reclaim(2, "a", PAGE, is_old) is None
    tier.seal(fresh)
    reclaim = tier.plan_reclaim(2, "a", PAGE, is_old)
    assert reclaim is not None
    assert set((reclaim.dst_slots >> 20).tolist()) == {fresh}


def test_the_daemon_makes_room_no_larger_than_needed_while_the_budget_lasts(tier: DramTier) -> None:
    slots = store(tier, 1, 16)
    tier.free(slots[::2])
    store(tier, 2, 32, tenant="b")  # 16 pages of the budget are left
    reclaim = planned(tier, 3, "c", 2 * PAGE)
    assert reclaim.source_region_id == slots[0] >> 20
    made = tier.region(reclaim.made_region_id or 0)
    assert (made.writer, made.tenant, made.size_bytes, made.sealed) == (DAEMON_WRITER, "a", 8 * PAGE, True)
    tier.copy_moves(reclaim)
    assert tier.finish_reclaim(reclaim) == [slots[0] >> 20]
    assert holds(tier, reclaim.dst_slots)
    assert tier.free_slots(3, "c", 2 * PAGE) == 12


def test_a_region_is_not_made_where_it_gains_nothing(tier: DramTier) -> None:
    store(tier, 1, 16)
    assert tier.plan_reclaim(2, "a", PAGE, anything) is None
    assert tier.stats()["regions"] == 1


def test_an_abort_leaves_everything_as_it_was(tier: DramTier) -> None:
    slots = store(tier, 1, 16)
    tier.free(slots[3:])
    before = tier.stats()
    reclaim = planned(tier, 2, "a", PAGE)
    assert tier.stats()["regions"] == 2
    tier.abort_reclaim(reclaim)
    assert tier.stats() == before
    assert holds(tier, slots[:3])
    assert tier.allocate(1, "a", PAGE, 1).tolist() == slots[3:4].tolist()
    for use in (tier.abort_reclaim, tier.finish_reclaim, tier.still_valid):
        with pytest.raises(IntegrityError, match="not under way"):
            use(reclaim)


def test_one_at_a_time_and_the_source_takes_no_new_blocks(tier: DramTier) -> None:
    slots = store(tier, 1, 64).reshape(4, 16)
    tier.free(np.concatenate((slots[0, 2:], slots[1, 8:])))
    reclaim = planned(tier, 2, "a", PAGE)
    assert tier.plan_reclaim(2, "a", PAGE, anything) is None
    assert tier.free_slots(1, "a", PAGE) == 6
    assert regions_of(tier.allocate(1, "a", PAGE, 20)) == regions_of(slots[1])
    tier.free(reclaim.src_slots)  # evicted meanwhile: empty, but not retired under the plan
    assert tier.retire_empty((2, "a", PAGE)) == []
    assert not tier.still_valid(reclaim).any()
    assert tier.finish_reclaim(reclaim) == [reclaim.source_region_id]


def regions_of(slots: Int64s) -> list[int]:
    return sorted(set((slots >> 20).tolist()))


def test_blocks_that_changed_or_may_not_move_stay(tier: DramTier) -> None:
    slots = store(tier, 1, 64).reshape(4, 16)
    tier.free(np.concatenate((slots[0, 4:], slots[1, 8:])))
    reclaim = planned(tier, 2, "a", PAGE)
    tier.copy_moves(reclaim)
    tier.quarantine(slots[0, :1])
    assert tier.still_valid(reclaim).tolist() == [False, True, True, True]
    tier.free(slots[0, :1])
    tier.set_tags(slots[0, 1:2], np.array([77], np.int64))
    assert tier.still_valid(reclaim).tolist() == [False, False, True, True]
    with pytest.raises(IntegrityError, match=f"slot {slots[0, 0]}"):
        tier.finish_reclaim(reclaim, np.array([True, False, True, True]))
    assert tier.finish_reclaim(reclaim, np.array([False, False, True, False])) == []
    assert tier.tags(reclaim.dst_slots).tolist() == [-1, -1, slots[0, 2], -1]
    assert tier.tags(slots[0, :4]).tolist() == [-1, 77, -1, slots[0, 3]]
    assert tier.states(reclaim.dst_slots).tolist() == [0, 0, SlotState.LIVE, 0]
    # The region takes new blocks again.
    assert tier.allocate(1, "a", PAGE, 1).tolist() == slots[0, :1].tolist()


@pytest.mark.parametrize("state", ["reserved", "quarantined", "pinned"])
def test_regions_with_blocks_that_cannot_move_are_left_out(tier: DramTier, state: str) -> None:
    slots = store(tier, 1, 64).reshape(4, 16)
    tier.free(np.concatenate((slots[0, 2:], slots[1, 4:])))
    if state == "reserved":
        tier.allocate(1, "a", PAGE, 1)
    elif state == "quarantined":
        tier.quarantine(slots[0, 1:2])
    fixed = slots[0, 0] if state == "pinned" else -1
    reclaim = tier.plan_reclaim(2, "a", PAGE, lambda tags: tags != fixed)
    assert reclaim is not None
    assert reclaim.source_region_id == slots[1, 0] >> 20
    tier.abort_reclaim(reclaim)


def test_what_the_asker_can_use_is_no_source(tier: DramTier) -> None:
    slots = store(tier, 1, 64)
    tier.free(slots[1:16])
    tier.free(slots[20:22])
    assert tier.plan_reclaim(1, "a", PAGE, anything) is None


def test_copies_larger_than_a_chunk_and_with_threads() -> None:
    slot_bytes, region_bytes = 3 << 20, 12 << 20
    with DramTier(4 * region_bytes, region_bytes, region_bytes, prefault=False) as tier:
        slots = store(tier, 1, 16, slot_bytes)
        tier.free(slots[::4])
        reclaim = planned(tier, 2, "a", slot_bytes)
        assert len(reclaim.moves) == 3
        tier.copy_moves(reclaim, threads=2)
        tier.finish_reclaim(reclaim)
        assert tier.tags(reclaim.dst_slots).tolist() == slots[1:4].tolist()
        assert holds(tier, reclaim.dst_slots)


# -- two specs over one full tier -----------------------------------------------------------------


class OldestFirst:
    """A store of nothing but sizes: evicts the oldest blocks, retires, reclaims, allocates."""

    def __init__(self, tier: DramTier, seed: int) -> None:
        self.tier = tier
        self.rng = np.random.default_rng(seed)
        self.blocks: OrderedDict[int, tuple[int, int]] = OrderedDict()  # tag -> slot, size
        self.next_tag = 0

    def put(self, writer: int, slot_bytes: int, n: int) -> None:
        asker = (writer, "a", slot_bytes)
        while self.tier.free_slots(*asker) < n:
            if self.tier.retire_empty(asker) or self.reclaim(asker):
                self.unmap()
                continue
            for _ in range(n):
                tag, (slot, _size) = self.blocks.popitem(last=False)
                assert self.tier.view(slot).view(np.int64)[0] == tag
                self.tier.free(np.array([slot], np.int64))
        slots = self.tier.allocate(*asker, n)
        tags = np.arange(self.next_tag, self.next_tag + n)
        self.next_tag += n
        for slot, tag in zip(slots.tolist(), tags.tolist(), strict=True):
            self.tier.view(slot).view(np.int64)[0] = tag
            self.blocks[tag] = (slot, slot_bytes)
            self.tier.seal(slot >> 20)
            self.tier.add_mapper(slot >> 20, writer)
        self.tier.commit(slots, tags)

    def reclaim(self, asker: tuple[int, str, int]) -> bool:
        reclaim = self.tier.plan_reclaim(*asker, anything)
        if reclaim is None:
            return False
        self.tier.copy_moves(reclaim)
        for tag, slot in zip(reclaim.tags.tolist(), reclaim.dst_slots.tolist(), strict=True):
            self.blocks[tag] = (slot, self.blocks[tag][1])  # keeps its place in the order
        self.tier.finish_reclaim(reclaim)
        return True

    def unmap(self) -> None:
        for client, region_ids in self.tier.pending_unmaps().items():
            for region_id in region_ids:
                self.tier.remove_mapper(region_id, client)

    def touch(self, n: int) -> None:
        """Uses some blocks, so that the oldest ones lie scattered."""
        for tag in self.rng.choice(list(self.blocks), n, replace=False).tolist():
            self.blocks.move_to_end(tag)

    def use(self) -> float:
        return sum(size for _, size in self.blocks.values()) / self.tier.capacity_bytes


@pytest.mark.parametrize("writers", [(1, 1), (1, 2)], ids=["one writer", "two writers"])
@pytest.mark.parametrize("rounds", [1, 6])
def test_two_specs_alternating_over_a_full_tier_use_nine_tenths_of_it(writers: tuple[int, int], rounds: int) -> None:
    with DramTier(640 * PAGE, region_bytes=32 * PAGE, starter_bytes=8 * PAGE, prefault=False) as tier:
        store = OldestFirst(tier, seed=3)
        store.put(writers[0], PAGE, 640)
        lowest = 1.0
        for turn in range(240):
            spec = turn // rounds % 2
            store.put(writers[spec], (PAGE, 3 * PAGE)[spec], (8, 3)[spec])
            store.touch(20)
            if turn > 20:
                lowest = min(lowest, store.use())
        tier.check()
        for tag, (slot, _size) in store.blocks.items():
            assert tier.tags(np.array([slot]))[0] == tag == tier.view(slot).view(np.int64)[0]
        assert lowest >= 0.9
