"""How long a request waits for slower tiers, and connections on which it may do so.

A request that waits keeps its connection to itself. So each thread that waits has one of its own, from a
small pool: the threads of an engine that need only what is in memory never stand behind one that waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from google.protobuf.message import Message

from kvstore.client.link import Calls
from kvstore.client.transport import RefusedError, ReplyT, TimedOutError
from kvstore.errors import BadInputError, ProtocolError, UnavailableError
from kvstore.wire.framing import Method

CONNECTIONS_MAX = 16
"""Threads of one client that can wait at the same time."""


@dataclass(frozen=True, slots=True)
class WaitRule:
    """Wait ``base_s`` seconds, and ``per_1k_tokens_s`` for each 1024 tokens asked for."""

    base_s: float
    per_1k_tokens_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base_s", "per_1k_tokens_s"):
            checked_wait_s(f"WaitRule.{name}", getattr(self, name))


Wait = Literal["best_effort", "wait"] | float | WaitRule
"""``"best_effort"``: what is in DRAM now; the rest starts loading. ``"wait"``: at most the client's
``timeout_s``. A number of seconds, whatever the client's ``timeout_s``. A ``WaitRule``: by the length of the
prompt, at most ``timeout_s``."""


def wait_seconds(wait: Wait, n_tokens: int, timeout_s: float) -> float:
    """Seconds that a request for ``n_tokens`` may wait; raises BadInputError for what is no ``Wait``."""
    if isinstance(wait, WaitRule):
        return min(wait.base_s + wait.per_1k_tokens_s * n_tokens / 1024, timeout_s)
    if isinstance(wait, str):
        if wait not in ("best_effort", "wait"):
            raise BadInputError(f"wait is {wait!r}; give 'best_effort', 'wait', seconds or a WaitRule")
        return timeout_s if wait == "wait" else 0.0
    if isinstance(wait, bool) or not isinstance(wait, int | float | np.number):
        raise BadInputError(f"wait is {wait!r:.80}; give 'best_effort', 'wait', seconds or a WaitRule")
    return checked_wait_s("wait", wait)


def checked_wait_s(name: str, value: object) -> float:
    """A number of seconds to wait, given as ``name``; raises BadInputError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= float(value) <= 86400:
        raise BadInputError(f"{name} is {value!r:.80}; it must be from 0 to 86400 seconds")
    return float(value)


class CrowdedError(RefusedError):
    """All connections on which this client's threads may wait are taken."""


class WaitingCalls:
    """Connections for requests that may wait, made when needed and used again. Callable from any thread."""

    def __init__(self, connect: Callable[[float], Calls], give_back: Callable[[Calls], None]) -> None:
        """``connect(deadline_s)`` makes one; ``give_back`` gets those on which late replies have come."""
        self._connect = connect
        self._give_back = give_back
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._idle: list[Calls] = []
        self._busy: set[Calls] = set()
        self._ended = False

    def call(self, method: Method, request: Message, kind: type[ReplyT], deadline_s: float) -> ReplyT:
        """One request and its reply. Raises what the daemon answers, or UnavailableError by the deadline."""
        if not self._places.acquire(timeout=max(deadline_s - time.monotonic(), 0)):
            raise CrowdedError(f"{CONNECTIONS_MAX} threads of this client wait already")
        try:
            transport = self._take(deadline_s)
            broken = False
            try:
                return transport.call(method, request, kind, deadline_s)
            except (TimedOutError, RefusedError):
                raise  # the reply may still come; the next call finds it
            except (UnavailableError, ProtocolError):
                broken = True
                raise
            finally:
                self._put_back(transport, broken)
        finally:
            self._places.release()

    def end(self, *, forked: bool = False) -> None:
        """Close all connections; calls under way fail soon. In a forked child the parent goes on using them."""
        with self._lock:
            self._ended = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for transport in idle:
            transport.close()
        for transport in busy:
            if forked:
                transport.close()
            else:
                transport.shut_down()

    def _take(self, deadline_s: float) -> Calls:
        with self._lock:
            transport = self._idle.pop() if self._idle else None
        if transport is None:
            transport = self._connect(deadline_s)
        with self._lock:
            self._busy.add(transport)
            if not self._ended:
                return transport
        self._put_back(transport, broken=True)
        raise UnavailableError("the connection to the daemon was lost meanwhile")

    def _put_back(self, transport: Calls, broken: bool) -> None:
        if transport.late:
            self._give_back(transport)
        with self._lock:
            self._busy.discard(transport)
            if not (broken or self._ended):
                self._idle.append(transport)
                return
        transport.close()
