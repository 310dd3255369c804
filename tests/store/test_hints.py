"""Hints: recorded per block, lives that end, sessions that end, and nothing kept where nobody says anything."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvstore.hints import Hints
from kvstore.prefix_index import hint_columns
from kvstore.store.requests import Prompt
from tests.store.families import KIB, Family
from tests.store.hybrid_rig import LAYOUTS, HybridRig
from tests.store.rig import Rig
from tests.store.two_tier import TwoTierRig

ALICE, BOB = 1, 2


def hinted(rig: Rig, n_rows: int, tag: int, **hints: Any) -> Prompt:
    return rig.rows(n_rows, tag=tag)._replace(hints=Hints(**hints))


def known(rig: Rig, prompt: Prompt) -> list[dict[str, Any]]:
    ids = rig.store.index.match(prompt.root_key, prompt.path).ids
    return [rig.store.index.hints.of(block, rig.clock.now_s()) for block in ids.tolist()]


def free(rig: Rig, n: int) -> Any:
    evicted = rig.store.index.evict(n)
    rig.dram.free(evicted.slots)
    return evicted


# Records ------------------------------------------------------------------------------------------


def test_nothing_is_kept_before_the_first_hint(rig: Rig) -> None:
    prompt = rig.rows(3, tag=1)
    rig.put(ALICE, prompt)
    lease = rig.store.lease(BOB, prompt)
    rig.store.release(BOB, lease.id)
    assert known(rig, prompt) == [{}] * 3
    assert len(rig.store.index.hints.generation) == 0
    assert rig.count("hinted_requests") == 0


def test_what_a_request_says_is_known_of_the_blocks_it_uses(rig: Rig) -> None:
    said = {"request_type": "chat", "turn": 3, "session_id": "s", "expected_reuse": 2.5, "priority": -7}
    prompt = hinted(rig, 3, 1, **said)
    rig.put(ALICE, prompt)
    assert known(rig, prompt) == [said] * 3
    lease = rig.store.lease(BOB, prompt._replace(hints=Hints(turn=4, session_id="s")), max_blocks=2)
    rig.store.release(BOB, lease.id)
    assert [each["turn"] for each in known(rig, prompt)] == [4, 4, 3]
    assert {each["request_type"] for each in known(rig, prompt)} == {"chat"}, "what is not said stays"
    rig.store.lease(BOB, prompt._replace(hints=Hints(no_reuse=True)))
    assert all(each["no_reuse"] for each in known(rig, prompt))
    assert rig.count("hinted_requests") == 3


def test_a_record_does_not_outlive_its_block(rig: Rig) -> None:
    prompt = hinted(rig, 4, 1, turn=9, ttl_s=50.0)
    rig.put(ALICE, prompt)
    free(rig, 4)
    other = rig.rows(4, tag=2)
    rig.put(ALICE, other)
    ids = rig.store.index.match(other.root_key, other.path).ids
    assert (rig.store.index.table.generation[ids] == 2).all(), "the ids are used again"
    assert known(rig, other) == [{}] * 4
    rig.clock.advance(60.0)
    assert rig.store.lease(BOB, other).n_blocks == 4


def test_a_family_says_it_of_all_its_shards(make_rig: Any) -> None:
    rig = make_rig(capacity_bytes=512 * KIB)
    family = Family(rig)
    prompt = family.rows(3, tag=1)
    family.put(prompt)
    said = prompt._replace(shards=tuple(shard._replace(hints=Hints(turn=2)) for shard in prompt.shards))
    rig.store.family_lease(BOB, said)
    for shard in prompt.shards:
        assert known(rig, shard) == [{"turn": 2}] * 3


def test_tables_that_grow_keep_what_was_said(make_rig: Any) -> None:
    rig = make_rig(capacity_bytes=1024 * KIB)  # its block table begins with 64
    first = hinted(rig, 10, 1, turn=1)
    rig.put(ALICE, first)
    rig.put(ALICE, rig.rows(100, tag=2))
    last = hinted(rig, 20, 3, turn=3)
    rig.put(ALICE, last)
    assert known(rig, first) == [{"turn": 1}] * 10
    assert known(rig, last) == [{"turn": 3}] * 20


# Lives --------------------------------------------------------------------------------------------


def test_blocks_are_misses_when_their_time_is_over_and_go_first(rig: Rig) -> None:
    old = rig.rows(3, tag=1)
    rig.put(ALICE, old)
    brief = hinted(rig, 4, 2, ttl_s=10.0)
    rig.put(ALICE, brief)
    assert rig.store.match(brief).n_tokens == 8
    rig.clock.advance(9.9)
    assert rig.store.lease(BOB, brief._replace(hints=None)).n_blocks == 4
    rig.store.forget_session(BOB)
    rig.clock.advance(0.2)
    assert rig.store.match(brief).n_tokens == 0
    assert rig.store.lease(BOB, brief).id == 0
    assert rig.store.pin(BOB, brief).id == 0
    rig.store.tick()
    assert rig.count("overdue_blocks") == 4
    rig.store.tick()
    assert rig.count("overdue_blocks") == 4, "each is counted once"
    evicted = free(rig, 4)
    assert rig.found(brief) == 0, "they went before what was used longer ago"
    assert len(evicted.ids) == 4
    assert rig.store.lease(BOB, old).n_blocks == 3


def test_a_partly_matching_block_ends_with_its_time_too(rig: Rig) -> None:
    rig.put(ALICE, hinted(rig, 2, 1, ttl_s=5.0))
    partly = rig.prompt([1000, 1001, 1002])
    assert rig.store.match(partly).n_tokens == 3
    rig.clock.advance(6.0)
    assert rig.store.match(partly).n_tokens == 0


def test_stored_again_they_are_found_again_without_being_written_again(rig: Rig) -> None:
    brief = hinted(rig, 3, 1, ttl_s=5.0)
    rig.put(ALICE, brief)
    rig.clock.advance(6.0)
    rig.store.tick()
    assert rig.store.match(brief).n_tokens == 0
    assert rig.put(ALICE, brief).n_committed == 0
    assert rig.store.match(brief).n_tokens == 6
    rig.clock.advance(4.0)
    lease = rig.store.lease(BOB, brief._replace(hints=None))
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(brief, 3)
    rig.store.release(BOB, lease.id)
    rig.clock.advance(2.0)
    assert rig.store.match(brief).n_tokens == 0


@pytest.mark.parametrize("why", ["generated tokens", "no room", "aborted"])
def test_what_is_answered_as_present_is_found_again_whatever_becomes_of_the_rest(rig: Rig, why: str) -> None:
    rig.put(ALICE, hinted(rig, 4, 1, ttl_s=5.0))
    if why == "no room":
        rig.store.pin(BOB, rig.rows(4, tag=1), 90.0)
        rig.reserve(ALICE, rig.rows(32, tag=2), ttl_s=90.0)
    rig.clock.advance(6.0)
    rig.store.tick()
    assert rig.store.match(rig.rows(6, tag=1)).n_tokens == 0
    longer = hinted(rig, 6, 1, turn=2)
    if why == "generated tokens":
        longer = longer._replace(n_prompt_tokens=8, prompt_only=True)
    reservation = rig.reserve(ALICE, longer)
    assert (reservation.n_present, len(reservation.slots)) == (4, 2 if why == "aborted" else 0)
    rig.store.abort(ALICE, reservation.id)
    assert rig.store.match(longer).n_tokens == 8
    assert known(rig, longer) == [{"turn": 2}] * 4
    assert rig.count("hinted_requests") == 2


def test_a_request_with_hints_counts_once_also_if_some_blocks_are_there(rig: Rig) -> None:
    rig.put(ALICE, rig.rows(2, tag=1))
    assert rig.put(ALICE, hinted(rig, 4, 1, turn=1)).n_committed == 2
    assert rig.put(ALICE, hinted(rig, 4, 1, turn=1)).n_committed == 0
    assert rig.count("hinted_requests") == 2


def test_a_short_last_block_that_is_there_is_found_again_too(rig: Rig) -> None:
    brief = rig.prompt([1, 2, 3])._replace(hints=Hints(ttl_s=5.0))
    rig.put(ALICE, brief)
    rig.clock.advance(6.0)
    assert rig.store.match(brief).n_tokens == 0
    assert rig.reserve(ALICE, brief).n_present == 2
    assert rig.store.match(brief).n_tokens == 3


def test_parts_that_are_stored_keep_their_blocks_alive(make_rig: Any) -> None:
    """Those that are there already as well as new ones; and the session that they are of stays one."""
    rig = make_rig(capacity_bytes=512 * KIB)
    it, layout, tokens = HybridRig(rig), LAYOUTS[1], tuple(range(4))
    brief = it.prompt(layout, tokens)._replace(hints=Hints(ttl_s=5.0, session_id="s"))
    window = brief._replace(part=1)
    for asked in (brief, window, window):
        reservation = rig.reserve(ALICE, asked, 0, 2)
        if len(reservation.slots):
            rig.map_regions(ALICE, reservation.slots, writable=True)
            rig.store.commit(ALICE, reservation.id)
        assert rig.store.match(brief).n_tokens == (0 if asked is brief else 4)
        rig.clock.advance(6.0)
        assert rig.store.match(brief).n_tokens == 0
    assert rig.count("hinted_requests") == 1
    assert rig.store.end_session(brief.root_key, "s") == 2


def test_only_what_was_asked_for_is_stored_again(rig: Rig) -> None:
    brief = hinted(rig, 4, 1, ttl_s=5.0)
    rig.put(ALICE, brief)
    rig.clock.advance(6.0)
    assert rig.reserve(ALICE, brief._replace(hints=None), 0, 2).n_present == 2
    rig.clock.advance(60.0)
    assert rig.store.match(brief).n_tokens == 4


@pytest.mark.parametrize("second", [{}, {"ttl_s": 100.0}, None])
def test_the_longest_life_that_anybody_wants_counts(rig: Rig, second: dict[str, Any] | None) -> None:
    brief = hinted(rig, 3, 1, ttl_s=5.0)
    rig.put(ALICE, brief)
    longer = brief._replace(hints=None if second is None else Hints(**second))
    rig.put(BOB, longer)
    rig.put(ALICE, brief)
    rig.clock.advance(50.0)
    assert rig.store.match(brief).n_tokens == 6
    rig.clock.advance(100.0)
    assert rig.store.match(brief).n_tokens == (0 if second else 6)


def test_what_goes_on_keeps_its_head_alive(rig: Rig) -> None:
    """A block is found only with its ancestors: they live as long as it."""
    rig.put(ALICE, hinted(rig, 2, 1, ttl_s=5.0))
    rig.put(BOB, hinted(rig, 4, 1, ttl_s=50.0))
    rig.clock.advance(10.0)
    assert rig.store.match(rig.rows(4, tag=1)).n_tokens == 8
    rig.put(ALICE, rig.rows(5, tag=1))
    rig.clock.advance(100.0)
    assert rig.store.match(rig.rows(5, tag=1)).n_tokens == 10


def test_a_lease_makes_a_life_longer_but_none_begin(rig: Rig) -> None:
    brief, plain = hinted(rig, 2, 1, ttl_s=5.0), rig.rows(2, tag=2)
    rig.put(ALICE, brief)
    rig.put(ALICE, plain)
    for prompt in (brief, plain):
        for ttl_s in (20.0, 1.0):
            lease = rig.store.lease(BOB, prompt._replace(hints=Hints(ttl_s=ttl_s)))
            rig.store.release(BOB, lease.id)
    rig.clock.advance(10.0)
    assert [rig.store.match(prompt).n_tokens for prompt in (brief, plain)] == [4, 4]
    rig.clock.advance(11.0)
    assert [rig.store.match(prompt).n_tokens for prompt in (brief, plain)] == [0, 4]


def test_a_leased_block_is_read_to_the_end_of_its_lease(rig: Rig) -> None:
    brief = hinted(rig, 2, 1, ttl_s=5.0)
    rig.put(ALICE, brief)
    lease = rig.store.lease(BOB, brief)
    rig.clock.advance(6.0)
    rig.store.tick()
    assert not len(free(rig, 10).ids)
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(brief, 2)


def test_lives_in_both_tiers_and_after_a_restart(tmp_path: Any) -> None:
    rig = TwoTierRig(tmp_path / "nvme")
    brief, plain = hinted(rig, 4, 1, ttl_s=5.0), rig.rows(4, tag=2)
    rig.put(ALICE, plain)
    rig.put(ALICE, brief)
    rig.settle()
    free(rig, 100)
    assert rig.store.match(brief).n_tokens == 8, "on NVMe"
    rig.clock.advance(6.0)
    rig.store.tick()
    assert rig.store.match(brief).n_tokens == 0
    assert rig.store.begin_load(brief) is None
    assert rig.store.begin_persist(brief) is None
    gone = rig.store.index.evict_nvme(4)
    rig.nvme.free(gone.slots)
    assert (rig.found(brief), rig.found(plain)) == (0, 4), "those go first from NVMe too"
    rig.put(ALICE, brief)  # a new life on an id that had one
    rig.settle()
    rig.store.forget_session(ALICE)
    after = rig.killed()
    assert [after.store.match(after.rows(4, tag=tag)).n_tokens for tag in (1, 2)] == [8, 8]
    after.clock.advance(6.0)
    assert [after.store.match(after.rows(4, tag=tag)).n_tokens for tag in (1, 2)] == [0, 8]
    after.store.tick()
    assert after.count("overdue_blocks") == 4, "those go first"
    after.close()


def test_a_block_that_nobody_limited_stays_unlimited_when_it_comes_back_to_dram(tmp_path: Any) -> None:
    rig = TwoTierRig(tmp_path / "nvme")
    prompt = rig.rows(3, tag=1)
    rig.put(ALICE, prompt)
    rig.settle()
    free(rig, 100)
    assert rig.put(ALICE, prompt._replace(hints=Hints(ttl_s=1.0))).n_committed in (0, 3)
    rig.clock.advance(5.0)
    assert rig.store.match(prompt).n_tokens == 6
    rig.settle()
    rig.store.forget_session(ALICE)
    rig.close()


def test_lives_against_a_plain_dictionary(make_rig: Any) -> None:
    """Random puts with and without lives: what is found is what a dictionary of ends says."""
    for seed in range(15):
        rig, dice = make_rig(capacity_bytes=2048 * KIB), random.Random(seed)
        ends: dict[tuple[int, ...], float] = {}
        for _ in range(60):
            tokens = [dice.randrange(2) for _ in range(2 * dice.randrange(1, 6))]
            prompt = rig.prompt(tokens)
            paths = [tuple(tokens[:end]) for end in range(2, len(tokens) + 1, 2)]
            now_s = rig.clock.now_s()
            if dice.random() < 0.6:
                ttl_s = dice.choice([0.0, 0.0, 3.0, 8.0, 30.0])
                hints = Hints(ttl_s=ttl_s) if ttl_s or dice.random() < 0.5 else None
                rig.put(ALICE, prompt._replace(hints=hints))
                end_s = now_s + ttl_s if ttl_s else np.inf
                for path in paths:
                    ends[path] = max(ends.get(path, 0.0), end_s)
            n = 0
            for path in paths:
                if ends.get(path, 0.0) <= now_s:
                    break
                n += 1
            assert len(rig.store.match(prompt).ids) == n
            rig.clock.advance(dice.choice([0.0, 1.0, 2.5]))
            rig.store.tick()


# Sessions -----------------------------------------------------------------------------------------


def test_what_only_an_ended_session_has_used_goes_first(rig: Rig) -> None:
    shared = rig.rows(2, tag=1)
    rig.put(ALICE, shared)
    others = rig.rows(2, tag=2)
    rig.put(ALICE, others)
    mine = hinted(rig, 6, 1, session_id="s")  # goes on from what others have stored
    rig.put(ALICE, mine)
    assert rig.store.end_session(mine.root_key, "s") == 4
    assert rig.store.end_session(mine.root_key, "s") == 0
    free(rig, 4)
    assert (rig.found(mine), rig.found(others)) == (2, 2)


@pytest.mark.parametrize("how", ["another session", "no session", "no hints"])
def test_what_somebody_else_has_used_since_is_not_the_sessions_own(rig: Rig, how: str) -> None:
    mine = hinted(rig, 4, 1, session_id="s")
    rig.put(ALICE, mine)
    rig.clock.advance(1.0)
    hints = {"another session": Hints(session_id="t"), "no session": Hints(turn=1), "no hints": None}[how]
    lease = rig.store.lease(BOB, rig.rows(4, tag=1)._replace(hints=hints), max_blocks=3)
    rig.store.release(BOB, lease.id)
    assert rig.store.end_session(mine.root_key, "s") == 1


def test_a_session_is_one_namespaces(rig: Rig) -> None:
    other = rig.namespace(revision="2")
    rig.put(ALICE, hinted(rig, 2, 1, session_id="s"))
    rig.put(ALICE, rig.rows(3, tag=1, namespace=other)._replace(hints=Hints(session_id="s")))
    assert rig.store.end_session(other.root_key("", ""), "s") == 3
    assert rig.store.end_session(rig.namespace().root_key("", ""), "s") == 2


def test_a_session_is_one_roots(rig: Rig) -> None:
    secret = rig.prompt([1, 2, 3, 4], salt="secret")._replace(hints=Hints(session_id="s"))
    rig.put(ALICE, secret)
    rig.put(ALICE, rig.prompt([1, 2])._replace(hints=Hints(session_id="s")))
    space = rig.namespace()
    assert rig.store.end_session(space.root_key("", ""), "s") == 1
    assert rig.store.end_session(space.root_key("", "lora"), "s") == 0
    assert known(rig, secret) == [{"session_id": "s"}] * 2
    assert rig.store.end_session(space.root_key("secret", ""), "s") == 2


def test_sessions_and_kinds_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint_columns, "SESSIONS_MAX", 3)
    monkeypatch.setattr(hint_columns, "REQUEST_TYPES_MAX", 2)
    prompts = [hinted(rig, 1, i, session_id=f"s{i}", request_type=f"t{i}") for i in range(1, 6)]
    for prompt in prompts:
        rig.put(ALICE, prompt)
    assert [rig.store.end_session(rig.namespace().root_key("", ""), f"s{i}") for i in range(1, 6)] == [0, 0, 1, 1, 1]
    assert [each.get("request_type", "") for prompt in prompts for each in known(rig, prompt)] == [
        "t1",
        "t2",
        "",
        "",
        "",
    ]
