"""A caller looks for its reply before it sleeps, as long as that is worth it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvstore.client import transport
from kvstore.client.transport import VAIN_MAX, TimedOutError, Transport
from kvstore.wire.framing import Method


@dataclass
class Pair:
    """An address that is one end of a pair of sockets; the test has the other."""

    spins: bool = True
    ends: list[socket.socket] = field(default_factory=list)

    def connect(self, timeout_s: float) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout_s)
        self.ends = [ours, theirs]
        return ours


class Poller:
    """The transport's own, counting; what is to be read comes as the script says."""

    def __init__(self, theirs: socket.socket, inner: object) -> None:
        self.looks = self.sleeps = 0
        self.after_looks: int | None = None
        """The reply is there after so many looks; None: only to who sleeps."""
        self._theirs, self._inner = theirs, inner

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        if timeout_ms:
            self.sleeps += 1
            self._theirs.send(b"x")
        else:
            self.looks += 1
            if self.after_looks is not None and self.looks > self.after_looks:
                self._theirs.send(b"x")
        ready: list[tuple[int, int]] = self._inner.poll(timeout_ms)  # type: ignore[attr-defined]
        return ready


class Caller:
    """A transport, and one wait after another on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
        # Long enough that a stall of this machine is no look in vain.
        monkeypatch.setattr(transport, "SPIN_S", 0.002)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        self.preempted = 0
        monkeypatch.setattr(transport, "times_preempted", lambda: self.preempted)
        self.transport = Transport(pair, 5.0)
        self.poller = Poller(pair.ends[1], self.transport._poller)
        self.transport._poller = self.poller  # type: ignore[assignment]

    def wait(self, *, reply_after_looks: int | None) -> tuple[int, int]:
        """Looks and sleeps of one wait."""
        self.poller.looks = self.poller.sleeps = 0
        self.poller.after_looks = reply_after_looks
        self.transport._wait_readable(time.monotonic() + 5.0)
        self.transport._sock.recv(64)
        return self.poller.looks, self.poller.sleeps


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for end in made.ends:
        end.close()


def test_a_reply_that_comes_at_once_is_seen_without_sleeping(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    caller = Caller(monkeypatch, pair)
    for _ in range(20):
        assert caller.wait(reply_after_looks=1) == (2, 0)


def test_looks_in_vain_make_the_next_ones_rarer(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    caller = Caller(monkeypatch, pair)
    gaps: list[int] = []
    asleep = 0
    while len(gaps) < VAIN_MAX + 2:
        looks, sleeps = caller.wait(reply_after_looks=None)
        assert sleeps == 1
        if looks == 1:  # whether it is there already; no more
            asleep += 1
        else:
            gaps.append(asleep)
            asleep = 0
    assert gaps == [0, *((1 << k) - 1 for k in range(1, VAIN_MAX + 1)), (1 << VAIN_MAX) - 1]


def test_a_look_that_is_worth_it_ends_that(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    caller = Caller(monkeypatch, pair)
    while caller.transport._looks[caller.transport._awaited].n_vain < 3:
        caller.wait(reply_after_looks=None)
    waits = [caller.wait(reply_after_looks=1) for _ in range(12)]
    assert waits == [(1, 1)] * 7 + [(2, 0)] * 5


def test_who_loses_its_core_looks_rarely_even_if_looks_are_worth_it(
    monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    monkeypatch.setattr(transport, "CROWDED_MAX", 3)
    monkeypatch.setattr(transport, "GOOD_ENOUGH", 5)
    caller = Caller(monkeypatch, pair)

    def asleep_after_preemption() -> int:
        caller.preempted += 1
        asleep = 0
        while caller.wait(reply_after_looks=1) == (1, 1):
            asleep += 1
        return asleep

    assert caller.wait(reply_after_looks=1) == (2, 0)
    assert [asleep_after_preemption() for _ in range(4)] == [2, 4, 8, 8]  # it sleeps for this reply, and 2**k - 1 more
    for _ in range(4):  # with the last one above five good ones in a row
        assert caller.wait(reply_after_looks=1) == (2, 0)
    assert asleep_after_preemption() == 2


def test_another_threads_lost_core_is_no_reason(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    caller = Caller(monkeypatch, pair)
    caller.preempted += 1
    waits: list[tuple[int, int]] = []
    other = threading.Thread(target=lambda: waits.append(caller.wait(reply_after_looks=1)))
    other.start()
    other.join()
    assert [*waits, caller.wait(reply_after_looks=1)] == [(2, 0), (2, 0)]


def test_a_method_whose_replies_take_long_says_nothing_of_others(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    caller = Caller(monkeypatch, pair)

    def awaiting(method: Method, *, reply_after_looks: int | None) -> tuple[int, int]:
        caller.transport._awaited = method
        return caller.wait(reply_after_looks=reply_after_looks)

    while caller.transport._looks[Method.RESERVE].n_vain < 3:
        awaiting(Method.RESERVE, reply_after_looks=None)
    assert awaiting(Method.MATCH, reply_after_looks=1) == (2, 0)
    assert awaiting(Method.RESERVE, reply_after_looks=1) == (1, 1)


def test_who_does_not_look_sleeps_at_once(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    pair.spins = False
    caller = Caller(monkeypatch, pair)
    for _ in range(5):
        assert caller.wait(reply_after_looks=None) == (1, 1)


def test_the_deadline_holds_either_way(pair: Pair) -> None:
    quiet = Transport(pair, 5.0)
    for _ in range(3):
        with pytest.raises(TimedOutError, match="gave no answer in time"):
            quiet._wait_readable(time.monotonic() + 0.001)
