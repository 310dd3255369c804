"""A client's presence at the daemon: its connections, a background thread, and a rule for when to give up.

Calls go over one connection under a lock; those that wait for slower tiers over others, without it (see
``waiting.py``). One more carries heartbeats, acknowledgements and the daemon's events, on a thread of its own.
When a call meets its deadline, or a connection breaks, the session turns unhealthy: from then on calls fail
at once, without waiting, until the thread has heard from the daemon again. So a daemon that hangs costs its
callers one deadline, not one each.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstore.client.acks import Acknowledgements
from kvstore.client.claims import Claims
from kvstore.client.era import Era
from kvstore.client.hbm import HbmRegions, split
from kvstore.client.link import Calls, Events, Greeted, Link
from kvstore.client.mapping import MappingListener, Regions
from kvstore.client.transport import NoWayError
from kvstore.client.waiting import WaitingCalls
from kvstore.client.watcher import watch
from kvstore.errors import KVStoreError, SessionEndedError, UnavailableError
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import FLAG_ERROR, FLAG_REPLY, Method, decode

RETRY_S_MIN = 0.02
RETRY_S_MAX = 1.0
POLL_S_MAX = 1.0


class Presence:
    """See the module. All methods may be called from any thread; ``Session`` adds the calls.

    Construction connects and raises UnavailableError if that fails and ``required``.
    """

    def __init__(self, link: Link, tenant: str, client_name: str, timeout_s: float, *, required: bool) -> None:
        self.timeout_s = timeout_s
        self._link = link
        self._tenant = tenant
        self._client_name = client_name
        self._lock = threading.RLock()
        self._failure: KVStoreError | None = None
        """Why the session was lost or could not be made, as far as that is known; None while it stands."""
        self._reset()
        try:
            self._connect(time.monotonic() + timeout_s)
        except UnavailableError as error:
            if required:
                self._close_wake()
                raise
            self._failure = error
        except KVStoreError:
            self._close_wake()
            raise
        self._start_thread()

    def _reset(self) -> None:
        """The state of a session that never connected; also what a forked child starts from."""
        self._pid = os.getpid()
        self._calls: Calls | None = None
        self._events: Events | None = None
        self._token = b""
        self._healthy = threading.Event()
        self._closed = False
        self._failure = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._acks = Acknowledgements(self._wake)
        self._waiting = self._new_waiting()
        self._can_wait = False
        self.claims = Claims()
        self._generations: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._heartbeat_s = 1.0
        self._beat_at_s = 0.0
        self._beat_sent = False
        self._retry_s = RETRY_S_MIN
        self._thread: threading.Thread | None = None
        self._listeners: list[MappingListener] = []
        self.regions = Regions(self._region_unmapped, self._listeners)
        self.hbm: HbmRegions | None = None
        """What is open of the daemon's HBM, for a client that reads there."""
        self.hbm_uuid = ""
        """The device of the daemon's HBM tier, if there is one."""
        self.era = Era()
        self.epoch = 0
        self.session_id = 0
        self.server_version = ""

    @property
    def healthy(self) -> bool:
        """Whether the daemon answered last time."""
        return self._healthy.is_set()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def __str__(self) -> str:
        return str(self._link)

    @property
    def can_wait(self) -> bool:
        """Whether the daemon has a slower tier, for which requests may wait."""
        return self._can_wait

    def wait_healthy(self, timeout_s: float) -> bool:
        """Block until the daemon answers again, at most ``timeout_s``."""
        return self._healthy.wait(timeout_s)

    def watch_mappings(self, listener: MappingListener) -> None:
        """Tell ``listener`` of what is mapped, from now on and so far."""
        with self.exclusive():
            self._listeners.append(listener)
            self.regions.tell_all(listener)

    def unwatch_mappings(self, listener: MappingListener) -> None:
        """Undo ``watch_mappings``. It is told nothing about what it still keeps."""
        with self.exclusive():
            if listener in self._listeners:
                self._listeners.remove(listener)

    def exclusive(self) -> threading.RLock:
        """The lock, for ``with``: several calls and mappings as one step, nobody else's call between them."""
        if self._pid != os.getpid():
            self._after_fork()
        return self._lock

    def _new_waiting(self) -> WaitingCalls:
        return WaitingCalls(lambda deadline_s: self._link.join(self._token, deadline_s), self._give_back)

    def _must_be_up(self) -> Calls:
        if self._closed:
            raise UnavailableError("the client is closed")
        if self._calls is None or not self._healthy.is_set():
            failure = self._failure
            if isinstance(failure, NoWayError):
                raise type(failure)(str(failure))
            raise UnavailableError(f"the daemon at {self._link} is down or does not answer")
        return self._calls

    def acknowledge(self, method: Method, request: Message) -> None:
        """Send later, from the session's thread; never blocks, never fails. For what is no longer used."""
        if self._pid == os.getpid():
            self._acks.add(method, request)

    def _region_unmapped(self, region_id: int) -> None:
        self.acknowledge(Method.REGIONS_UNMAPPED, pb.RegionsUnmappedRequest(region_ids=[region_id]))

    def _give_back(self, calls: Calls) -> None:
        """What late replies granted is of no use to anyone."""
        while calls.late:
            self._acks.give_back([calls.late.popleft()])

    # Connecting ----------------------------------------------------------------------------------

    def _connect(self, deadline_s: float) -> None:
        """Say hello on both connections, back to the old session if the daemon still knows it."""
        self._adopt(self._greet(deadline_s))

    def _greet(self, deadline_s: float) -> Greeted:
        return self._link.greet(self._tenant, self._client_name, self._token, deadline_s)

    def _adopt(self, greeted: Greeted) -> None:
        reply = greeted.reply
        self.claims.end_all("the connection to the daemon was lost meanwhile")
        if reply.session_token != self._token:
            # What is mapped belongs to a session that is gone; arrays keep their own mappings.
            self.regions.drop_all()
            self.regions = Regions(self._region_unmapped, self._listeners)
            if self.hbm is not None:
                self.hbm.drop_all()
                self.hbm = HbmRegions(self.hbm.device, self._region_unmapped)
            self._acks.clear()
            self.era = Era()
        elif reply.epoch != self.epoch:
            # Another daemon that knows what we have mapped, but not what of it we still use.
            self.era = self.era.followed_by(self._acks, reply.epoch)
        self._calls, self._events = greeted.calls, greeted.events
        self._token, self.epoch, self.session_id = reply.session_token, reply.epoch, reply.session_id
        self.hbm_uuid = reply.hbm_uuid
        self._heartbeat_s, self.server_version, self._can_wait = (
            reply.heartbeat_s,
            reply.server_version,
            reply.can_wait,
        )
        self._generations = greeted.generations
        self._failure = None
        self._healthy.set()

    def _suspect(self) -> None:
        """No call is tried until the daemon has answered a heartbeat."""
        self._healthy.clear()
        self._wake()

    def _disconnected(self, why: str, failure: KVStoreError | None = None) -> None:
        """Everything ends. If there is no way back after this ``failure``, calls fail with it from now on."""
        self._failure = failure
        self._healthy.clear()
        for transport in (self._calls, self._events):
            if transport is not None:
                transport.close()
        self._calls = self._events = None
        self._waiting.end()
        self._waiting = self._new_waiting()
        self.claims.end_all(why)
        self._wake()

    def _after_fork(self) -> None:
        """In a forked child: the parent's connections, leases and mappings are none of ours."""
        self._lock = threading.RLock()  # a thread that is not here may have held it
        if self._closed:
            self._pid = os.getpid()
            return
        for transport in (self._calls, self._events):
            if transport is not None:
                transport.close()
        self._waiting.end(forked=True)
        self.claims.end_all("a forked child has no right to its parent's leases")
        self._close_wake()
        self._reset()
        try:
            self._connect(time.monotonic() + self.timeout_s)
        except KVStoreError as error:  # the thread goes on trying
            self._failure = error
        self._start_thread()

    def close(self) -> None:
        """Say goodbye and end the thread; blocks until it has ended. Idempotent.

        If arrays over the daemon's memory are still alive, or the daemon can't be told, their slots stay out of
        use until it sees that this process has unmapped them, or has ended.
        """
        if self._pid != os.getpid():
            self._closed = True  # a fork's copy: nothing of the parent's is its own to end
            return
        with self._lock:
            if self._closed:
                return
            self.claims.abandon_all("the client was closed")
            for listener in tuple(self._listeners):
                listener.let_go()
            nothing_is_open = self.hbm is None or self.hbm.drop_all()
            if self.regions.drop_all() and nothing_is_open and self._calls is not None and self._healthy.is_set():
                # Gone or hanging is fine: the kernel tells the daemon when this process ends.
                with contextlib.suppress(KVStoreError):
                    self._calls.call(
                        Method.GOODBYE,
                        pb.GoodbyeRequest(),
                        pb.GoodbyeReply,
                        time.monotonic() + self.timeout_s,
                    )
            elif self._events is not None and self._healthy.is_set():
                self._tell_what_is_over(self._events)
            self._closed = True
            self._disconnected("the client was closed")
        if self._thread is not None:
            self._thread.join()
        self._close_wake()

    def _tell_what_is_over(self, events: Events) -> None:
        """At the end: what is acknowledged, and the regions that are unmapped. The rest ends with the process."""
        with contextlib.suppress(KVStoreError):
            deadline_s = time.monotonic() + self.timeout_s
            for region_ids in self.regions.unmapped():
                self._acks.add(Method.REGIONS_UNMAPPED, pb.RegionsUnmappedRequest(region_ids=region_ids))
            self._acks.send(events, deadline_s)

    # The thread ----------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        self._thread = threading.Thread(
            target=watch, args=(weakref.ref(self), self._wake_fd, f"a client of {self}"), name="kvstore-session",
            daemon=True,
        )  # fmt: skip
        self._thread.start()

    def tick(self) -> tuple[int, float] | None:
        """One turn of the thread: connect, acknowledge, beat. What to poll and for how long; None = ended."""
        if self._closed or self._pid != os.getpid():
            return None
        events = self._events
        if events is None:
            events = self._reconnect()
            if events is None:
                return -1, self._retry_s
        now_s = time.monotonic()
        try:
            self._acks.send(events, now_s + self.timeout_s)
            if now_s >= self._beat_at_s or (not self._healthy.is_set() and not self._beat_sent):
                events.send(Method.HEARTBEAT, pb.HeartbeatRequest(), now_s + self.timeout_s)
                self._beat_sent = True
                self._beat_at_s = now_s + self._heartbeat_s / 2
        except KVStoreError as error:
            self._break(events, error)
            return -1, RETRY_S_MIN
        return events.fileno(), min(max(self._beat_at_s - now_s, 0.0), POLL_S_MAX)

    def listen(self) -> None:
        """Take what the daemon sent on the events connection; call it when there is something."""
        events = self._events
        if events is None:
            return
        try:
            frames = events.receive_ready()
            for method, flags, _, payload in frames:
                if method == Method.EVENT:
                    self._on_event(decode(pb.Event, payload))
                elif method == Method.HEARTBEAT and flags == FLAG_REPLY:
                    self._beat_sent = False
                    if self._calls is not None:
                        self._healthy.set()
                elif flags & FLAG_ERROR and method == Method.HEARTBEAT:
                    raise SessionEndedError("the daemon has ended the session")
        except KVStoreError as error:
            self._break(events, error)

    def _on_event(self, event: pb.Event) -> None:
        for lease, ids in ((True, event.ended_leases), (False, event.ended_reservations)):
            for claim_id in ids:
                if not self.claims.end(lease, claim_id, "its time was up"):
                    # Granted in a reply that nobody waited for, or let go of meanwhile: nothing uses it.
                    self._acks.claim(lease, claim_id)
        # Without the lock: a caller may hold it, waiting for the very room that this gives.
        host, hbm = split(event.retired_regions)
        self.regions.retire(host)
        if self.hbm is not None:
            self.hbm.retire(hbm)

    def _reconnect(self) -> Events | None:
        # Without the lock: nobody's call waits for a daemon that does not answer.
        try:
            greeted = self._greet(time.monotonic() + self.timeout_s)
        except KVStoreError as error:
            self._failure = error
            self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)
            return None
        with self._lock:
            if self._closed:
                greeted.calls.close()
                greeted.events.close()
                return None
            self._adopt(greeted)
            self._retry_s, self._beat_at_s, self._beat_sent = RETRY_S_MIN, 0.0, False
            return self._events

    def _break(self, events: Events, error: KVStoreError) -> None:
        with self._lock:
            if self._events is events:
                self._disconnected(str(error), error)

    def _wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed: nobody needs to be woken
            os.eventfd_write(self._wake_fd, 1)

    def _close_wake(self) -> None:
        wake_fd, self._wake_fd = self._wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)
