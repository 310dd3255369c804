"""Sessions: one client's presence, from its hello until nobody could touch its memory any more.

    live --(disconnect, missed heartbeats)--> cut off --(process gone, goodbye, nothing mapped)--> forgotten
      ^---------------(hello with its token)-----'

A live session has rights. A session that is cut off has none, but its process may still have regions
mapped, so what it held stays out of use until the process acknowledges (it may come back for that with
its token), or is known to be gone or to map nothing any more.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.errors import UnavailableError
from kvstore.server.connection import Connection
from kvstore.tiers.dram import DAEMON_WRITER
from kvstore.wire import kvstore_pb2 as pb

TOKEN_BYTES = 16
REMOTE_PID = -1


SO_PEERPIDFD = 77


def peer_pidfd(sock: socket.socket, pid: int) -> int:
    """A descriptor that tells when the process at the other end of a Unix socket has ended.

    Works from any PID namespace on Linux 6.5 and newer. Without it nobody could know when the client's memory
    mappings are gone, so raises UnavailableError if the kernel can't give one: the client is then refused.
    """
    try:
        return int(sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL):
            raise UnavailableError(
                f"the client's process can't be watched ({error.strerror}): raise `ulimit -n`"
            ) from error
    if pid <= 0:
        raise UnavailableError(
            "the client is in another PID namespace, where this kernel (before 6.5) can't watch it: share the namespace"
        )
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise UnavailableError(f"the client's process {pid} can't be watched: {error.strerror}") from error


class EventSink(Protocol):
    """Where a session's events go."""

    def send_event(self, event: pb.Event) -> None:
        """Queue one event; never blocks."""
        ...


@dataclass(slots=True)
class Session:
    """One client. ``id`` is also its number as writer and mapper in the tier.

    A remote one has no process to watch (``pidfd`` -1) and maps nothing: what it holds is free once its right ends.
    """

    id: int
    tenant: str
    client_name: str
    pid: int
    pidfd: int
    heartbeat_at_s: float
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    live: bool = True
    n_returns: int = 0
    """How often its client came back for it."""
    calls: object = None
    events: EventSink | None = None
    waits: set[Connection] = field(default_factory=set)

    @property
    def remote(self) -> bool:
        """Whether it came over gRPC: its bytes are copied by the daemon."""
        return self.pid < 0

    @property
    def writer(self) -> int:
        """Who fills the slots that it reserves."""
        return DAEMON_WRITER if self.remote else self.id

    def close_pidfd(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Sessions:
    """All sessions of a daemon. ``watch(fd, callback)`` and ``unwatch(fd)`` are the loop's readers."""

    def __init__(self, watch: Callable[[int, Callable[[], None]], object], unwatch: Callable[[int], object]) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._ids = itertools.count(1)
        self._by_id: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def n_local(self) -> int:
        """How many are of processes of this machine, those that were cut off too."""
        return sum(not session.remote for session in self._by_id.values())

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def get(self, session_id: int) -> Session | None:
        return self._by_id.get(session_id)

    def open(
        self, tenant: str, client_name: str, pid: int, pidfd: int, now_s: float, gone: Callable[[Session], None]
    ) -> Session:
        """A new session of the process behind ``pidfd``, which belongs to the session from now on.

        ``gone`` is called once when that process has ended; the kernel tells even if it was stopped, or if a
        child holds its socket open.
        """
        session = Session(next(self._ids), tenant, client_name, pid, pidfd, now_s)
        self._watch(pidfd, lambda: gone(session))
        self._by_id[session.id] = session
        return session

    def open_remote(self, tenant: str, client_name: str, now_s: float) -> Session:
        """A new session without a process: somebody else sees its end."""
        session = Session(next(self._ids), tenant, client_name, REMOTE_PID, -1, now_s)
        self._by_id[session.id] = session
        return session

    def adopt(self, session: Session, gone: Callable[[Session], None]) -> None:
        """A client of an earlier daemon: cut off until it comes back with its token. Later ids are higher."""
        session.live = False
        self._watch(session.pidfd, lambda: gone(session))
        self._by_id[session.id] = session

    def start_after(self, last_id: int) -> None:
        """Sessions opened from now on have higher ids."""
        self._ids = itertools.count(last_id + 1)

    def by_token(self, token: bytes) -> Session | None:
        """The session of this machine with this token; compares in constant time."""
        for session in self._by_id.values():
            if not session.remote and secrets.compare_digest(session.token, token):
                return session
        return None

    def forget(self, session: Session) -> bool:
        """Drop the session and stop watching its process. False if it was forgotten before."""
        if self._by_id.pop(session.id, None) is None:
            return False
        session.live = False
        if session.pidfd >= 0:
            self._unwatch(session.pidfd)
        session.close_pidfd()
        return True
