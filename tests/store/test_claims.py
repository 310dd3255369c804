"""Leases, pins and sessions: rights end when they must, holds stay as long as they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.errors import BadInputError, EndedError, IntegrityError
from kvstore.store import parts
from kvstore.store import store as store_module
from kvstore.store.requests import LeaseLimits
from kvstore.tiers.dram import SlotState
from tests.store.rig import Rig

KIB = 1 << 10
ALICE, BOB, EVE = 1, 2, 3


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
def test_a_lease_takes_the_part_that_was_asked_for(rig: Rig, first: int, most: int, n_blocks: int, rows: Any) -> None:
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
    assert rig.store.attach(BOB, "default", lease.id, namespace=prompt.namespace.digest) is lease
    assert rig.store.release(ALICE, lease.id)
    assert rig.store.index.table.refs[lease.ids].tolist() == [1, 1]
    rig.store.renew(BOB, lease.id)
    with pytest.raises(EndedError, match=str(lease.id)):
        rig.store.renew(ALICE, lease.id)
    assert rig.store.release(BOB, lease.id)
    assert not rig.store.index.table.refs.any()
    with pytest.raises(EndedError, match=str(lease.id)):
        rig.store.attach(ALICE, "default", lease.id)


def test_who_attaches_says_what_it_takes_the_blocks_for(rig: Rig) -> None:
    prompt = rig.rows(2, tag=1)
    rig.put(ALICE, prompt)
    lease = rig.store.lease(ALICE, prompt)
    other = rig.namespace(4 * KIB, revision="2")
    wrong: list[dict[str, Any]] = [
        {"namespace": other.digest},
        {"namespace": other.digest, "block_bytes": 4 * KIB},
        {"namespace": prompt.namespace.digest[:8]},
        {"block_bytes": 2 * KIB},
        {"block_bytes": 8 * KIB},
        {},
    ]
    for said in wrong:
        with pytest.raises(BadInputError, match=f"lease {lease.id} is over (another namespace|blocks of 4096 bytes)"):
            rig.store.attach(BOB, "default", lease.id, **said)
    assert list(lease.holders) == [ALICE]
    assert rig.store.attach(BOB, "default", lease.id, block_bytes=4 * KIB) is lease


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
    acts: list[Callable[[], Any]] = [
        lambda: rig.store.renew(BOB, lease.id),
        lambda: rig.store.attach(ALICE, "default", lease.id, namespace=prompt.namespace.digest),
    ]
    for act in acts:
        with pytest.raises(EndedError, match=str(lease.id)):
            act()
    slots = rig.slots_of(lease)
    for tag in range(2, 30):
        rig.put(ALICE, rig.rows(8, tag=tag))
    assert rig.bytes_at(slots) == rig.expected(prompt, 3)
    assert states(rig, slots) == {SlotState.LIVE}
    assert rig.dram_bytes()["used"] >= 3 * 4 * KIB
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
    asks: list[Callable[[float], Any]] = [
        lambda ttl_s: rig.store.lease(ALICE, prompt, ttl_s=ttl_s),
        lambda ttl_s: rig.store.pin(ALICE, prompt, ttl_s),
        lambda ttl_s: rig.store.begin_reserve(ALICE, prompt, 0, 1, ttl_s),
    ]
    for ask in asks:
        for wrong in (-1.0, float("nan"), float("inf")):
            with pytest.raises(BadInputError, match="ttl_s is"):
                ask(wrong)


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
    monkeypatch.setattr(parts, "CLAIMS_PER_SESSION_MAX", 3)
    prompt = rig.rows(1, tag=1)
    rig.put(ALICE, prompt)
    ids = [rig.store.lease(ALICE, prompt).id for _ in range(3)]
    with pytest.raises(BadInputError, match="holds 3 claims"):
        rig.store.lease(ALICE, prompt)
    theirs = rig.store.lease(BOB, prompt)
    with pytest.raises(BadInputError, match="holds 3 claims"):
        rig.store.attach(ALICE, "default", theirs.id, namespace=prompt.namespace.digest)
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
    rig.store.attach(ALICE, "default", shared.id, namespace=prompt.namespace.digest)
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
    rig.store.attach(BOB, "default", shared.id, namespace=prompt.namespace.digest)
    assert rig.store.renew(BOB, shared.id) == 10.0


def test_a_forgotten_session_holds_nothing(rig: Rig) -> None:
    prompt = rig.rows(4, tag=1)
    rig.put(ALICE, prompt)
    shared = rig.store.lease(BOB, prompt)
    rig.store.attach(ALICE, "default", shared.id, namespace=prompt.namespace.digest)
    rig.store.lease(BOB, prompt)
    rig.store.pin(BOB, prompt)
    reservation = rig.reserve(BOB, rig.rows(3, tag=2))
    rig.map_regions(BOB, rig.slots_of(shared), writable=False)
    rig.store.forget_session(BOB)
    assert list(rig.store.leases) == [shared]
    assert (len(rig.store.reservations), len(rig.store.pins)) == (0, 0)
    assert rig.dram_bytes()["reserved"] == 0
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
        "lookups": 3, "lookup_hits": 2, "lookup_blocks": 3 + 2 + 2, "hit_blocks": 2 + 0 + 1,
        "hit_tokens": 4 + 3, "matches": 3,
        "blocks": 2, "namespaces": 1, "leases": 2, "leases_ended_unacknowledged": 0, "pins": 0,
        "reservations": 0, "reservations_ended_unacknowledged": 0, "committed_blocks": 2,
        "committed_bytes": 8192, "duplicate_blocks": 0, "dram_used_bytes": 8192,
        "dram_capacity_bytes": 131072,
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
