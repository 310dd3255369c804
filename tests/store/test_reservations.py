"""Reservations: nothing is visible before commit, nothing is reused while its writer could still write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import BadInputError, EndedError
from kvstore.tiers.dram import SlotState
from tests.store.rig import Rig

KIB = 1 << 10
ALICE, BOB, EVE = 1, 2, 3


def states(rig: Rig, slots: Any) -> set[int]:
    return set(rig.dram.states(np.asarray(slots)).tolist())


def test_nothing_is_visible_before_commit_and_everything_after(rig: Rig) -> None:
    prompt = rig.rows(3, tag=1)
    reservation = rig.reserve(ALICE, prompt)
    rig.fill(reservation, prompt)
    assert rig.found(prompt) == 0
    assert states(rig, reservation.slots) == {SlotState.RESERVED}
    assert rig.stat("reservations") == 1
    done = rig.store.commit(ALICE, reservation.id)
    assert (done.n_committed, done.n_duplicate) == (3, 0)
    assert rig.found(prompt) == 3
    assert rig.stat("reservations") == 0
    assert rig.stat("committed_bytes") == 3 * 4 * KIB
    with pytest.raises(EndedError, match=str(reservation.id)):
        rig.store.commit(ALICE, reservation.id)


def test_what_is_stored_is_not_reserved_again(rig: Rig) -> None:
    prompt = rig.rows(4, tag=1)
    rig.put(ALICE, prompt, 0, 2)
    reservation = rig.reserve(ALICE, prompt)
    assert (reservation.n_present, reservation.n_wanted, len(reservation.slots)) == (2, 2, 2)
    rig.fill(reservation, prompt)
    rig.store.commit(ALICE, reservation.id)
    again = rig.reserve(ALICE, prompt)
    assert (again.n_present, again.n_wanted, len(again.slots)) == (4, 0, 0)
    assert not again.skipped_reason
    assert rig.store.counters["skipped_blocks"] == 0
    assert len(rig.store.reservations) == 0
    assert not rig.store.index.table.refs.any()


def test_a_partial_commit_keeps_the_first_blocks_and_frees_the_rest(rig: Rig) -> None:
    prompt = rig.rows(4, tag=1)
    reservation = rig.reserve(ALICE, prompt)
    rig.fill(reservation, prompt)
    slots = reservation.slots.copy()
    with pytest.raises(BadInputError, match="commit of 5 blocks"):
        rig.store.commit(ALICE, reservation.id, 5)
    with pytest.raises(BadInputError, match="commit of -1 blocks"):
        rig.store.commit(ALICE, reservation.id, -1)
    assert rig.store.commit(ALICE, reservation.id, 3).n_committed == 3
    assert rig.found(prompt) == 3
    assert states(rig, slots[:3]) == {SlotState.LIVE}
    assert states(rig, slots[3:]) == {SlotState.FREE}


def test_the_second_of_two_writers_keeps_nothing_and_changes_nothing(rig: Rig) -> None:
    prompt = rig.rows(4, tag=1)
    first, second = rig.reserve(ALICE, prompt, 0, 2), rig.reserve(BOB, prompt)
    for reservation in (first, second):
        rig.fill(reservation, prompt)
    assert rig.store.commit(ALICE, first.id).n_committed == 2
    lease = rig.store.lease(EVE, prompt)
    before = rig.slots_of(lease)
    done = rig.store.commit(BOB, second.id)
    assert (done.n_committed, done.n_duplicate) == (2, 2)
    assert rig.slots_of(lease).tolist() == before.tolist()
    assert states(rig, second.slots) == {SlotState.FREE}
    found = rig.store.lease(EVE, prompt)
    assert rig.bytes_at(rig.slots_of(found)) == rig.expected(prompt, 4)
    assert rig.stat("duplicate_blocks") == 2


def test_abort_gives_back_at_once_and_shows_nothing(rig: Rig) -> None:
    prompt = rig.rows(3, tag=1)
    reservation = rig.reserve(ALICE, prompt)
    assert not rig.store.abort(BOB, reservation.id)
    assert rig.store.abort(ALICE, reservation.id)
    assert not rig.store.abort(ALICE, reservation.id)
    assert states(rig, reservation.slots) == {SlotState.FREE}
    assert rig.found(prompt) == 0


@pytest.mark.parametrize("noticed", [False, True])
def test_a_commit_after_the_deadline_stores_nothing(rig: Rig, *, noticed: bool) -> None:
    prompt = rig.rows(3, tag=1)
    reservation = rig.reserve(ALICE, prompt, ttl_s=5.0)
    rig.fill(reservation, prompt)
    rig.clock.advance(5.0)
    if noticed:
        assert rig.store.expire() == [reservation]
    slots = reservation.slots.copy()
    with pytest.raises(EndedError, match=str(reservation.id)):
        rig.store.commit(ALICE, reservation.id)
    assert rig.found(prompt) == 0
    assert states(rig, slots) == {SlotState.FREE}  # the writer has just said that it is done
    assert rig.store.expire() == []


def end_by_abort(rig: Rig, reservation_id: int) -> None:
    assert rig.store.abort(ALICE, reservation_id)


def end_by_commit(rig: Rig, reservation_id: int) -> None:
    with pytest.raises(EndedError):
        rig.store.commit(ALICE, reservation_id)


def end_by_death(rig: Rig, reservation_id: int) -> None:
    rig.store.forget_session(ALICE)


@pytest.mark.parametrize("end", [end_by_abort, end_by_commit, end_by_death])
@pytest.mark.parametrize("cause", ["deadline", "cut off"])
def test_slots_of_a_silent_writer_come_back_only_when_it_can_not_write_any_more(rig: Rig, cause: str, end: Any) -> None:
    """Case 11 of the public reports, and invariant 4 for writers."""
    prompt = rig.rows(8, tag=1)
    reservation = rig.reserve(ALICE, prompt)
    rig.map_regions(ALICE, reservation.slots, writable=True)
    slots = reservation.slots.copy()
    if cause == "deadline":
        rig.clock.advance(10.0)
        assert rig.store.expire() == [reservation]
    else:
        rig.store.end_rights(ALICE)
        rig.store.end_rights(ALICE)
    assert states(rig, slots) == {SlotState.QUARANTINED}
    assert rig.dram_bytes()["quarantined"] == 8 * 4 * KIB
    assert (rig.stat("reservations"), rig.stat("reservations_ended_unacknowledged")) == (0, 1)
    for tag in range(2, 20):  # more than the tier holds
        other = rig.rows(6, tag=tag)
        rig.put(BOB, other)
        for slot in slots.tolist():
            rig.dram.view(slot)[:] = 255  # it wakes up and goes on writing
        assert rig.bytes_at(rig.slots_of(rig.store.lease(BOB, other))) == rig.expected(other, 6)
        rig.store.forget_session(EVE)
        for lease in list(rig.store.leases):
            rig.store.release(BOB, lease.id)
    assert states(rig, slots) == {SlotState.QUARANTINED}
    assert rig.found(prompt) == 0
    end(rig, reservation.id)
    assert rig.dram_bytes()["quarantined"] == 0
    assert len(rig.store.reservations) == 0
    assert rig.put(BOB, rig.rows(16, tag=70)).n_committed == 16


def test_what_has_no_parent_is_skipped_with_a_reason_and_counted(rig: Rig) -> None:
    prompt = rig.rows(6, tag=1)
    rig.put(ALICE, prompt, 0, 2)
    reservation = rig.reserve(ALICE, prompt, first_block=3)
    assert (reservation.n_present, len(reservation.slots)) == (0, 0)
    assert reservation.skipped_reason == "the blocks before are not stored: 2 of 3 are"
    assert rig.stat("skipped_blocks") == 3
    assert rig.dram_bytes()["reserved"] == 0
    assert not rig.store.index.table.refs.any()


@pytest.mark.parametrize(("first", "n"), [(0, 0), (0, 4), (3, 1), (-1, 1), (1, -1)])
def test_blocks_that_the_prompt_does_not_have_are_refused(rig: Rig, first: int, n: int) -> None:
    with pytest.raises(BadInputError, match="the prompt has 3 blocks"):
        rig.store.begin_reserve(ALICE, rig.rows(3, tag=1), first, n)
    assert len(rig.store.reservations) == 0


def test_the_ancestors_of_a_reservation_stay(rig: Rig) -> None:
    prompt = rig.rows(6, tag=1)
    rig.put(ALICE, prompt, 0, 3)
    reservation = rig.reserve(ALICE, prompt)
    for tag in range(2, 12):
        rig.put(ALICE, rig.rows(26, tag=tag))  # all that the tier has beside them
    assert rig.found(prompt) == 3
    rig.fill(reservation, prompt)
    assert rig.store.commit(ALICE, reservation.id).n_committed == 3
    assert rig.bytes_at(rig.slots_of(rig.store.lease(BOB, prompt))) == rig.expected(prompt, 6)


def test_a_tier_full_of_leased_blocks_skips_and_counts(rig: Rig) -> None:
    prompts = [rig.rows(8, tag=tag) for tag in range(1, 5)]
    for prompt in prompts:
        assert rig.put(ALICE, prompt).n_committed == 8
        rig.store.lease(BOB, prompt)
    more = rig.rows(4, tag=9)
    for writer in (ALICE, EVE):
        reservation = rig.reserve(writer, more)
        assert len(reservation.slots) == 0
        assert reservation.skipped_reason == "the DRAM tier is full of blocks in use"
    assert rig.stat("skipped_blocks") == 8
    assert rig.stat("blocks") == 32
    for prompt in prompts:
        assert rig.found(prompt) == 8
    rig.store.forget_session(BOB)
    assert rig.put(ALICE, more).n_committed == 4


def test_a_reservation_gets_what_there_is_and_says_why_it_is_less(rig: Rig) -> None:
    prompt = rig.rows(30, tag=1)
    rig.put(ALICE, prompt)
    rig.store.lease(BOB, prompt)
    reservation = rig.reserve(ALICE, rig.rows(5, tag=2))
    assert len(reservation.slots) == 2
    assert reservation.skipped_reason
    assert rig.stat("skipped_blocks") == 3


def test_a_deadline_during_the_making_of_room_gives_no_slots(rig: Rig) -> None:
    reservation = rig.store.begin_reserve(ALICE, rig.rows(3, tag=1), 0, 3, 5.0)
    rig.clock.advance(5.0)
    assert rig.store.expire() == [reservation]
    assert rig.store.make_room(reservation) is None
    assert len(rig.store.finish_reserve(reservation).slots) == 0
    assert reservation.skipped_reason == "the reservation ended while room was made"
    assert len(rig.store.reservations) == 0


def test_a_session_forgotten_during_the_making_of_room_gets_no_slots(rig: Rig) -> None:
    reservation = rig.store.begin_reserve(ALICE, rig.rows(3, tag=1), 0, 3)
    rig.store.forget_session(ALICE)
    assert rig.store.make_room(reservation) is None
    assert len(rig.store.finish_reserve(reservation).slots) == 0
    assert rig.dram_bytes()["reserved"] == 0
