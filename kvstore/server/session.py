"""Sessions: one client's presence, from its hello until nobody could touch its memory any more.

    live --(disconnect, missed heartbeats)--> cut off --(process gone, goodbye)--> forgotten
      ^---------------(hello with its token)-----'

A live session has rights. A session that is cut off has none, but its process may still have regions
mapped, so what it held stays out of use until the process acknowledges (it may come back for that with
its token) or is known to be gone.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.wire import kvstore_pb2 as pb

TOKEN_BYTES = 16


class EventSink(Protocol):
    """Where a session's events go."""

    def send_event(self, event: pb.Event) -> None:
        """Queue one event; never blocks."""
        ...


@dataclass(slots=True)
class Session:
    """One client. ``id`` is also its number as writer and mapper in the tier."""

    id: int
    tenant: str
    client_name: str
    pid: int
    heartbeat_at_s: float
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    pidfd: int | None = None
    live: bool = True
    calls: object = None
    events: EventSink | None = None

    def close_pidfd(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class Sessions:
    """All sessions of a daemon. ``watch(fd, callback)`` and ``unwatch(fd)`` are the loop's readers."""

    def __init__(self, watch: Callable[[int, Callable[[], None]], object], unwatch: Callable[[int], object]) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._ids = itertools.count(1)
        self._by_id: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def get(self, session_id: int) -> Session | None:
        return self._by_id.get(session_id)

    def open(self, tenant: str, client_name: str, pid: int, now_s: float, gone: Callable[[Session], None]) -> Session:
        """A new session of a process; ``gone`` is called once when that process has ended.

        The kernel's pidfd tells of the end even if the process was stopped or its socket is held open by a
        child. A process that can't be watched (already gone, other PID namespace) counts as gone when its
        connection ends.
        """
        session = Session(next(self._ids), tenant, client_name, pid, now_s)
        try:
            session.pidfd = os.pidfd_open(pid)
        except OSError:
            session.pidfd = None
        else:
            self._watch(session.pidfd, lambda: gone(session))
        self._by_id[session.id] = session
        return session

    def by_token(self, token: bytes) -> Session | None:
        """The session with this token; compares in constant time."""
        for session in self._by_id.values():
            if secrets.compare_digest(session.token, token):
                return session
        return None

    def forget(self, session: Session) -> bool:
        """Drop the session and stop watching its process. False if it was forgotten before."""
        if self._by_id.pop(session.id, None) is None:
            return False
        session.live = False
        if session.pidfd is not None:
            self._unwatch(session.pidfd)
            session.close_pidfd()
        return True
