"""Leases, reservations and pins: rights end when they must, holds stay as long as they must."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import BadInputError, EndedError, IntegrityError
from kvstore.store import store as store_module
from kvstore.store.store import LeaseLimits
from kvstore.tiers.dram import SlotState

KIB = 1 << 10
ALICE, BOB, EVE = 1, 2, 3

Rig = Any
"""What ``conftest.Rig`` describes."""


def states(rig: Rig, slots: Any) -> set[int]:
    return set(rig.dram.states(np.asarray(slots)).tolist())


# Leases ------------------------------------------------------------------------------------------


def test_a_lease_gives_the_bytes_that_were_put(rig: Rig) -> None:
    prompt = rig.rows(5, tag=1)
    assert rig.put(ALICE, prompt).n_committed == 5
    lease = rig.store.lease(BOB, prompt)
    assert (lease.n_blocks, lease.partial_tokens, lease.n_tokens) == (5, 0, 10)
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, 5)


@pytest.mark.parametrize(
    ("first", "most", "n_blocks", "rows"),
    [(0, 0, 4, range(4)), (1, 0, 4, range(1, 4)), (0, 2, 2, range(2)), (1, 3, 3, range(1, 3)), (4, 0, 4, ())],
)
def test_a_lease_takes_the_part_that_was_asked_for(
    rig: Rig, first: int, most: int, n_blocks: int, rows: Any
) -> None:
    prompt = rig.rows(4, tag=1)
    rig.put(ALICE, prompt)
    lease = rig.store.lease(BOB, prompt, first, most)
    assert (lease.n_blocks, lease.n_tokens) == (n_blocks, n_blocks * 2)
    assert rig.bytes_at(rig.slots_of(lease)) == [rig.expected(prompt, 4)[row] for row in rows]
    assert (lease.id != 0) == (len(rows) > 0)


def test_a_partial_block_is_leased_too_unless_the_limit_cuts_before_it(rig: Rig) -> None:
    stored = rig.prompt([1, 2, 3, 4])
    rig.put(ALICE, stored)
    asked = rig.prompt([1, 2, 3, 9])
    lease = rig.store.lease(BOB, asked)
    assert (lease.n_blocks, lease.partial_tokens, lease.n_tokens) == (1, 1, 3)
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(stored, 2)
    cut = rig.store.lease(BOB, asked, max_blocks=1)
    assert (cut.n_blocks, cut.partial_tokens, cut.n_tokens, len(cut.ids)) == (1, 0, 2, 1)


def test_a_miss_is_a_lease_of_nothing(rig: Rig) -> None:
    lease = rig.store.lease(ALICE, rig.rows(3, tag=1))
    assert (lease.id, lease.n_blocks, lease.n_tokens, len(lease.ids)) == (0, 0, 0, 0)
    assert not rig.store.release(ALICE, 0)
    assert rig.stat("leases") == 0


def test_release_is_idempotent_and_only_for_holders(rig: Rig) -> None:
    prompt = rig.rows(2, tag=1)
    rig.put(ALICE, prompt)
    lease = rig.store.lease(BOB, prompt)
    assert not rig.store.release(ALICE, lease.id)
    assert rig.store.release(BOB, lease.id)
    assert not rig.store.release(BOB, lease.id)
    assert not rig.store.index.table.refs.any()


def test_every_holder_of_a_lease_must_release_it(rig: Rig) -> None:
    prompt = rig.rows(2, tag=1)
    rig.put(ALICE, prompt)
    lease = rig.store.lease(ALICE, prompt)
    assert rig.store.attach(BOB, "default", lease.id) is lease
    assert rig.store.release(ALICE, lease.id)
    assert rig.store.index.table.refs[lease.ids].tolist() == [1, 1]
    rig.store.renew(BOB, lease.id)
    with pytest.raises(EndedError, match=str(lease.id)):
        rig.store.renew(ALICE, lease.id)
    assert rig.store.release(BOB, lease.id)
    assert not rig.store.index.table.refs.any()
    with pytest.raises(EndedError, match=str(lease.id)):
        rig.store.attach(ALICE, "default", lease.id)


def test_another_tenant_can_not_attach_and_can_not_tell_why(rig: Rig) -> None:
    prompt = rig.rows(2, tag=1)
    rig.put(ALICE, prompt)
    lease = rig.store.lease(ALICE, prompt)
    with pytest.raises(EndedError) as theirs:
        rig.store.attach(EVE, "other", lease.id)
    with pytest.raises(EndedError) as nobodys:
        rig.store.attach(EVE, "other", lease.id + 1)
    assert str(theirs.value).replace(str(lease.id), "") == str(nobodys.value).replace(str(lease.id + 1), "")
    assert list(lease.holders) == [ALICE]


@pytest.mark.parametrize("noticed", [False, True])
def test_after_its_deadline_a_lease_has_no_right_but_still_its_hold(rig: Rig, *, noticed: bool) -> None:
    prompt = rig.rows(3, tag=1)
    rig.put(ALICE, prompt)
    lease = rig.store.lease(BOB, prompt, ttl_s=5.0)
    rig.clock.advance(4.9)
    assert rig.store.expire() == []
    rig.clock.advance(0.1)
    if noticed:
        assert rig.store.expire() == [lease]
        assert rig.store.expire() == []
        assert (rig.stat("leases"), rig.stat("leases_ended_unacknowledged")) == (0, 1)
    for act in (
        lambda: rig.store.renew(BOB, lease.id),
        lambda: rig.store.attach(ALICE, "default", lease.id),
    ):
        with pytest.raises(EndedError, match=str(lease.id)):
            act()
    slots = rig.slots_of(lease)
    for tag in range(2, 30):
        rig.put(ALICE, rig.rows(8, tag=tag))
    assert rig.bytes_at(slots) == rig.expected(prompt, 3)
    assert states(rig, slots) == {SlotState.LIVE}
    assert rig.dram.stats()["used_bytes"] >= 3 * 4 * KIB
    assert rig.store.release(BOB, lease.id)
    rig.put(ALICE, rig.rows(32, tag=99))
    assert rig.found(prompt) == 0


def test_renewing_moves_the_deadline_both_ways(rig: Rig) -> None:
    prompt = rig.rows(1, tag=1)
    rig.put(ALICE, prompt)
    lease = rig.store.lease(ALICE, prompt, ttl_s=5.0)
    assert rig.store.renew(ALICE, lease.id, 50.0) == 50.0
    rig.clock.advance(49.0)
    assert rig.store.expire() == []
    assert rig.store.renew(ALICE, lease.id, 2.0) == 2.0
    rig.clock.advance(2.0)
    assert rig.store.expire() == [lease]


def test_lives_are_bounded_and_absurd_ones_refused(rig: Rig) -> None:
    limits = LeaseLimits(10.0, 100.0)
    assert (limits.ttl_s(0), limits.ttl_s(7), limits.ttl_s(1e9)) == (10.0, 7, 100.0)
    prompt = rig.rows(1, tag=1)
    for wrong in (-1.0, float("nan"), float("inf")):
        for act in (
            lambda: rig.store.lease(ALICE, prompt, ttl_s=wrong),  # noqa: B023 - called at once
            lambda: rig.store.pin(ALICE, prompt, wrong),  # noqa: B023
            lambda: rig.store.begin_reserve(ALICE, prompt, 0, 1, wrong),  # noqa: B023
        ):
            with pytest.raises(BadInputError, match="ttl_s is"):
                act()


def test_expiry_takes_a_bounded_number_at_a_time_and_forgets_none(rig: Rig) -> None:
    prompt = rig.rows(1, tag=1)
    rig.put(ALICE, prompt)
    n = 2 * store_module.EXPIRE_BATCH + 5
    ids = {rig.store.lease(ALICE, prompt).id for _ in range(n)}
    rig.clock.advance(11.0)
    ended = [rig.store.expire() for _ in range(4)]
    assert [len(batch) for batch in ended] == [store_module.EXPIRE_BATCH, store_module.EXPIRE_BATCH, 5, 0]
    assert {lease.id for batch in ended for lease in batch} == ids
    for lease_id in ids:
        rig.store.release(ALICE, lease_id)


def test_deadlines_of_what_is_long_gone_take_no_memory(rig: Rig) -> None:
    prompt = rig.rows(1, tag=1)
    rig.put(ALICE, prompt)
    for _ in range(1000):
        rig.store.release(ALICE, rig.store.lease(ALICE, prompt).id)
    rig.store.expire()
    assert len(rig.store.leases._deadlines) <= 64


def test_a_session_can_not_hold_claims_without_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CLAIMS_PER_SESSION_MAX", 3)
    prompt = rig.rows(1, tag=1)
    rig.put(ALICE, prompt)
    ids = [rig.store.lease(ALICE, prompt).id for _ in range(3)]
    with pytest.raises(BadInputError, match="holds 3 claims"):
        rig.store.lease(ALICE, prompt)
    theirs = rig.store.lease(BOB, prompt)
    with pytest.raises(BadInputError, match="holds 3 claims"):
        rig.store.attach(ALICE, "default", theirs.id)
    rig.store.release(ALICE, ids[0])
    rig.store.lease(ALICE, prompt)
    rig.store.check()


def test_ten_thousand_lookups_pin_nothing(rig: Rig) -> None:
    """Case 7 of the public reports: prefixes that are looked up and never read."""
    kept = [rig.rows(4, tag=tag) for tag in range(1, 9)]
    for prompt in kept:
        rig.put(ALICE, prompt)
    for i in range(10_000):
        assert len(rig.store.match(kept[i % 8]).ids) == 4
    assert not rig.store.index.table.refs.any()
    assert len(rig.store.leases) == len(rig.store.pins) == 0
    assert rig.put(ALICE, rig.rows(32, tag=50)).n_committed == 32
    assert [rig.found(prompt) for prompt in kept] == [0] * 8
    assert rig.stat("matches") == 10_000


# Reservations ------------------------------------------------------------------------------------


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
    assert rig.stat("skipped_blocks") == 0 if "skipped_blocks" in rig.store.stats()[0] else True
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
def test_slots_of_a_silent_writer_come_back_only_when_it_can_not_write_any_more(
    rig: Rig, cause: str, end: Any
) -> None:
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
    assert rig.dram.stats()["quarantined_bytes"] == 8 * 4 * KIB
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
    assert rig.dram.stats()["quarantined_bytes"] == 0
    assert len(rig.store.reservations) == 0
    assert rig.put(BOB, rig.rows(16, tag=70)).n_committed == 16


def test_what_has_no_parent_is_skipped_with_a_reason_and_counted(rig: Rig) -> None:
    prompt = rig.rows(6, tag=1)
    rig.put(ALICE, prompt, 0, 2)
    reservation = rig.reserve(ALICE, prompt, first_block=3)
    assert (reservation.n_present, len(reservation.slots)) == (0, 0)
    assert reservation.skipped_reason == "the blocks before are not stored: 2 of 3 are"
    assert rig.stat("skipped_blocks") == 3
    assert rig.dram.stats()["reserved_bytes"] == 0
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
        rig.put(BOB, rig.rows(8, tag=tag))
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
    assert len(rig.store.reservations) == 0


def test_a_session_forgotten_during_the_making_of_room_gets_no_slots(rig: Rig) -> None:
    reservation = rig.store.begin_reserve(ALICE, rig.rows(3, tag=1), 0, 3)
    rig.store.forget_session(ALICE)
    assert rig.store.make_room(reservation) is None
    assert len(rig.store.finish_reserve(reservation).slots) == 0
    assert rig.dram.stats()["reserved_bytes"] == 0


# Pins --------------------------------------------------------------------------------------------


def test_a_pinned_prefix_stays_until_it_is_unpinned_or_its_time_is_up(rig: Rig) -> None:
    pinned, timed = rig.rows(4, tag=1), rig.rows(4, tag=2)
    for prompt in (pinned, timed):
        rig.put(ALICE, prompt)
    pin = rig.store.pin(ALICE, pinned, 90.0)
    assert len(rig.store.pin(ALICE, timed, 5.0).ids) == 4
    rig.put(ALICE, rig.rows(24, tag=3))
    rig.put(ALICE, rig.rows(24, tag=4))
    assert (rig.found(pinned), rig.found(timed)) == (4, 4)
    rig.clock.advance(5.0)
    assert rig.store.expire() == []  # nobody has to acknowledge the end of a pin
    assert rig.stat("pins") == 1
    rig.put(ALICE, rig.rows(28, tag=5))
    assert (rig.found(pinned), rig.found(timed)) == (4, 0)
    assert not rig.store.unpin(BOB, pin.id)
    assert rig.store.unpin(ALICE, pin.id)
    assert not rig.store.unpin(ALICE, pin.id)
    rig.put(ALICE, rig.rows(32, tag=6))
    assert rig.found(pinned) == 0


def test_pinning_nothing_is_no_pin(rig: Rig) -> None:
    pin = rig.store.pin(ALICE, rig.rows(2, tag=1))
    assert (pin.id, len(pin.ids), rig.stat("pins")) == (0, 0, 0)


# Sessions ----------------------------------------------------------------------------------------


def test_a_session_cut_off_loses_its_rights_and_keeps_its_holds(rig: Rig) -> None:
    prompt = rig.rows(4, tag=1)
    rig.put(ALICE, prompt)
    mine, shared = rig.store.lease(BOB, prompt), rig.store.lease(BOB, prompt)
    rig.store.attach(ALICE, "default", shared.id)
    pin = rig.store.pin(BOB, prompt)
    rig.store.end_rights(BOB)
    for lease in (mine, shared):
        with pytest.raises(EndedError):
            rig.store.renew(BOB, lease.id)
    assert rig.store.renew(ALICE, shared.id) == 10.0
    assert not rig.store.unpin(BOB, pin.id)
    assert rig.stat("leases_ended_unacknowledged") == 1
    rig.put(ALICE, rig.rows(28, tag=2))
    rig.put(ALICE, rig.rows(28, tag=3))
    assert rig.found(prompt) == 4
    assert rig.store.release(BOB, mine.id)  # it came back to say so
    rig.store.attach(BOB, "default", shared.id)
    assert rig.store.renew(BOB, shared.id) == 10.0


def test_a_forgotten_session_holds_nothing(rig: Rig) -> None:
    prompt = rig.rows(4, tag=1)
    rig.put(ALICE, prompt)
    shared = rig.store.lease(BOB, prompt)
    rig.store.attach(ALICE, "default", shared.id)
    rig.store.lease(BOB, prompt)
    rig.store.pin(BOB, prompt)
    reservation = rig.reserve(BOB, rig.rows(3, tag=2))
    rig.map_regions(BOB, rig.slots_of(shared), writable=False)
    rig.store.forget_session(BOB)
    assert list(rig.store.leases) == [shared]
    assert (len(rig.store.reservations), len(rig.store.pins)) == (0, 0)
    assert rig.dram.stats()["reserved_bytes"] == 0
    with pytest.raises(EndedError):
        rig.store.commit(BOB, reservation.id)
    assert all(BOB not in region.mappers for region in rig.dram.regions.values())
    assert rig.store.release(ALICE, shared.id)
    rig.store.forget_session(BOB)
    assert not rig.store.index.table.refs.any()


# Facts -------------------------------------------------------------------------------------------


def test_stats_count_what_happened(rig: Rig) -> None:
    prompt = rig.prompt([1, 2, 3, 4, 5, 6])
    rig.put(ALICE, prompt, 0, 2)
    rig.store.lease(BOB, prompt)
    rig.store.lease(BOB, rig.rows(2, tag=9))
    rig.store.lease(BOB, rig.prompt([1, 2, 3]))
    numbers, texts = rig.store.stats()
    wanted = {
        "lookups": 3, "lookup_hits": 2, "lookup_blocks": 3 + 2 + 2, "hit_blocks": 2 + 0 + 1, "hit_tokens": 4 + 3,
        "matches": 3, "blocks": 2, "namespaces": 1, "leases": 2, "leases_ended_unacknowledged": 0, "pins": 0,
        "reservations": 0, "reservations_ended_unacknowledged": 0, "committed_blocks": 2,
        "committed_bytes": 8192, "duplicate_blocks": 0, "dram_used_bytes": 8192, "dram_capacity_bytes": 131072,
    }  # fmt: skip
    assert {name: numbers[name] for name in wanted} == wanted
    assert all(isinstance(value, float | int) for value in numbers.values())
    assert {"dram_copy_backend", "dram_memory_failure"} <= texts.keys()


@pytest.mark.parametrize("damage", ["tag", "slot", "pin", "state"])
def test_check_notices_when_index_and_tier_disagree(rig: Rig, damage: str) -> None:
    prompt = rig.rows(2, tag=1)
    rig.put(ALICE, prompt)
    ids = rig.store.index.match(prompt.root_key, prompt.path).ids
    slots = rig.store.index.slots(ids)
    undo: Any
    if damage == "tag":
        rig.dram.set_tags(slots[:1], np.array([77]))
        undo = lambda: rig.dram.set_tags(slots[:1], ids[:1].astype(np.int64))  # noqa: E731
    elif damage == "slot":
        rig.store.index.relocate(ids, slots[::-1].copy())
        undo = lambda: rig.store.index.relocate(ids, slots)  # noqa: E731
    elif damage == "pin":
        rig.store.index.pin(ids[:1])
        undo = lambda: rig.store.index.unpin(ids[:1])  # noqa: E731
    else:
        extra = rig.dram.allocate(ALICE, "default", 4 * KIB, 1)
        undo = lambda: rig.dram.free(extra)  # noqa: E731
    with pytest.raises(IntegrityError):
        rig.store.check()
    undo()
    rig.store.check()
