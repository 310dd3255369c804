"""The log of requests: what is kept of a lookup, for whom, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.hints import Hints
from kvstore.prefix_index.rows import RowPath
from kvstore.store import request_log
from kvstore.store.request_log import (
    AGAIN_S,
    IDLE_S,
    SLICE_BLOCKS,
    SLICE_BYTES,
    TENANT_NAMESPACES_MAX,
    RequestLog,
    Requests,
)
from kvstore.store.requests import Prompt
from kvstore.types import KVSpec
from tests.store.rig import KIB, Rig
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
    look(rig, rig.rows(8, 9))
    assert len(recorded(rig, 8, most=4).requests) == 1, "one at least"


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


def test_a_tenant_leaves_places_to_others(rig: Rig) -> None:
    for i in range(TENANT_NAMESPACES_MAX):
        watch(rig, revision=str(i))
    with pytest.raises(BadInputError, match="requests of 4 namespaces of tenant 'default' are recorded already"):
        watch(rig, revision="one more")
    watch(rig, tenant="other")
    rig.clock.advance(IDLE_S + 1)
    rig.store.tick()
    watch(rig, revision="one more")


def finish(rig: Rig) -> None:
    while rig.store.has_work:
        rig.store.pump()


def keyed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and bytes that keys are computed of, call by call."""
    calls: list[tuple[int, int]] = []
    chain = RowPath.chain

    def counted(self: RowPath, parent: bytes, first_row: int, end_row: int) -> NDArray[np.uint8]:
        calls.append((end_row - first_row, (end_row - first_row) * self.row_bytes))
        return chain(self, parent, first_row, end_row)

    monkeypatch.setattr(RowPath, "chain", counted)
    return calls


@pytest.mark.parametrize(("block_tokens", "n_rows"), [(1, 5 * SLICE_BLOCKS + 7), (4096, 100)])
def test_keys_of_a_long_prompt_are_computed_in_slices(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, block_tokens: int, n_rows: int
) -> None:
    space = rig.namespace(spec=KVSpec.opaque(block_tokens, 4 * KIB))
    rig.store.requests.watched(space, rig.clock.now_s())
    prompt = rig.prompt(np.arange(n_rows * block_tokens - (block_tokens > 1)).tolist(), space)
    whole = prompt.path.keys(prompt.root_key).view(np.uint64)[:, 0].copy()
    rig.put(ALICE, prompt, n_blocks=2)
    prompt = rig.prompt(np.arange(n_rows * block_tokens - (block_tokens > 1)).tolist(), space)
    calls = keyed(monkeypatch)
    rig.store.requests.note(BOB, prompt, rig.store.match(prompt).ids, rig.clock.now_s(), asks_again=False)
    look(rig, rig.rows(1, 7, namespace=space))
    steps = 1
    while rig.store.has_work:
        assert rig.store.requests.last_seq(space.ordinal) == 0
        rig.store.pump()
        steps += 1
    assert steps >= max(n_rows / SLICE_BLOCKS, n_rows * block_tokens * 4 / SLICE_BYTES)
    assert all(rows <= SLICE_BLOCKS and n_bytes <= SLICE_BYTES for rows, n_bytes in calls)
    first, second = rig.store.requests.after(space.ordinal, 0, 1 << 20).requests
    assert np.array_equal(first.keys, whole)
    assert (len(second.keys), second.n_tokens) == (1, block_tokens)


def test_rows_larger_than_a_slice_come_one_by_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "SLICE_BYTES", 4)
    watch(rig)
    calls = keyed(monkeypatch)
    prompt = rig.rows(5, 1)
    rig.store.requests.note(BOB, prompt, np.empty(0, np.intp), rig.clock.now_s(), asks_again=False)
    for n in range(1, 5):
        assert calls == [(1, 8)] * n
        assert rig.store.has_work
        rig.store.pump()
    assert not rig.store.has_work
    assert np.array_equal(recorded(rig).requests[0].keys, prompt.path.keys(prompt.root_key).view(np.uint64)[:, 0])


def test_what_is_too_long_is_lost_and_what_is_kept_holds_no_more_than_its_keys(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "REQUEST_BLOCKS_MAX", 10)
    watch(rig)
    for n_rows in (11, 10, 500, 1, 12):
        look(rig, rig.rows(n_rows, n_rows))
    came = recorded(rig)
    assert [len(each.keys) for each in came.requests] == [10, 1]
    assert (came.n_lost, came.next_seq, came.gap) == (3, 5, False)
    assert [each.keys.base for each in came.requests] == [None, None]
    one = rig.store.requests.after(rig.namespace().ordinal, 0, 1 << 20, 1)
    assert (len(one.requests), one.n_lost, one.next_seq) == (1, 1, 2)
    assert recorded(rig, 2) == Requests(came.requests[1:], 5, 2, gap=False)
    assert recorded(rig, 5) == Requests([], 5, 0, gap=False)


def test_requests_that_wait_for_their_keys_are_bounded_for_each_namespace(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "UNFINISHED_BYTES_MAX", 5 << 19)
    other = rig.namespace(revision="other")
    watch(rig)
    watch(rig, revision="other")
    for tag in range(4):
        look(rig, rig.rows(2000, tag))
    look(rig, rig.rows(1, 9, namespace=other))
    assert rig.store.requests.last_seq(rig.namespace().ordinal) == 2, "two are lost by now, and none is finished"
    finish(rig)
    came = recorded(rig)
    assert (len(came.requests), came.n_lost + came.next_seq) == (2, 2 + 4)
    assert len(rig.store.requests.after(other.ordinal, 0, 100).requests) == 1
    look(rig, rig.rows(2000, 5))
    finish(rig)
    assert len(recorded(rig, 4).requests) == 1, "there is room again"


def test_times_go_on_when_the_wall_clock_steps_back() -> None:
    rig = Rig()
    wall_s = [1e9]
    rig.store.requests = RequestLog(rig.store.index, lambda: wall_s[0])
    watch(rig)
    for tag in range(4):
        rig.clock.advance(60.0)
        wall_s[0] -= 3600
        look(rig, rig.rows(1, tag))
    assert [each.time_s for each in recorded(rig).requests] == [1e9 + 60, 1e9 + 120, 1e9 + 180, 1e9 + 240]
    rig.close()


def test_a_request_that_was_given_up_hides_no_later_one(rig: Rig) -> None:
    watch(rig)
    prompt, nothing = rig.rows(2, 1), np.empty(0, np.intp)

    def note(*, asks_again: bool) -> int:
        rig.store.requests.note(BOB, prompt, nothing, rig.clock.now_s(), asks_again=asks_again)
        return rig.store.requests.last_seq(rig.namespace().ordinal)

    assert note(asks_again=True) == 1
    rig.clock.advance(AGAIN_S / 2)
    assert note(asks_again=True) == 1
    rig.clock.advance(AGAIN_S + 1)
    assert note(asks_again=False) == 2


def test_a_session_below_another_root_is_another_one(rig: Rig) -> None:
    watch(rig)
    for salt in ("", "x", ""):
        look(rig, rig.prompt([1, 2], salt=salt)._replace(hints=Hints(session_id="s")))
    first, other, again = (each.session for each in recorded(rig).requests)
    assert first == again != other
