"""The log of requests: what is kept of a lookup, for whom, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.errors import BadInputError
from kvstore.hints import Hints
from kvstore.store import request_log
from kvstore.store.request_log import IDLE_S, Requests
from kvstore.store.requests import Prompt
from tests.store.rig import Rig
from tests.store.two_tier import TwoTierRig

ALICE, BOB = 1, 2


def look(rig: Rig, prompt: Prompt, session: int = BOB) -> None:
    rig.store.release(session, rig.store.lease(session, prompt).id)


def recorded(rig: Rig, seq: int = 0, most: int = 1 << 20) -> Requests:
    return rig.store.requests.after(rig.namespace().ordinal, seq, most)


def watch(rig: Rig, **more: Any) -> None:
    rig.store.requests.watched(rig.namespace(**more), rig.clock.now_s())


def test_keys_stand_for_what_comes_before_whether_it_is_stored_or_not(rig: Rig) -> None:
    watch(rig)
    prompt = rig.prompt([1, 2, 3, 4, 5])._replace(n_prompt_tokens=4)
    look(rig, prompt)
    rig.put(ALICE, prompt)
    look(rig, prompt)
    look(rig, rig.prompt([1, 2, 3, 9]))
    look(rig, rig.prompt([1, 2, 3, 4], salt="x"))
    first, again, other, salted = recorded(rig).requests
    assert np.array_equal(first.keys, again.keys)
    assert (len(first.keys), first.n_tokens, first.n_output) == (3, 5, 1)
    assert (other.keys[:1] == first.keys[:1]).all()
    assert other.keys[1] != first.keys[1]
    assert not np.isin(salted.keys, first.keys).any()
    assert np.array_equal(first.keys, prompt.path.keys(prompt.root_key).view(np.uint64)[:, 0])


def test_what_the_caller_said_and_no_session_id(rig: Rig) -> None:
    watch(rig)
    for session_id in ("a", "b", "a", ""):
        look(rig, rig.rows(1, 1)._replace(hints=Hints(request_type="chat", turn=3, session_id=session_id)))
    found = recorded(rig).requests
    assert [(each.request_type, each.turn) for each in found] == [("chat", 3)] * 4
    assert found[0].session == found[2].session != found[1].session
    assert 0 not in (found[0].session, found[1].session)
    assert found[3].session == 0


def test_nothing_is_kept_of_what_nobody_asks_for(rig: Rig) -> None:
    look(rig, rig.rows(1, 1))
    watch(rig)
    look(rig, rig.rows(1, 2, namespace=rig.namespace(revision="other")))
    assert recorded(rig) == Requests([], 0, 0, gap=False)
    look(rig, rig.rows(1, 3))
    assert recorded(rig).next_seq == 1
    rig.clock.advance(IDLE_S + 1)
    rig.store.tick()
    look(rig, rig.rows(1, 4))
    watch(rig)
    look(rig, rig.rows(1, 5))
    came = recorded(rig, 1)
    assert came.gap
    assert len(came.requests) == 1


def test_too_many_are_lost_and_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "BLOCKS_MAX", 10)
    watch(rig)
    for tag in range(8):
        look(rig, rig.rows(2, tag))
    came = recorded(rig)
    assert (came.n_lost, len(came.requests), came.next_seq, came.gap) == (3, 5, 8, False)
    parts = [recorded(rig, seq, most=4) for seq in (0, 5, 7, 8)]
    assert [(part.n_lost, len(part.requests), part.next_seq) for part in parts] == [
        (3, 2, 5),
        (0, 2, 7),
        (0, 1, 8),
        (0, 0, 8),
    ]
    look(rig, rig.rows(30, 9))
    assert len(recorded(rig, 8, most=4).requests) == 1


def test_a_request_that_waits_for_its_blocks_counts_once(two_tiers: Callable[..., TwoTierRig]) -> None:
    rig = two_tiers()
    prompt = rig.rows(3, 1)
    rig.put(ALICE, prompt)
    rig.settle()
    rig.dram.free(rig.store.index.evict(2).slots)
    watch(rig)
    for _ in range(2):
        look(rig, prompt)
    load = rig.store.begin_load(prompt)
    assert load is not None
    rig.settle()
    lease = rig.store.lease(BOB, prompt, load=load)
    rig.store.end_load(load)
    assert lease.n_blocks == 3
    assert len(recorded(rig).requests) == 1
    look(rig, prompt)
    look(rig, prompt, ALICE)
    assert len(recorded(rig).requests) == 3


def test_not_too_many_namespaces_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "NAMESPACES_MAX", 2)
    watch(rig, revision="1")
    watch(rig, revision="2")
    watch(rig, revision="1")
    with pytest.raises(BadInputError, match="requests of 2 namespaces are recorded already"):
        watch(rig, revision="3")
