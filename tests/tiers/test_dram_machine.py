"""The DRAM tier against an independent model, with clients that map what they are given.

The model is a dict of slots. Every live slot is written through its writer's own mapping and compared,
after every step, through a reader's read-only one. The budget is added up from the files themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from kvstore.native import Mapping
from kvstore.tiers.dram import DramTier, Reclaim
from tests.tiers.dram_scene import region_file_bytes

PAGE = 4096
CAPACITY = 40 * PAGE
READER = 1000
Int64s = NDArray[np.int64]


@dataclass
class Slot:
    """What the model knows of a slot in use."""

    state: str
    size: int
    owner: int
    tag: int = -1


def pattern(tag: int, size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(tag).integers(0, 256, size, dtype=np.uint8)


def as_slots(values: list[int]) -> Int64s:
    return np.array(values, np.int64)


Picks = tuple[float, int]
WHO = st.integers(0, 3)  # the last is the daemon
PICKS = st.tuples(st.sampled_from([0.1, 0.5, 0.8, 1.0]), st.integers(0, 1 << 16))


class TierMachine(RuleBasedStateMachine):
    prefault = False

    def __init__(self) -> None:
        super().__init__()
        self.outside_bytes = region_file_bytes()
        self.tier = DramTier(CAPACITY, region_bytes=8 * PAGE, starter_bytes=2 * PAGE, prefault=self.prefault)
        self.slots: dict[int, Slot] = {}
        self.writers = [1, 2, 3]  # each a class: (writer, tenant)
        self.next_writer = 4
        self.next_tag = 0
        self.region_writers: dict[int, int] = {}
        self.writable: dict[int, Mapping] = {}
        self.readable: dict[int, Mapping] = {}
        self.generations: dict[int, int] = {}
        self.retired: dict[int, tuple[int, set[int]]] = {}  # region -> bytes, clients that map it
        self.reclaim: Reclaim | None = None
        self.n_moved = 0

    # -- what clients do --------------------------------------------------------------------

    def tenant(self, writer: int) -> str:
        return "ab"[writer % 2]

    def attach(self, region_id: int) -> None:
        """The writer maps a new region, it is sealed, a reader maps it too."""
        region = self.tier.region(region_id)
        assert region.writer is not None
        self.region_writers[region_id] = region.writer
        if region.writer:
            self.tier.add_mapper(region_id, region.writer)
            self.writable[region_id] = Mapping(region.fd, region.size_bytes, writable=True)
            self.tier.seal(region_id)
        self.tier.add_mapper(region_id, READER)
        self.readable[region_id] = Mapping(region.fd, region.size_bytes, writable=False)
        with pytest.raises(PermissionError):
            Mapping(region.fd, region.size_bytes, writable=True)

    def check_retired(self, region_ids: list[int]) -> None:
        for region_id in region_ids:
            assert not any(slot >> 20 == region_id for slot in self.slots)
            mapping = self.readable[region_id]
            mappers = {READER}
            if region_id in self.writable:
                mappers.add(self.region_writers[region_id])
            self.retired[region_id] = (mapping.length_bytes, mappers)

    def new_generation(self, slots: list[int]) -> None:
        for place, value in zip(
            self.tier.generation_index(as_slots(slots)).tolist(),
            self.tier.locate(as_slots(slots)).generations.tolist(),
            strict=True,
        ):
            assert value > self.generations.get(place, 0)
            self.generations[place] = value

    def some(self, picks: Picks, *states: str) -> list[int]:
        """A part of the slots in these states, except those of a reclaim under way."""
        share, seed = picks
        held = set() if self.reclaim is None else {*self.reclaim.src_slots.tolist(), *self.reclaim.dst_slots.tolist()}
        fit = sorted(slot for slot, known in self.slots.items() if known.state in states and slot not in held)
        n = len(fit) if share == 1 else round(len(fit) * share)
        chosen: list[int] = np.random.default_rng(seed).permutation(as_slots(fit))[:n].tolist()
        return chosen

    # -- steps ------------------------------------------------------------------------------

    @rule(pages=st.sampled_from([1, 1, 2, 3, 10]), n=st.sampled_from([0, 1, 5, 12, 40]), who=WHO)
    def allocate(self, pages: int, n: int, who: int) -> None:
        writer = 0 if who == len(self.writers) else self.writers[who]
        tenant = self.tenant(writer)
        promised = self.tier.free_slots(writer, tenant, pages * PAGE)
        slots = self.tier.allocate(writer, tenant, pages * PAGE, n).tolist()
        assert len(slots) == len(set(slots)) == min(n, promised)
        assert not set(slots) & set(self.slots)
        for slot in slots:
            region = self.tier.region(slot >> 20)
            if region.id not in self.region_writers:
                self.attach(region.id)
            allowed = (writer, None) if writer == 0 else (writer,)
            assert region.writer in allowed
            assert (region.tenant, region.slot_bytes) == (tenant, pages * PAGE)
            self.slots[slot] = Slot("reserved", pages * PAGE, writer)
        self.new_generation(slots)

    @rule(picks=PICKS)
    def commit(self, picks: Picks) -> None:
        slots = self.some(picks, "reserved")
        tags = []
        for slot in slots:
            known = self.slots[slot]
            known.state, known.tag = "live", self.next_tag
            tags.append(self.next_tag)
            self.next_tag += 1
            self.bytes_of(slot, written=True)[:] = pattern(known.tag, known.size)
        self.tier.commit(as_slots(slots), as_slots(tags))

    @rule(who=st.integers(0, 2), pages=st.integers(1, 2), picks=PICKS)
    def fill_and_scatter(self, who: int, pages: int, picks: Picks) -> None:
        """The state that reclaim is for: hardly any budget, and holes everywhere."""
        self.allocate(pages=pages, n=CAPACITY // PAGE, who=who)
        self.commit(picks=(1, 0))
        self.free(picks=picks)

    @rule(picks=PICKS)
    def free(self, picks: Picks) -> None:
        slots = self.some(picks, "reserved", "live", "quarantined")
        self.tier.free(as_slots(slots))
        self.new_generation(slots)
        for slot in slots:
            del self.slots[slot]

    @rule(picks=PICKS)
    def quarantine(self, picks: Picks) -> None:
        slots = self.some(picks, "reserved", "live")
        self.tier.quarantine(as_slots(slots))
        for slot in slots:
            self.slots[slot].state, self.slots[slot].tag = "quarantined", -1

    @rule(writer_at=st.integers(0, 2), pages=st.integers(1, 3), limit=st.sampled_from([None, 1]))
    def retire_empty(self, writer_at: int, pages: int, limit: int | None) -> None:
        writer = self.writers[writer_at]
        gone = self.tier.retire_empty((writer, self.tenant(writer), pages * PAGE), limit)
        assert limit is None or len(gone) <= 1
        self.check_retired(gone)

    @rule(client=st.sampled_from(["writers", "reader"]))
    def unmap(self, client: str) -> None:
        for who, region_ids in self.tier.pending_unmaps().items():
            if (who == READER) != (client == "reader"):
                continue
            for region_id in region_ids:
                (self.readable if who == READER else self.writable).pop(region_id)
                self.tier.remove_mapper(region_id, who)
                self.retired[region_id][1].remove(who)

    @rule(writer_at=st.integers(0, 2))
    def writer_dies(self, writer_at: int) -> None:
        writer = self.writers[writer_at]
        self.tier.drop_client(writer)
        for region_id in [i for i in self.writable if self.region_writers[i] == writer]:
            del self.writable[region_id]
            if region_id in self.retired:
                self.retired[region_id][1].remove(writer)
        held = set() if self.reclaim is None else set(self.reclaim.dst_slots.tolist())
        lost = [
            slot
            for slot, known in self.slots.items()
            if known.owner == writer and known.state != "live" and slot not in held
        ]
        self.tier.free(as_slots(lost))
        for slot in lost:
            del self.slots[slot]
        self.writers.remove(writer)
        self.writers.append(self.next_writer)
        self.next_writer += 1

    @precondition(lambda self: self.reclaim is None)
    @rule(writer_at=st.integers(0, 2), pages=st.integers(1, 3), fixed=st.sampled_from([-1, -1, 0]))
    def plan(self, writer_at: int, pages: int, fixed: int) -> None:
        writer = self.writers[writer_at]
        asker = (writer, self.tenant(writer), pages * PAGE)
        reclaim = self.tier.plan_reclaim(*asker, lambda tags: tags % 6 != fixed)
        if reclaim is None:
            return
        source = self.tier.region(reclaim.source_region_id)
        assert (source.writer, source.tenant, source.slot_bytes) != asker
        inside = {slot: known for slot, known in self.slots.items() if slot >> 20 == source.id}
        assert set(reclaim.src_slots.tolist()) == set(inside)
        assert all(known.state == "live" and known.tag % 6 != fixed for known in inside.values())
        for src, dst in zip(reclaim.src_slots.tolist(), reclaim.dst_slots.tolist(), strict=True):
            region = self.tier.region(dst >> 20)
            if region.id not in self.region_writers:
                assert region.writer == 0
                self.attach(region.id)
            assert region.id != source.id
            assert (region.tenant, region.slot_bytes) == (source.tenant, source.slot_bytes)
            assert region.writer in (None, 0) or region.writer == source.writer
            assert dst not in self.slots
            self.slots[dst] = Slot("reserved", self.slots[src].size, self.slots[src].owner)
        self.new_generation(reclaim.dst_slots.tolist())
        self.reclaim = reclaim

    @precondition(lambda self: self.reclaim is not None)
    @rule(how=st.sampled_from(["all", "some", "abort"]), evicted=st.booleans())
    def end_reclaim(self, how: str, evicted: bool) -> None:
        reclaim, self.reclaim = self.reclaim, None
        assert reclaim is not None
        self.tier.copy_moves(reclaim)
        pairs = list(zip(reclaim.src_slots.tolist(), reclaim.dst_slots.tolist(), strict=True))
        if evicted:  # a block of the source goes while it is copied
            self.tier.free(as_slots([pairs[0][0]]))
            self.new_generation([pairs[0][0]])
            del self.slots[pairs[0][0]]
        valid = self.tier.still_valid(reclaim)
        assert valid.tolist() == [src in self.slots for src, _ in pairs]
        if how == "abort":
            self.tier.abort_reclaim(reclaim)
            for _, dst in pairs:
                del self.slots[dst]
        else:
            done = valid & (np.arange(len(pairs)) % 2 == 0) if how == "some" else valid
            self.check_moves(pairs, done.tolist())
            self.tier.finish_reclaim(reclaim, done)
        gone = [i for i in self.region_writers if i not in self.tier.regions and i not in self.retired]
        self.check_retired([i for i in gone if i in self.readable])

    def check_moves(self, pairs: list[tuple[int, int]], done: list[bool]) -> None:
        for (src, dst), moved in zip(pairs, done, strict=True):
            if moved:
                self.slots[dst] = self.slots.pop(src)
                self.n_moved += 1
            else:
                del self.slots[dst]

    # -- what must hold after every step ----------------------------------------------------

    def bytes_of(self, slot: int, written: bool = False) -> NDArray[np.uint8]:
        region_id, size = slot >> 20, self.slots[slot].size
        start = (slot & 0xFFFFF) * size
        if written and region_id in self.writable:
            return self.writable[region_id].array()[start : start + size]
        if written:  # only the daemon may write here
            return self.tier.view(slot)
        return self.readable[region_id].array()[start : start + size]

    @invariant()
    def live_bytes_are_intact(self) -> None:
        for slot, known in self.slots.items():
            if known.state == "live":
                assert np.array_equal(self.bytes_of(slot), pattern(known.tag, known.size))

    @invariant()
    def states_and_tags_are_the_models(self) -> None:
        slots = as_slots(sorted(self.slots))
        names = ["free", "reserved", "live", "quarantined"]
        assert [names[s] for s in self.tier.states(slots)] == [self.slots[s].state for s in slots.tolist()]
        assert self.tier.tags(slots).tolist() == [self.slots[s].tag for s in slots.tolist()]
        stats = self.tier.stats()
        for name, state in (("used", "live"), ("reserved", "reserved"), ("quarantined", "quarantined")):
            assert stats[f"{name}_bytes"] == sum(k.size for k in self.slots.values() if k.state == state)

    @invariant()
    def the_budget_holds(self) -> None:
        mapped = sum(size for size, clients in self.retired.values() if clients)
        assert self.tier.stats()["retired_mapped_bytes"] == mapped
        assert region_file_bytes() - self.outside_bytes + mapped <= CAPACITY

    @invariant()
    def the_tier_finds_no_fault_in_itself(self) -> None:
        self.tier.check()

    def teardown(self) -> None:
        self.readable.clear()
        self.writable.clear()
        self.tier.close()
        assert region_file_bytes() == self.outside_bytes


class PrefaultingTierMachine(TierMachine):
    prefault = True


_SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TestTier = TierMachine.TestCase
TestTier.settings = _SETTINGS
TestPrefaultingTier = PrefaultingTierMachine.TestCase
TestPrefaultingTier.settings = settings(_SETTINGS, max_examples=25)


def step(machine: TierMachine, rng: np.random.Generator) -> None:
    """One step of a walk that mostly keeps the tier full and scattered, where reclaim has work."""
    picks = (float(rng.choice([0.05, 0.1, 0.3, 0.8])), int(rng.integers(1 << 16)))
    who, pages = int(rng.integers(0, 4)), int(rng.choice([1, 1, 1, 2, 3, 10]))
    writer_at = who % 3
    if machine.reclaim is not None and rng.random() < 0.6:
        how = str(rng.choice(["all", "all", "some", "abort"]))
        machine.end_reclaim(how=how, evicted=bool(rng.random() < 0.2))
        return
    choice = rng.choice(
        ["allocate", "fill", "commit", "free", "quarantine", "retire", "unmap", "dies", "plan"],
        p=[0.15, 0.03, 0.2, 0.2, 0.03, 0.1, 0.1, 0.02, 0.17],
    )
    if choice == "allocate":
        machine.allocate(pages=pages, n=int(rng.integers(0, 13)), who=who)
    elif choice == "fill":
        machine.fill_and_scatter(who=writer_at, pages=min(pages, 2), picks=picks)
    elif choice == "commit":
        machine.commit(picks=(1.0, picks[1]))
    elif choice == "free":
        machine.free(picks=picks)
    elif choice == "quarantine":
        machine.quarantine(picks=picks)
    elif choice == "retire":
        machine.retire_empty(writer_at=writer_at, pages=min(pages, 3), limit=None)
    elif choice == "unmap":
        machine.unmap(client="writers")
        machine.unmap(client="reader")
    elif choice == "dies":
        machine.writer_dies(writer_at=writer_at)
    elif machine.reclaim is None:
        machine.plan(writer_at=writer_at, pages=min(pages, 3), fixed=int(rng.choice([-1, -1, 0])))


@pytest.mark.parametrize("prefault", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_long_walk_of_a_full_tier(seed: int, prefault: bool) -> None:
    rng = np.random.default_rng(seed)
    machine = PrefaultingTierMachine() if prefault else TierMachine()
    try:
        for _ in range(400):
            step(machine, rng)
            machine.live_bytes_are_intact()
            machine.states_and_tags_are_the_models()
            machine.the_budget_holds()
            machine.the_tier_finds_no_fault_in_itself()
    finally:
        machine.teardown()
    assert machine.n_moved > 0
