"""Watching through a real daemon: order, tenants, waiting, losses and restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.client.watching import BlockEvent, EventsLost
from kvstore.errors import BadInputError, UnavailableError
from kvstore.store import events
from kvstore.types import KVSpec, Namespace, Shard

BLOCK_BYTES = 4096
DaemonFactory = Callable[..., Any]


def namespace(tenant: str = "default") -> Namespace:
    return Namespace(model="m", spec=KVSpec.opaque(4, BLOCK_BYTES), tenant=tenant)


def put(client: Client, n: int, tag: int = 0, tenant: str = "default") -> None:
    blocks = np.zeros((n, BLOCK_BYTES), np.uint8)
    client.open(namespace(tenant)).put([tag * 1000 + i for i in range(4 * n)], blocks)


def events_of(seen: list[BlockEvent | EventsLost]) -> list[BlockEvent]:
    assert all(isinstance(each, BlockEvent) for each in seen)
    return [each for each in seen if isinstance(each, BlockEvent)]


def test_blocks_are_told_from_the_moment_of_the_call_on(client: Client) -> None:
    put(client, 1, tag=1)
    watch = client.watch()
    put(client, 3, tag=2)
    seen = events_of(watch.poll())
    assert [(each.kind, each.tier, each.n_tokens) for each in seen] == [("stored", "dram", 4)] * 3
    assert [each.seq for each in seen] == list(range(seen[0].seq, seen[0].seq + 3))
    assert [each.parent for each in seen[1:]] == [each.key for each in seen[:-1]]
    assert {each.namespace for each in seen} == {namespace().digest()}
    assert [each.key for each in seen] == [
        key.tobytes() for key in client.open(namespace()).inspect([2000 + i for i in range(12)]).keys
    ]
    assert watch.poll() == []
    client.clear(everything=True)
    removed = events_of(watch.poll())
    assert {(each.kind, each.reason, each.last, each.parent, each.n_tokens) for each in removed} == {
        ("removed", "cleared", True, b"", 0)
    }
    assert len(removed) == 4


def test_who_waits_is_woken_by_an_event_while_others_go_on(client: Client) -> None:
    watch = client.watch()
    seen: list[BlockEvent | EventsLost] = []
    waiting = threading.Thread(target=lambda: seen.append(next(watch)))
    waiting.start()
    put(client, 1)
    waiting.join(10.0)
    assert not waiting.is_alive()
    assert [each.kind for each in events_of(seen)] == ["stored"]


def test_a_wait_without_an_event_ends_with_nothing(client: Client) -> None:
    assert client.watch().poll(0.05) == []


def test_a_tenant_is_told_of_its_own_blocks_only(daemon: Any) -> None:
    path = daemon.config.socket_path
    with Client(path, timeout_s=5.0) as mine, Client(path, tenant="other", timeout_s=5.0) as theirs:
        watch, all_of_them = mine.watch(), mine.watch(all_tenants=True)
        put(theirs, 2, tenant="other")
        assert watch.poll(0.05) == []
        put(mine, 1)
        assert {each.namespace for each in events_of(watch.poll())} == {namespace().digest()}
        assert {each.namespace for each in events_of(all_of_them.poll())} == {
            namespace().digest(),
            namespace("other").digest(),
        }


def test_who_comes_back_goes_on_where_it_was(client: Client) -> None:
    watch = client.watch()
    put(client, 2)
    assert len(watch.poll()) == 2
    put(client, 2, tag=1)
    again = client.watch(watch.seq)
    assert [each.seq for each in events_of(again.poll())] == [watch.seq + 1, watch.seq + 2]


def test_who_falls_behind_is_told(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVENTS_MAX", 4)
    watch = client.watch()
    for tag in range(5):
        put(client, 2, tag)
    seen = watch.poll()
    assert seen[0] == EventsLost(6)
    assert len(events_of(seen[1:])) == 4


def test_numbers_of_another_daemon_are_a_gap(start_daemon: DaemonFactory) -> None:
    first = start_daemon()
    with Client(first.config.socket_path, timeout_s=5.0) as client:
        watch = client.watch()
        put(client, 3)
        assert len(watch.poll()) == 3
        first.stop()
        with pytest.raises(UnavailableError):
            watch.poll()
        second = start_daemon()
        assert client.wait_healthy(10.0)
        put(client, 1)
        seen = watch.poll()
        assert seen[0] == EventsLost(None)
        put(client, 1, tag=1)
        assert len(events_of(watch.poll())) == 1
        second.stop()


def test_a_hang_up_ends_the_wait(daemon: Any, wait_until: Callable[..., None]) -> None:
    path = daemon.config.socket_path
    with Client(path, timeout_s=5.0) as client:
        watch = client.watch()
        failed: list[Exception] = []

        def wait() -> None:
            try:
                next(watch)
            except UnavailableError as error:
                failed.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(lambda: daemon.call(lambda running: bool(running.store.events._waiting)), "the daemon waits")
    waiting.join(10.0)
    assert not waiting.is_alive()
    assert failed
    wait_until(lambda: not daemon.call(lambda running: running.store.events._waiting), "nobody waits any more")


@pytest.mark.parametrize("after", [-1, 1 << 64, "x"])
def test_a_number_that_can_not_be_one_is_refused(client: Client, after: Any) -> None:
    with pytest.raises(BadInputError, match="after_seq"):
        client.watch(after)


def test_events_of_some_kinds_and_namespaces_only(client: Client) -> None:
    other = Namespace(model="n", spec=KVSpec.opaque(4, BLOCK_BYTES), shard=Shard(tp_rank=1, tp_size=2))
    client.open(other, "second")
    by_kind, by_model = client.watch(kinds=["removed"]), client.watch(model="n")
    by_name, by_rank, by_digest = (
        client.watch(name="second"),
        client.watch(tp_rank=1),
        client.watch(digest_prefix="f" * 9),
    )
    put(client, 2)
    client.open(other).put(list(range(4)), np.zeros((1, BLOCK_BYTES), np.uint8))
    for watch in (by_model, by_name, by_rank):
        assert [each.namespace for each in events_of(watch.poll())] == [other.digest()]
    assert by_kind.poll() == by_digest.poll() == []
    assert by_kind.seq == by_model.seq, "what was left out is not looked at again"
    client.clear(everything=True)
    assert [each.kind for each in events_of(by_kind.poll())] == ["removed"] * 3


def test_who_waits_for_some_events_is_not_woken_by_others(client: Client) -> None:
    put(client, 1)
    watch = client.watch(kinds=["removed"])
    seen: list[BlockEvent | EventsLost] = []
    waiting = threading.Thread(target=lambda: seen.append(next(watch)))
    waiting.start()
    put(client, 2, tag=1)
    assert not seen
    client.clear(everything=True)
    waiting.join(10.0)
    assert [each.kind for each in events_of(seen)] == ["removed"]


def test_kinds_that_there_are_not(client: Client) -> None:
    with pytest.raises(BadInputError, match="no events of kind 'moves'; give stored, moved, removed"):
        client.watch(kinds=["stored", "moves"])
    with pytest.raises(BadInputError, match="give several texts"):
        client.watch(kinds="stored")
    with pytest.raises(BadInputError, match="tp_rank is -1"):
        client.watch(tp_rank=-1)
