"""kvstored: accepts clients, feeds frames to the handlers and jobs to the threads, ends what is overdue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable

from google.protobuf.message import Message

from kvstore import __version__
from kvstore.clock import Clock, SystemClock
from kvstore.config import DaemonConfig
from kvstore.errors import BadInputError, ProtocolError, SessionEndedError
from kvstore.http.source import Phase
from kvstore.lease import Lease
from kvstore.logs import about
from kvstore.prefix_index.policy_time import TimedPolicy
from kvstore.server.answers import Answers
from kvstore.server.compose import close_store, leave_store_to_parent, make_store
from kvstore.server.connection import Connection
from kvstore.server.draining import drain, read_no_more
from kvstore.server.grpc import open_server
from kvstore.server.handlers import Handlers, Reply
from kvstore.server.hello import CLIENT_NAME_CHARS_MAX, Greeting, check_version, hello_reply
from kvstore.server.jobs import JobPump
from kvstore.server.lingering import Lingering
from kvstore.server.listen import ListeningSocket
from kvstore.server.monitor import Monitor
from kvstore.server.notices import Notices
from kvstore.server.operators import register_operators
from kvstore.server.prompts import PromptReader
from kvstore.server.remote import RemoteSessions
from kvstore.server.session import Session, Sessions, peer_pidfd
from kvstore.server.succession import Succession
from kvstore.server.tenant_samples import TenantSamples
from kvstore.tiers.nvme.files import Files
from kvstore.types import Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import (
    MAX_PAYLOAD_BYTES,
    REQUESTS,
    Method,
    decode,
)

TICK_S = 0.05
LATE_HEARTBEATS_ALLOWED = 3
ACCEPT_PAUSE_S = 1.0
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
        self.epoch = time.time_ns()
        self.monitor = Monitor(self._loop, config.log, self.stats)
        with contextlib.ExitStack() as undo:
            self._listening = ListeningSocket(config.socket_path) if config.socket_path is not None else None
            if self._listening is not None:
                undo.callback(self._listening.close)
            undo.callback(self.monitor.stop)
            self.monitor.listen(config.metrics)  # before the store: that may take long to open
            self._succession = Succession(config, str(self.epoch))
            self.store = make_store(config, self._clock, files, self._succession)
            undo.callback(close_store, self.store)
            self.monitor.tenants = TenantSamples(self.store).take
            self._started_s = self._clock.now_s()
            self._pump = JobPump(self._loop, self.store.jobs, self.store.pump)
            self._answers = Answers(self._loop, self._dispatch, self.after_request, self.monitor)
            self.sessions = Sessions(self._loop.add_reader, self._loop.remove_reader)
            self._notices = Notices(self.store.mapped, self.sessions)
            self._adopt_sessions()
            prompts = PromptReader(self.store, config.policy_clock == "client")
            self._handlers = Handlers(
                self.store, config.policy_clock == "client", self.stats, self.monitor.latencies,
                self._notices.ask_to_unmap, self.epoch,
            )  # fmt: skip
            self._lingering = Lingering(
                self._loop, self.sessions, self.store.mapped, self.end_session, self._handlers.memory_came_back
            )
            register_operators(self._handlers.by_method, self.store, prompts, self.sessions, self.epoch)
            self.remote = RemoteSessions(self._loop, self, self._clock, config.max_clients)
            self._grpc = open_server(config.grpc, self._loop, self, self.remote, config.max_clients)
            undo.pop_all()
        self._connections: set[Connection] = set()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._tick_due_s = 0.0
        self._pump_is_due = False

    def start(self) -> None:
        """Accept clients from now on."""
        self._succession.start_serving(self.store)
        if self._has_nvme:
            self._pump.start_threads()
        self._accept_again()
        if self._grpc is not None:
            self._grpc.start()
        self._schedule_tick()
        self.monitor.enter(Phase.SERVING)

    async def stop(self) -> bool:
        """Close every connection, write what waits for it, give back memory, descriptors and the socket file.

        Takes ``drain_s`` at most, however long the disk takes. False if a thread still has something in its
        hands then: memory and files stay as they are until the process ends.
        """
        self.monitor.enter(Phase.DRAINING)
        self._succession.leave()  # first: what ends now does not end for the next daemon
        if self._listening is not None:
            self._loop.remove_reader(self._listening.sock)
            self._listening.refuse()
        await self._answers.cancel_all()
        read_no_more(self.store)
        for connection in list(self._connections):
            connection.close()
        if self._grpc is not None:
            await self._grpc.stop()
        for session in self.sessions:
            # Its right ends, not its hold: it may live, and look at memory or write to it when all here is over.
            self._cut_off(session)
        drained = await drain(self.store, self._pump, self._loop.time() + self._config.drain_s)
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        self._pump.close(join=drained)
        for session in self.sessions:
            self.sessions.forget(session)
        if not (drained and self._idle):
            log.warning(
                "the disk did not finish within %.1f s: what it has not written is lost", self._config.drain_s,
                extra=about("drain_cut_short", drain_s=self._config.drain_s),
            )  # fmt: skip
        if drained:
            close_store(self.store)
        if self._listening is not None:
            self._listening.close()
        self.monitor.stop()
        return drained

    def after_fork(self) -> None:
        """In a forked child of a program that the daemon is a thread of: let go of what the child inherited."""
        for connection in self._connections:
            connection.after_fork()
        self.monitor.after_fork()
        leave_store_to_parent(self.store)

    @property
    def _has_nvme(self) -> bool:
        return self.store.hierarchy is not None

    @property
    def _idle(self) -> bool:
        return self.store.hierarchy is None or self.store.hierarchy.offloader.idle

    # Connections ---------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: clients wait in the socket's queue until some are free again.
            log.error(
                "no client can be accepted for %.0f s: %s", ACCEPT_PAUSE_S, error,
                extra=about("accept_paused", pause_s=ACCEPT_PAUSE_S, error=error.strerror),
            )  # fmt: skip
            self._loop.remove_reader(listening)
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
            return
        self.take(sock)

    def take(self, sock: socket.socket) -> None:
        """Serve the client at the other end of a connected Unix socket, which belongs to the daemon from now on.

        Closes it if the client is another user's, or one too many.
        """
        sock.setblocking(False)
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0) or len(self._connections) >= self._connections_max:
            log.warning(
                "a connection of user %d, process %d was refused", uid, pid,
                extra=about("connection_refused", uid=uid, pid=pid),
            )  # fmt: skip
            sock.close()
            return
        connection = Connection(self._loop, sock, self._answers.on_frame, self._on_close)
        connection.context = Greeting(sock, pid, self._clock.now_s() + self._config.hello_s)
        self._connections.add(connection)

    def _accept_again(self) -> None:
        if self._listening is not None and self._listening.sock.fileno() >= 0:
            self._loop.add_reader(self._listening.sock, self._accept, self._listening.sock)

    @property
    def _connections_max(self) -> int:
        return (2 + WAITS_PER_SESSION_MAX) * self._config.max_clients + GREETINGS_MAX

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
            session.calls = None
            if not session.remote and not self.store.is_used_by(session.id):
                self.end_session(session)  # its process may live for long and connect again and again

    def _dispatch(self, connection: Connection, method: int, payload: bytes) -> Reply | Awaitable[Reply]:
        session = connection.context
        if isinstance(session, Greeting):
            if method != Method.HELLO:
                raise ProtocolError(f"the first message must be HELLO, not {Method(method).name}")
            return self._hello(connection, session, decode(pb.HelloRequest, payload))
        if not isinstance(session, Session):
            raise ProtocolError("the connection belongs to no session")
        if not session.live and method not in ACKNOWLEDGEMENTS:
            raise SessionEndedError("the session has ended (no heartbeat for too long, or goodbye): say hello again")
        if method == Method.GOODBYE:
            self.end_session(session)
            return Reply(pb.GoodbyeReply())
        return self.answer(session, method, decode(REQUESTS[method], payload))

    def answer(self, session: Session, method: int, request: Message) -> Reply | Awaitable[Reply]:
        """Work on a request of a live session, whatever way it came."""
        if method == Method.HEARTBEAT:
            session.heartbeat_at_s = self._clock.now_s()
            return Reply(pb.HeartbeatReply(epoch=self.epoch))
        handler = self._handlers.by_method.get(method)
        if handler is None:
            raise ProtocolError(f"{Method(method).name} can't be asked for here")
        return handler(session, request)

    # Sessions ------------------------------------------------------------------------------------

    def _hello(self, connection: Connection, greeting: Greeting, request: pb.HelloRequest) -> Reply:
        check_version(request)
        if request.channel == pb.CHANNEL_CALLS:
            session = self._resume_session(greeting, request) or self._open_session(greeting, request)
            session.calls = connection
        else:
            session = self._join_session(connection, request)
        connection.context = session
        connection.payload_bytes_max = MAX_PAYLOAD_BYTES
        return Reply(
            self.hello_reply(session, request),
            (self.store.dram.generations_fd,) if session.calls is connection else (),
        )

    def hello_reply(self, session: Session, request: pb.HelloRequest) -> pb.HelloReply:
        """What a client is told of its session."""
        return hello_reply(session, request, self.epoch, self._config, self.store)

    def _join_session(self, connection: Connection, request: pb.HelloRequest) -> Session:
        """The session to which an events or waits connection belongs from now on."""
        session = self.sessions.by_token(request.session_token)
        if session is None or not session.live:
            raise SessionEndedError("the session to join has ended: connect again")
        if request.channel == pb.CHANNEL_EVENTS:
            previous, session.events = session.events, connection
            if isinstance(previous, Connection):
                previous.close()
            self._loop.call_soon(self._notices.ask_to_unmap)  # once the answer to this is on its way
        elif len(session.waits) < WAITS_PER_SESSION_MAX:
            session.waits.add(connection)
        else:
            raise BadInputError(f"the session has {WAITS_PER_SESSION_MAX} connections to wait on, the most: share them")
        return session

    def _resume_session(self, greeting: Greeting, request: pb.HelloRequest) -> Session | None:
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
        self._notices.forget(session.id)
        session.live = True
        session.n_returns += 1
        session.heartbeat_at_s = self._clock.now_s()
        return session

    def _open_session(self, greeting: Greeting, request: pb.HelloRequest) -> Session:
        self._must_have_room()
        # The same rules for a tenant's name as everywhere.
        tenant = request.tenant or "default"
        Namespace.check_tenant(tenant)
        session = self.sessions.open(
            tenant,
            request.client_name[:CLIENT_NAME_CHARS_MAX],
            greeting.pid,
            peer_pidfd(greeting.sock, greeting.pid),
            self._clock.now_s(),
            self.end_session,
        )
        self._succession.session_opened(session)
        return session

    def _must_have_room(self) -> None:
        """For one more client of this machine; raises BadInputError."""
        if self.sessions.n_local >= self._config.max_clients:
            raise BadInputError(
                f"{self._config.max_clients} clients are connected, the most this daemon takes (--max-clients)"
            )

    def _adopt_sessions(self) -> None:
        for each in self._succession.former_sessions():
            session = Session(
                each.id, each.tenant, each.client_name, each.pid, each.pidfd, self._clock.now_s(), each.token
            )
            self.sessions.adopt(session, self.end_session)
            self._succession.session_opened(session)
        self.sessions.start_after(self._succession.last_session_id)

    def _cut_off(self, session: Session) -> None:
        if session.remote:
            self.remote.end_by_id(session)
            return
        session.live = False
        self._end_waits(session)
        self.store.end_rights(session.id)

    def _end_waits(self, session: Session) -> None:
        """Requests that wait are answered now, with nothing; their connections end."""
        if isinstance(session.calls, Connection):
            self._answers.cancel(session.calls)
        for connection in list(session.waits):
            connection.close()

    def end_session(self, session: Session) -> None:
        """Nothing that the session held is in use any more."""
        self._succession.session_gone(session.id)
        if self.sessions.forget(session):
            self._end_waits(session)
            self._notices.forget(session.id)
            self.store.forget_session(session.id)
            self._handlers.memory_came_back()

    def after_request(self) -> None:
        """A request has been worked on: what follows from it is due."""
        self._succession.after_request(self.store)
        if self.store.has_work and not self._pump_is_due:
            self._pump_is_due = True
            self._loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        """After the answer: nobody waits for what the store does behind the request's back."""
        self._pump.pump()
        self._pump_is_due = self.store.requests.has_work
        if self._pump_is_due:
            self._loop.call_soon(self._pump_now)

    # Time ----------------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        self._tick_due_s = self._loop.time() + TICK_S
        self._tick_handle = self._loop.call_at(self._tick_due_s, self._tick)

    def _tick(self) -> None:
        self.monitor.tick(self._loop.time() - self._tick_due_s)
        try:
            self.store.tick()
            self._succession.tick(self.store)
            self._pump.pump()
            self._end_overdue()
            self._lingering.tick(self._clock.now_s())
            self._tell_ended()
            self._notices.ask_to_unmap()
        finally:
            self._schedule_tick()

    def _end_overdue(self) -> None:
        now_s = self._clock.now_s()
        silence_s = LATE_HEARTBEATS_ALLOWED * self._config.heartbeat_s
        for session in self.sessions:
            if session.live and now_s - session.heartbeat_at_s > silence_s:
                log.warning(
                    "client %s (process %d) sent no heartbeat for %.1f s: its rights end",
                    session.client_name, session.pid, silence_s,
                    extra=about("client_silent", client=session.client_name, session=session.id, pid=session.pid),
                )  # fmt: skip
                self._cut_off(session)
        for connection in list(self._connections):
            if isinstance(connection.context, Greeting) and connection.context.deadline_s < now_s:
                connection.close()

    def _tell_ended(self) -> None:
        events: dict[int, pb.Event] = {}
        for claim in self.store.expire():
            for session_id in list(claim.holders):
                event = events.setdefault(session_id, pb.Event())
                (event.ended_leases if isinstance(claim, Lease) else event.ended_reservations).append(claim.id)
                session = self.sessions.get(session_id)
                if session is not None and session.remote:
                    self.remote.end_claim(session, isinstance(claim, Lease), claim.id)
        self._notices.tell(events)

    def stats(self) -> tuple[dict[str, float], dict[str, str]]:
        """Counters and gauges, and facts in words, of the daemon and its store."""
        numbers, texts = self.store.stats()
        if isinstance(policy := self.store.index.policy, TimedPolicy):
            numbers |= {"policy_s": policy.watch.seconds, "policy_s_max": policy.watch.longest_s}
        numbers |= {
            "sessions": float(sum(1 for session in self.sessions if session.live)),
            "sessions_lingering": float(sum(1 for session in self.sessions if not session.live)),
            "grpc_sessions": float(len(self.remote)),
            "loop_lag_s_max": self.monitor.loop_lag_s_max,
            "uptime_s": self._clock.now_s() - self._started_s,
            "jobs_running": float(self._pump.n_running),
            "jobs_failed": float(self._pump.n_failed),
        }
        return numbers, texts | {
            "server_version": __version__,
            "policy": policy.name,
            "epoch": str(self.epoch),
        }
