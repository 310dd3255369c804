"""The polling selector finds what the plain one finds, and sleeps when nothing happens."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.config import DaemonConfig
from kvstore.server.polling import PollingSelector, new_loop


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_it_reports_what_is_ready(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    with PollingSelector(0.01) as selector:
        selector.register(left, selectors.EVENT_READ, "left")
        assert selector.select(0) == []
        for _ in range(3):  # the second and third time from within a burst
            right.send(b"x")
            ((key, events),) = selector.select(5)
            assert (key.data, events) == ("left", selectors.EVENT_READ)
            left.recv(1)
        assert selector.select(0.02) == []


class Watched(PollingSelector):
    """Tells whether it would poll next time."""

    @property
    def busy(self) -> bool:
        return self._busy


def test_it_polls_in_a_burst_only(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    with Watched(5.0) as selector:
        selector.register(left, selectors.EVENT_READ)
        right.send(b"x")
        selector.select(None)
        assert selector.busy
        left.recv(1)
    with Watched(1e-9) as selector:
        selector.register(left, selectors.EVENT_READ)
        right.send(b"x")
        selector.select(None)
        assert not selector.busy


def test_who_waits_for_the_core_gets_it_while_it_polls(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = pair
    yields: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(None))
    with PollingSelector(0.02) as selector:
        selector.register(left, selectors.EVENT_READ)
        right.send(b"x")
        selector.select(5)
        left.recv(1)
        assert not yields
        selector.select(0.05)
        assert yields


def test_a_timeout_is_kept_while_polling(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    with Watched(0.005) as selector:
        selector.register(left, selectors.EVENT_READ)
        right.send(b"x")
        selector.select(None)
        left.recv(1)
        assert selector.select(0.001) == []
        assert selector.select(0.02) == []
        assert not selector.busy


def test_polling_can_be_switched_off(config: DaemonConfig) -> None:
    with_polling, without = new_loop(config), new_loop(replace(config, poll_us=0.0))
    kinds = [type(getattr(loop, "_selector")) is PollingSelector for loop in (with_polling, without)]  # noqa: B009 - asyncio's own
    with_polling.close()
    without.close()
    assert kinds == [True, False]
