"""Threads that help with batches: never more than were asked for, gone when told, and not needed."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from kvstore.tiers.nvme.helpers import Helpers

WAIT_S = 20.0


def threads_of(helpers: Helpers) -> list[threading.Thread]:
    return list(helpers._crew.threads)


def test_as_many_work_at_once_as_there_may_be() -> None:
    helpers, together = Helpers(3), threading.Barrier(3)
    futures = [helpers.submit(lambda: bool(together.wait(WAIT_S))) for _ in range(9)]  # type: ignore[arg-type]
    for future in futures:
        future.result(WAIT_S)
    threads = threads_of(helpers)
    assert [thread.is_alive() for thread in threads] == [True] * 3
    helpers.rest()
    assert [thread.is_alive() for thread in threads] == [False] * 3


def test_what_has_not_begun_can_be_cancelled() -> None:
    helpers, go, began = Helpers(1), threading.Event(), threading.Event()
    done: list[int] = []

    def hold() -> None:
        began.set()
        go.wait(WAIT_S)

    first, second = helpers.submit(hold), helpers.submit(lambda: done.append(2))
    assert began.wait(WAIT_S)
    assert second.cancel()
    assert not first.cancel()
    go.set()
    first.result(WAIT_S)
    helpers.rest()
    assert done == []


def test_what_work_raises_its_future_raises_and_the_thread_goes_on() -> None:
    helpers = Helpers(1)
    failed = helpers.submit(lambda: [][0])
    with pytest.raises(IndexError):
        failed.result(WAIT_S)
    done: list[int] = []
    helpers.submit(lambda: done.append(1)).result(WAIT_S)
    assert done == [1]
    helpers.rest()


def test_they_come_back_after_a_rest() -> None:
    helpers, done = Helpers(2), list[int]()
    for turn in range(3):
        helpers.submit(lambda turn=turn: done.append(turn)).result(WAIT_S)  # type: ignore[misc]
        (thread,) = threads_of(helpers)
        helpers.rest()
        assert not thread.is_alive()
    assert done == [0, 1, 2]


def test_they_end_with_whom_they_help() -> None:
    helpers = Helpers(1)
    helpers.submit(lambda: None).result(WAIT_S)
    (thread,) = threads_of(helpers)
    del helpers
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_without_threads_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a program none can be started: whoever moves the batch does it alone."""

    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    helpers = Helpers(2)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    future = helpers.submit(lambda: None)
    assert future.cancel()
    helpers.rest()
