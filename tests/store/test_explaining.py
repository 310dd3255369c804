"""Why a prompt is no hit: every reason there is, made to happen in a real store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvstore.hints import Hints
from kvstore.offload import WritePolicy
from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.explain import Content
from kvstore.prefix_index.history import Left, Unwritten
from kvstore.store.explaining import LOOKED_AT_MAX, Explained, Explainer, Reason, State
from kvstore.store.requests import Prompt
from kvstore.store.unstored import NOTED_ROWS_MAX
from kvstore.types import ExtraKey, KVSpec
from tests.store.hybrid_rig import LAYOUTS, HybridRig
from tests.store.rig import BLOCK_TOKENS, KIB, Rig
from tests.store.two_tier import TwoTierRig

ALICE, BOB = 1, 2
MakeRig = Callable[..., Rig]
MakeTwoTier = Callable[..., TwoTierRig]


def explain(rig: Rig, prompt: Prompt, *, other_salts: bool = False) -> Explained:
    """As a daemon answers, and without a trace."""
    explainer, before = Explainer(rig.store), rig.store.counters.snapshot()
    told = explainer.explain(prompt)
    for _ in explainer.look_around(prompt, told, other_salts=other_salts):
        pass
    assert rig.store.counters.snapshot() == before
    return told


def facts(told: Explained) -> tuple[int, int, Reason]:
    return told.n_hit, told.block, told.reason


def test_a_hit_is_stored_and_said_to_be_where_it_is(two_tiers: MakeTwoTier) -> None:
    rig = two_tiers()
    prompt = rig.rows(6, 1)
    rig.put(ALICE, prompt)
    rig.settle()
    rig.dram.free(rig.store.index.evict(2).slots)
    told = explain(rig, prompt)
    assert facts(told) == (6, 6, State.STORED)
    assert (told.n_in_dram, told.n_on_nvme, told.departure, dict(told.missing)) == (4, 2, None, {})


def test_evicted_by_whom_from_where_when_and_how_long_unused(rig: Rig) -> None:
    prompt = rig.rows(6, 1)
    rig.put(ALICE, prompt)
    rig.clock.advance(12.0)
    rig.dram.free(rig.store.index.evict(4).slots)
    rig.clock.advance(180.0)
    told = explain(rig, prompt)
    assert facts(told) == (2, 2, Left.EVICTED)
    assert told.departure is not None
    assert told.departure[1:] == (DRAM, 180.0, 12.0, None)
    assert dict(told.missing) == {Left.EVICTED: 4}


def test_the_policy_of_the_tier_that_a_block_left_last(two_tiers: MakeTwoTier) -> None:
    rig = two_tiers()
    prompt = rig.rows(3, 1)
    rig.put(ALICE, prompt)
    rig.settle()
    rig.dram.free(rig.store.index.evict(3).slots)
    assert explain(rig, prompt).reason is State.STORED
    rig.nvme.free(rig.store.index.evict_nvme(2).slots)
    told = explain(rig, prompt)
    assert facts(told) == (1, 1, Left.EVICTED)
    assert told.departure is not None
    assert told.departure.tier == NVME


def test_never_stored_and_what_is_stored_instead(rig: Rig) -> None:
    rig.put(ALICE, rig.prompt([1, 2, 3, 4, 5, 6]))
    told = explain(rig, rig.prompt([1, 2, 3, 9, 5, 6]))
    assert facts(told) == (1, 1, State.NEVER_STORED)
    assert (told.partial_tokens, told.found.differs_at, told.found.here, told.found.stored) == (1, 3, 9, 4)
    assert dict(told.missing) == {State.NEVER_STORED: 2}


def test_a_short_last_block(rig: Rig) -> None:
    rig.put(ALICE, rig.prompt([1, 2, 3, 4, 5]))
    assert explain(rig, rig.prompt([1, 2, 3, 4, 5])).reason is State.STORED
    assert facts(explain(rig, rig.prompt([1, 2, 3, 4, 6]))) == (2, 2, State.NEVER_STORED)
    rig.dram.free(rig.store.index.evict(1).slots)
    assert facts(explain(rig, rig.prompt([1, 2, 3, 4, 5]))) == (2, 2, Left.EVICTED)


@pytest.mark.parametrize(
    ("stored", "asked", "content"),
    [
        (b"cat", b"dog", Content.OTHER),
        (b"", b"dog", Content.NONE),
        (b"cat", b"", Content.SOME),
        (b"cat", b"cat", Content.SAME),
    ],
)
@pytest.mark.parametrize("more", [(), (7, 8)])
def test_another_image_behind_the_same_tokens(
    rig: Rig, stored: bytes, asked: bytes, content: Content, more: Sequence[int]
) -> None:
    def prompt(digest: bytes) -> Prompt:
        extras = [ExtraKey(2, 2, digest)] if digest else []
        return rig.prompt([1, 2, 0, 0, *more], extras=extras)

    rig.put(ALICE, prompt(stored))
    told = explain(rig, prompt(asked))
    assert told.found.content is content
    assert (told.reason is State.STORED) == (stored == asked)


def test_being_written_and_then_not_committed(rig: Rig) -> None:
    rig.put(ALICE, rig.rows(2, 1))
    prompt, other = rig.rows(5, 1), rig.rows(5, 1, salt="other")
    reservation = rig.reserve(ALICE, prompt, 0, 4)
    told = explain(rig, prompt)
    assert facts(told) == (2, 2, State.BEING_WRITTEN)
    assert dict(told.missing) == {State.BEING_WRITTEN: 2, State.NEVER_STORED: 1}
    assert explain(rig, other).reason is State.NEVER_STORED
    assert explain(rig, rig.prompt([*range(1000, 1004), 7, 7, 7, 7])).reason is State.NEVER_STORED
    rig.clock.advance(20.0)
    assert [claim.id for claim in rig.store.expire()] == [reservation.id]
    rig.clock.advance(3.0)
    told = explain(rig, prompt)
    assert facts(told) == (2, 2, Left.UNCOMMITTED)
    assert told.departure is not None
    assert told.departure.ago_s == 3.0
    rig.store.abort(ALICE, reservation.id)
    assert explain(rig, prompt).reason is Left.UNCOMMITTED


def test_a_reservation_with_another_image_is_not_this_prompt_s(rig: Rig) -> None:
    prompt = rig.prompt([1, 2, 3, 4], extras=[ExtraKey(0, 2, b"cat")])
    reservation = rig.reserve(ALICE, prompt)
    assert explain(rig, prompt).reason is State.BEING_WRITTEN
    assert explain(rig, rig.prompt([1, 2, 3, 4])).reason is State.NEVER_STORED
    rig.store.abort(ALICE, reservation.id)


def test_a_commit_that_comes_too_late(rig: Rig) -> None:
    prompt = rig.rows(2, 1)
    reservation = rig.reserve(ALICE, prompt, ttl_s=5.0)
    rig.clock.advance(6.0)
    with pytest.raises(Exception, match="ended before the commit"):
        rig.store.commit(ALICE, reservation.id)
    assert facts(explain(rig, prompt)) == (0, 0, Left.UNCOMMITTED)


def test_no_room_as_all_of_it_is_in_use(rig: Rig) -> None:
    full, prompt = rig.rows(30, 1), rig.rows(6, 2)
    rig.put(ALICE, full)
    lease = rig.store.lease(BOB, full)
    assert rig.put(ALICE, prompt).n_committed == 2
    told = explain(rig, prompt)
    assert facts(told) == (2, 2, Left.NO_ROOM)
    assert dict(told.missing) == {Left.NO_ROOM: 4}
    assert rig.put(ALICE, prompt).n_committed == 0
    assert facts(explain(rig, prompt)) == (2, 2, Left.NO_ROOM)
    rig.store.release(BOB, lease.id)
    assert rig.put(ALICE, prompt).n_committed == 4
    assert explain(rig, prompt).reason is State.STORED


def test_what_can_never_fit(rig: Rig) -> None:
    longer = rig.rows(40, 3)
    rig.put(ALICE, longer)
    told = explain(rig, longer)
    assert facts(told) == (32, 32, Left.TOO_LONG)
    assert dict(told.missing) == {Left.TOO_LONG: 8}
    n_bytes = 2 * rig.dram.capacity_bytes
    larger = rig.rows(3, 4, namespace=rig.namespace(spec=KVSpec.opaque(BLOCK_TOKENS, n_bytes), revision="large"))
    rig.put(ALICE, larger)
    told = explain(rig, larger)
    assert facts(told) == (0, 0, Left.TOO_LARGE)
    assert dict(told.missing) == {Left.TOO_LARGE: 3}


def test_a_tenant_s_quota(rig: Rig) -> None:
    tenants, prompt = rig.store.index.tenants, rig.rows(10, 1)
    most_bytes = 4 * rig.dram.slot_bytes(4 * KIB)
    tenants.most_bytes[DRAM, tenants.number(prompt.namespace.namespace.tenant)] = most_bytes
    assert rig.put(ALICE, prompt).n_committed == 4
    told = explain(rig, prompt)
    assert facts(told) == (4, 4, Left.QUOTA)
    assert dict(told.missing) == {Left.QUOTA: 6}


def test_no_room_and_generated_at_once(rig: Rig) -> None:
    full = rig.rows(30, 1)
    rig.put(ALICE, full)
    rig.store.lease(BOB, full)
    prompt = rig.rows(8, 2)._replace(n_prompt_tokens=5 * BLOCK_TOKENS, prompt_only=True)
    assert rig.put(ALICE, prompt).n_committed == 2
    assert dict(explain(rig, prompt).missing) == {Left.NO_ROOM: 3, Left.GENERATED: 3}


def test_of_a_long_put_only_so_many_blocks_are_remembered(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_bytes=64 * KIB)
    n = NOTED_ROWS_MAX + 40
    rig.put(ALICE, rig.rows(n, 1))
    assert dict(explain(rig, rig.rows(n, 1)).missing) == {Left.TOO_LONG: LOOKED_AT_MAX}
    assert len(rig.store.index.history) == NOTED_ROWS_MAX
    assert not rig.store.index.history.has_forgotten


def test_declined_by_the_policy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(ALICE, rig.rows(30, 1))
    policy, prompt = rig.store.index.policy, rig.rows(6, 2)
    monkeypatch.setattr(policy, "weighs", True)
    monkeypatch.setattr(policy, "weigh", lambda newcomers: np.full(len(newcomers.keys), -1.0))
    assert rig.put(ALICE, prompt).n_committed == 2
    told = explain(rig, prompt)
    assert facts(told) == (2, 2, Left.DECLINED)
    assert dict(told.missing) == {Left.DECLINED: 4}


def test_generated_tokens_that_were_not_to_be_stored(rig: Rig) -> None:
    prompt = rig.rows(5, 1)._replace(n_prompt_tokens=3 * BLOCK_TOKENS, prompt_only=True)
    assert rig.put(ALICE, prompt).n_committed == 3
    assert facts(explain(rig, prompt)) == (3, 3, Left.GENERATED)
    rig.put(ALICE, rig.rows(4, 1))
    assert rig.put(ALICE, prompt).n_committed == 0
    assert facts(explain(rig, prompt)) == (4, 4, Left.GENERATED)


def test_nobody_wanted_it_any_more(rig: Rig) -> None:
    prompt = rig.rows(2, 1)._replace(hints=Hints(no_reuse=True))
    rig.put(ALICE, prompt)
    rig.dram.free(rig.store.index.evict(1).slots)
    assert facts(explain(rig, prompt)) == (1, 1, Left.UNWANTED)


def test_its_time_is_over_first_there_then_gone(rig: Rig) -> None:
    prompt = rig.rows(3, 1)._replace(hints=Hints(ttl_s=5.0))
    rig.put(ALICE, rig.rows(1, 1))
    rig.put(ALICE, prompt)
    rig.clock.advance(6.0)
    told = explain(rig, prompt)
    assert (facts(told), told.departure) == ((1, 1, Left.EXPIRED), None)
    assert dict(told.missing) == {Left.EXPIRED: 2}
    rig.store.tick()
    rig.dram.free(rig.store.index.evict(2).slots)
    rig.clock.advance(1.0)
    told = explain(rig, prompt)
    assert facts(told) == (1, 1, Left.EXPIRED)
    assert told.departure is not None
    assert (told.departure.ago_s, told.departure.idle_s) == (1.0, 6.0)


def test_damaged_on_nvme_and_what_lies_behind_can_not_be_reached(two_tiers: MakeTwoTier) -> None:
    rig = two_tiers()
    prompt = rig.rows(5, 1)
    rig.put(ALICE, prompt)
    rig.settle()
    index = rig.store.index
    ids = index.match(prompt.root_key, prompt.path).ids
    rig.dram.free(index.evict(5).slots)
    rig.nvme.quarantine(index.break_nvme(ids[2:3]))
    rig.clock.advance(4.0)
    told = explain(rig, prompt)
    assert facts(told) == (2, 2, Left.CORRUPT)
    assert told.departure is not None
    assert told.departure.ago_s == 4.0
    assert dict(told.missing) == {Left.CORRUPT: 1, State.UNREACHABLE: 2}


def test_cleared_with_its_namespace(rig: Rig) -> None:
    prompt, never = rig.rows(3, 1), rig.rows(3, 2)
    rig.put(ALICE, prompt)
    lease = rig.store.lease(BOB, prompt)
    rig.store.clear({prompt.namespace.ordinal})
    rig.clock.advance(2.0)
    for _ in range(3):  # hidden and in use, then gone
        told = explain(rig, prompt)
        assert facts(told) == (0, 0, Left.CLEARED)
        assert (told.cleared_ago_s, told.n_cleared) == (2.0, 3)
        rig.store.release(BOB, lease.id)
        while rig.store.clearing.step():
            pass
    told = explain(rig, never)
    assert (told.reason, told.cleared_ago_s) == (State.NEVER_STORED, 2.0)


@pytest.mark.parametrize("why", [Unwritten.QUEUE_FULL, Unwritten.SUSPENDED, None])
def test_evicted_from_dram_and_why_it_was_not_on_nvme(two_tiers: MakeTwoTier, why: Unwritten | None) -> None:
    rig = two_tiers(
        WritePolicy.THROUGH if why else WritePolicy.BACK, 8 * KIB if why is Unwritten.QUEUE_FULL else 1 << 20
    )
    prompt = rig.rows(4, 1)
    if why is Unwritten.SUSPENDED:
        rig.nvme._health.failed(full=True)  # nothing may be written
    rig.put(ALICE, prompt)
    if why is Unwritten.QUEUE_FULL:
        rig.settle()
    rig.dram.free(rig.store.index.evict(4).slots)
    told = explain(rig, prompt)
    assert told.reason is Left.EVICTED
    assert told.departure is not None
    assert told.departure.unwritten is why


def test_what_is_remembered_ends_with_the_process(two_tiers: MakeTwoTier) -> None:
    rig = two_tiers(WritePolicy.BACK)
    prompt = rig.rows(4, 1)
    rig.put(ALICE, rig.rows(2, 1))
    assert rig.persist(prompt) == 2
    rig.put(ALICE, prompt)
    rig.dram.free(rig.store.index.evict(4).slots)
    assert facts(explain(rig, prompt)) == (2, 2, Left.EVICTED)
    again = rig.killed()
    again.clock.advance(7.0)
    told = explain(again, again.rows(4, 1))
    assert facts(told) == (2, 2, State.NEVER_STORED)
    assert again.store.index.history.reach_s == 7.0
    again.close()


def test_only_so_many_missing_blocks_are_accounted_for(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_bytes=64 * KIB)
    told = explain(rig, rig.prompt(range(BLOCK_TOKENS * (LOOKED_AT_MAX + 10))))
    assert dict(told.missing) == {State.NEVER_STORED: LOOKED_AT_MAX}


# Hybrid ------------------------------------------------------------------------------------------


def test_which_group_s_part_is_missing_and_why(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_bytes=400 * KIB, region_bytes=64 * KIB, starter_bytes=16 * KIB)
    it, layout = HybridRig(rig), LAYOUTS[1]
    tokens = tuple(range(24))
    it.put(ALICE, layout, tokens, 0)
    prompt = it.prompt(layout, tokens)
    n_rows = prompt.path.n_full_rows
    told = explain(rig, prompt)
    assert facts(told) == (0, n_rows - 1, State.NEVER_STORED)
    assert told.groups == (2,)
    writing = it.reserve(ALICE, layout, tokens, 1, n_rows - 1, 1)
    assert writing is not None
    assert explain(rig, prompt).reason is State.BEING_WRITTEN
    rig.store.commit(ALICE, writing.reservation.id)
    assert facts(explain(rig, prompt)) == (n_rows, n_rows, State.STORED)
    index = rig.store.index
    rig.dram.free(index.evict(1).slots)
    told = explain(rig, prompt)
    assert facts(told) == (0, n_rows - 1, Left.EVICTED)
    assert told.groups == (2,)


# What comes near ---------------------------------------------------------------------------------


def test_the_fields_in_which_other_namespaces_differ(rig: Rig) -> None:
    stored = rig.namespace(revision="a")
    wider = rig.namespace(spec=KVSpec.opaque(2 * BLOCK_TOKENS, 4 * KIB), revision="a")
    rig.namespace(revision="empty")
    rig.put(ALICE, rig.rows(4, 1, namespace=stored))
    rig.put(ALICE, rig.rows(1, 2, namespace=rig.namespace(revision="c", engine="x")))
    rig.put(ALICE, rig.prompt(range(1000, 1008), namespace=wider))
    told = explain(rig, rig.rows(4, 1, namespace=rig.namespace(revision="b")))
    assert facts(told) == (0, 0, State.NEVER_STORED)
    seen = [(near.n_matching, near.n_blocks, near.differences) for near in told.namespaces]
    assert seen[0] == (4, 4, ["revision: 'b' != 'a'"])
    assert seen[1][:2] == (2, 2)
    assert "spec.block_tokens: 2 != 4" in seen[1][2]
    assert seen[2] == (0, 1, ["engine: '' != 'x'", "revision: 'b' != 'c'"])
    assert explain(rig, rig.rows(4, 1, namespace=stored)).namespaces == []


def test_other_salts_and_loras_of_the_namespace(rig: Rig) -> None:
    rig.put(ALICE, rig.rows(3, 1, salt="secret", lora="x"))
    rig.put(ALICE, rig.rows(2, 1, lora="y"))
    told = explain(rig, rig.rows(4, 1, lora="x"), other_salts=True)
    assert [replace(near).n_matching for near in told.roots] == [3, 2]
    assert [(near.salt_differs, near.lora_differs, near.lora) for near in told.roots] == [
        (True, False, "x"),
        (False, True, "y"),
    ]
    assert "secret" not in repr(told)


def test_what_is_stored_below_another_salt_changes_no_answer(rig: Rig) -> None:
    prompt = rig.rows(3, 1, salt="mine", lora="x")
    rig.put(ALICE, rig.rows(2, 1, salt="mine", lora="y"))
    before = explain(rig, prompt)
    assert [(near.salt_differs, near.lora) for near in before.roots] == [(False, "y")]
    for lora in ("x", "y"):
        rig.put(ALICE, rig.rows(3, 1, salt="secret", lora=lora))
    assert repr(explain(rig, prompt)) == repr(before)
    assert [near.salt_differs for near in explain(rig, prompt, other_salts=True).roots] == [True, False, True]


def test_nothing_of_another_tenant_is_told(rig: Rig) -> None:
    mine, theirs = rig.namespace(tenant="a"), rig.namespace(tenant="b")
    rig.put(ALICE, rig.rows(4, 1, namespace=theirs))
    rig.reserve(ALICE, rig.rows(2, 2, namespace=theirs))
    rig.put(ALICE, rig.rows(4, 3, namespace=theirs))
    rig.dram.free(rig.store.index.evict(3).slots)
    blank = explain(rig, rig.rows(4, 9, namespace=mine))
    for tag in (1, 2, 3):
        told = explain(rig, rig.rows(4, tag, namespace=mine))
        assert replace(told, found=blank.found) == blank
        assert told.found[1:-1] == blank.found[1:-1]
    assert blank.reason is State.NEVER_STORED
    assert (blank.namespaces, blank.roots) == ([], [])
    assert np.array_equal(blank.found.known, [])
    rig.store.forget_session(ALICE)
