"""kvstored: accepts clients, feeds frames to the handlers and jobs to the threads, ends what is overdue."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable

from kvstore import __version__
from kvstore.clock import Clock, SystemClock
from kvstore.config import DaemonConfig
from kvstore.errors import BadInputError, ProtocolError, SessionEndedError, VersionError
from kvstore.lease import Lease
from kvstore.server.answers import Answers
from kvstore.server.compose import close_store, make_store
from kvstore.server.connection import Connection
from kvstore.server.handlers import Handlers, Reply
from kvstore.server.jobs import JobPump
from kvstore.server.listen import ListeningSocket
from kvstore.server.session import Session, Sessions, peer_pidfd
from kvstore.server.succession import Succession
from kvstore.tiers.nvme.files import Files
from kvstore.types import Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import (
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION_MAX,
    PROTOCOL_VERSION_MIN,
    REQUESTS,
    Method,
    decode,
)

TICK_S = 0.05
LATE_HEARTBEATS_ALLOWED = 3
ACCEPT_PAUSE_S = 1.0
CLIENT_NAME_CHARS_MAX = 256
WAITS_PER_SESSION_MAX = 32
"""Connections of one client on which requests may wait."""
GREETINGS_MAX = 64
"""Connections beyond those of full sessions, so that a client too many can be told why."""
ACKNOWLEDGEMENTS = frozenset({Method.RELEASE, Method.ABORT, Method.REGIONS_UNMAPPED, Method.GOODBYE})
"""What a session that was cut off may still say: that it stopped using something."""

log = logging.getLogger("kvstore.server")


class Daemon:
    """One daemon. Create it inside a running loop, then ``start``; ``stop`` releases everything.

    Raises SocketInUseError or ConfigError from the constructor if the socket can't be served, or a tier can't
    be used. Opening an NVMe tier blocks for reading its catalog. ``files`` replaces the device below it.
    """

    def __init__(self, config: DaemonConfig, clock: Clock | None = None, files: Files | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._loop = asyncio.get_running_loop()
        self._listening = ListeningSocket(config.socket_path)
        self.epoch = time.time_ns()
        try:
            self._succession = Succession(config, str(self.epoch))
            self.store = make_store(config, self._clock, files, self._succession)
        except BaseException:
            self._listening.close()
            raise
        self._started_s = self._clock.now_s()
        self._pump = JobPump(self._loop, self.store.jobs, self.store.pump)
        self._answers = Answers(self._loop, self._dispatch, self._after_request)
        self.sessions = Sessions(self._loop.add_reader, self._loop.remove_reader)
        self._adopt_sessions()
        self._handlers = Handlers(
            self.store, config.policy_clock == "client", self._more_stats, self._ask_to_unmap, self.epoch
        )
        self._connections: set[Connection] = set()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._tick_due_s = 0.0
        self._loop_lag_s_max = 0.0
        self._pump_is_due = False
        self._asked_to_unmap: dict[int, set[int]] = {}

    def start(self) -> None:
        """Accept clients from now on."""
        self._succession.start_serving(self.store)
        self._loop.add_reader(self._listening.sock, self._accept)
        self._schedule_tick()

    async def stop(self) -> bool:
        """Close every connection, write what waits for it, give back memory, descriptors and the socket file.

        Takes ``drain_s`` at most, however long the disk takes. False if a thread still has something in its
        hands then: memory and files stay as they are until the process ends.
        """
        self._succession.leave()  # first: what ends now does not end for the next daemon
        self._loop.remove_reader(self._listening.sock)
        self._listening.refuse()
        await self._answers.cancel_all()
        for connection in list(self._connections):
            connection.close()
        for session in self.sessions:
            self._forget(session)
        drained = await self._drain(self._loop.time() + self._config.drain_s)
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        self._pump.close()
        if not (drained and self._idle):
            log.warning("the disk did not finish within %.1f s: what it has not written is lost", self._config.drain_s)
        if drained:
            close_store(self.store)
        self._listening.close()
        return drained

    async def _drain(self, deadline_s: float) -> bool:
        """Write what only DRAM holds; let the store's jobs end, and those that follow from them."""
        hierarchy = self.store.hierarchy
        while await self._pump.until_quiet(deadline_s) and hierarchy is not None and not hierarchy.cleaner.drain():
            if self.store.jobs:
                continue
            # The store holds something back (a disk that failed is tried again later): the next tick will tell.
            left_s = deadline_s - self._loop.time()
            if left_s <= 0:
                break
            await asyncio.sleep(min(TICK_S, left_s))
        return self._pump.n_running == 0

    @property
    def _has_nvme(self) -> bool:
        return self.store.hierarchy is not None

    @property
    def _idle(self) -> bool:
        return self.store.hierarchy is None or self.store.hierarchy.offloader.idle

    # Connections ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: clients wait in the socket's queue until some are free again.
            log.error("no client can be accepted for %.0f s: %s", ACCEPT_PAUSE_S, error)
            self._loop.remove_reader(self._listening.sock)
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
            return
        sock.setblocking(False)
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0) or len(self._connections) >= self._connections_max:
            log.warning("a connection of user %d, process %d was refused", uid, pid)
            sock.close()
            return
        connection = Connection(self._loop, sock, self._answers.on_frame, self._on_close)
        connection.context = _Greeting(sock, pid, self._clock.now_s() + self._config.hello_s)
        self._connections.add(connection)

    def _accept_again(self) -> None:
        if self._listening.sock.fileno() >= 0:
            self._loop.add_reader(self._listening.sock, self._accept)

    @property
    def _connections_max(self) -> int:
        each = 2 + (WAITS_PER_SESSION_MAX if self._has_nvme else 0)
        return each * self._config.max_clients + GREETINGS_MAX

    def _on_close(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._answers.cancel(connection)
        session = connection.context
        if not isinstance(session, Session):
            return
        session.waits.discard(connection)
        if session.events is connection:
            session.events = None
        elif session.calls is connection and self.sessions.get(session.id) is session:
            self._cut_off(session)

    def _dispatch(self, connection: Connection, method: int, payload: bytes) -> Reply | Awaitable[Reply]:
        session = connection.context
        if isinstance(session, _Greeting):
            if method != Method.HELLO:
                raise ProtocolError(f"the first message must be HELLO, not {Method(method).name}")
            return self._hello(connection, session, decode(pb.HelloRequest, payload))
        if not isinstance(session, Session):
            raise ProtocolError("the connection belongs to no session")
        if not session.live and method not in ACKNOWLEDGEMENTS:
            raise SessionEndedError("the session has ended (no heartbeat for too long, or goodbye): say hello again")
        if method == Method.HEARTBEAT:
            session.heartbeat_at_s = self._clock.now_s()
            return Reply(pb.HeartbeatReply(epoch=self.epoch))
        if method == Method.GOODBYE:
            self._forget(session)
            return Reply(pb.GoodbyeReply())
        handler = self._handlers.by_method.get(method)
        if handler is None:
            raise ProtocolError(f"{Method(method).name} can't be asked for here")
        return handler(session, decode(REQUESTS[method], payload))

    # Sessions ------------------------------------------------------------------------------------

    def _hello(self, connection: Connection, greeting: _Greeting, request: pb.HelloRequest) -> Reply:
        version = min(request.version_max, PROTOCOL_VERSION_MAX)
        if version < max(request.version_min, PROTOCOL_VERSION_MIN):
            raise VersionError(
                f"the client speaks protocol versions {request.version_min}..{request.version_max}, "
                f"this daemon (kvstored "
                f"{__version__}) {PROTOCOL_VERSION_MIN}..{PROTOCOL_VERSION_MAX}: install matching versions"
            )
        if request.channel == pb.CHANNEL_CALLS:
            session = self._resume_session(greeting, request) or self._open_session(greeting, request)
            session.calls = connection
        else:
            session = self._join_session(connection, request)
        connection.context = session
        connection.payload_bytes_max = MAX_PAYLOAD_BYTES
        reply = pb.HelloReply(
            version=version,
            session_id=session.id,
            session_token=session.token,
            epoch=self.epoch,
            heartbeat_s=self._config.heartbeat_s,
            lease_s_max=self._config.lease_s_max,
            server_version=__version__,
            generations_bytes=self.store.dram.generations_bytes,
            can_wait=self._has_nvme,
        )
        return Reply(reply, (self.store.dram.generations_fd,) if session.calls is connection else ())

    def _join_session(self, connection: Connection, request: pb.HelloRequest) -> Session:
        """The session to which an events or waits connection belongs from now on."""
        session = self.sessions.by_token(request.session_token)
        if session is None or not session.live:
            raise SessionEndedError("the session to join has ended: connect again")
        if request.channel == pb.CHANNEL_EVENTS:
            previous, session.events = session.events, connection
            if isinstance(previous, Connection):
                previous.close()
            self._loop.call_soon(self._ask_to_unmap)  # once the answer to this is on its way
        elif len(session.waits) < WAITS_PER_SESSION_MAX:
            session.waits.add(connection)
        else:
            raise BadInputError(f"the session has {WAITS_PER_SESSION_MAX} connections to wait on, the most: share them")
        return session

    def _resume_session(self, greeting: _Greeting, request: pb.HelloRequest) -> Session | None:
        """The session whose token the same process shows again: its rights are gone, its holds go on."""
        session = self.sessions.by_token(request.session_token) if request.session_token else None
        if (
            session is None
            or not greeting.pid
            or session.pid != greeting.pid
            or session.tenant != (request.tenant or "default")
        ):
            return None
        previous, session.calls = session.calls, None
        if isinstance(previous, Connection):
            previous.close()
        self._end_waits(session)
        self.store.end_rights(session.id)
        self._asked_to_unmap.pop(session.id, None)  # what was asked may have been lost
        session.live = True
        session.heartbeat_at_s = self._clock.now_s()
        return session

    def _open_session(self, greeting: _Greeting, request: pb.HelloRequest) -> Session:
        if len(self.sessions) >= self._config.max_clients:
            raise BadInputError(
                f"{self._config.max_clients} clients are connected, the most this daemon takes (--max-clients)"
            )
        # The same rules for a tenant's name as everywhere.
        tenant = request.tenant or "default"
        Namespace.check_tenant(tenant)
        session = self.sessions.open(
            tenant,
            request.client_name[:CLIENT_NAME_CHARS_MAX],
            greeting.pid,
            peer_pidfd(greeting.sock, greeting.pid),
            self._clock.now_s(),
            self._forget,
        )
        self._succession.session_opened(session)
        return session

    def _adopt_sessions(self) -> None:
        for each in self._succession.former_sessions():
            session = Session(
                each.id, each.tenant, each.client_name, each.pid, each.pidfd, self._clock.now_s(), each.token
            )
            self.sessions.adopt(session, self._forget)
            self._succession.session_opened(session)
        self.sessions.start_after(self._succession.last_session_id)

    def _cut_off(self, session: Session) -> None:
        session.live = False
        self._end_waits(session)
        self.store.end_rights(session.id)

    def _end_waits(self, session: Session) -> None:
        """Requests that wait are answered now, with nothing; their connections end."""
        if isinstance(session.calls, Connection):
            self._answers.cancel(session.calls)
        for connection in list(session.waits):
            connection.close()

    def _forget(self, session: Session) -> None:
        self._succession.session_gone(session.id)
        if self.sessions.forget(session):
            self._end_waits(session)
            self._asked_to_unmap.pop(session.id, None)
            self.store.forget_session(session.id)
            self._handlers.memory_came_back()

    def _after_request(self) -> None:
        self._succession.after_request(self.store)
        if self.store.has_work and not self._pump_is_due:
            self._pump_is_due = True
            self._loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        """After the answer: nobody waits for what the store does behind the request's back."""
        self._pump_is_due = False
        self._pump.pump()

    # Time ----------------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        self._tick_due_s = self._loop.time() + TICK_S
        self._tick_handle = self._loop.call_at(self._tick_due_s, self._tick)

    def _tick(self) -> None:
        self._loop_lag_s_max = max(self._loop_lag_s_max * 0.99, self._loop.time() - self._tick_due_s)
        try:
            self.store.tick()
            self._succession.tick(self.store)
            self._pump.pump()
            self._end_overdue()
            self._tell_ended()
            self._ask_to_unmap()
        finally:
            self._schedule_tick()

    def _end_overdue(self) -> None:
        now_s = self._clock.now_s()
        silence_s = LATE_HEARTBEATS_ALLOWED * self._config.heartbeat_s
        for session in self.sessions:
            if session.live and now_s - session.heartbeat_at_s > silence_s:
                log.warning(
                    "client %s (process %d) sent no heartbeat for %.1f s: its rights end",
                    session.client_name,
                    session.pid,
                    silence_s,
                )
                self._cut_off(session)
        for connection in list(self._connections):
            if isinstance(connection.context, _Greeting) and connection.context.deadline_s < now_s:
                connection.close()

    def _tell_ended(self) -> None:
        events: dict[int, pb.Event] = {}
        for claim in self.store.expire():
            for session_id in claim.holders:
                event = events.setdefault(session_id, pb.Event())
                (event.ended_leases if isinstance(claim, Lease) else event.ended_reservations).append(claim.id)
        for session_id, event in events.items():
            self._send_event(session_id, event)

    def _ask_to_unmap(self) -> None:
        for session_id, region_ids in self.store.dram.pending_unmaps().items():
            asked = self._asked_to_unmap.setdefault(session_id, set())
            fresh = [region_id for region_id in region_ids if region_id not in asked]
            if fresh and self._send_event(session_id, pb.Event(retired_regions=fresh)):
                asked.update(fresh)

    def _send_event(self, session_id: int, event: pb.Event) -> bool:
        session = self.sessions.get(session_id)
        if session is None or session.events is None:
            return False
        session.events.send_event(event)
        return True

    def _more_stats(self) -> tuple[dict[str, float], dict[str, str]]:
        numbers = {
            "sessions": float(sum(1 for session in self.sessions if session.live)),
            "sessions_lingering": float(sum(1 for session in self.sessions if not session.live)),
            "loop_lag_s_max": self._loop_lag_s_max,
            "uptime_s": self._clock.now_s() - self._started_s,
            "jobs_running": float(self._pump.n_running),
            "jobs_failed": float(self._pump.n_failed),
        }
        return numbers, {
            "server_version": __version__,
            "policy": self._config.policy,
            "epoch": str(self.epoch),
        }


class _Greeting:
    """What is known of a connection before its hello."""

    def __init__(self, sock: socket.socket, pid: int, deadline_s: float) -> None:
        self.sock = sock
        self.pid = pid
        self.deadline_s = deadline_s


async def serve(config: DaemonConfig, ready: asyncio.Event | None = None, stop: asyncio.Event | None = None) -> None:
    """Run a daemon until ``stop`` is set."""
    stop = stop or asyncio.Event()
    daemon = Daemon(config)
    daemon.start()
    if ready is not None:
        ready.set()
    try:
        await stop.wait()
    finally:
        await daemon.stop()
