"""What a session has yet to tell the daemon: that something is no longer used. Never blocks its callers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from google.protobuf.message import Message

from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


class Sender(Protocol):
    """A connection that takes requests whose answers nobody wants."""

    def send(self, method: Method, request: Message, deadline_s: float, *, no_reply: bool = False) -> int:
        """See ``Events``."""
        ...


class Acknowledgements:
    """A queue, emptied by the session's thread. Methods may be called from any thread; ``wake`` wakes that one."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._queue: deque[tuple[Method, Message]] = deque()
        self._sending = threading.Lock()

    def add(self, method: Method, request: Message) -> None:
        """Send it later."""
        self._queue.append((method, request))
        self._wake()

    def claim(self, lease: bool, claim_id: int) -> None:
        """A lease or a reservation is not used (any more)."""
        if lease:
            self.add(Method.RELEASE, pb.ReleaseRequest(lease_id=claim_id))
        else:
            self.add(Method.ABORT, pb.AbortRequest(reservation_id=claim_id))

    def give_back(self, replies: Iterable[Message]) -> None:
        """What these replies granted is of no use to anyone."""
        for reply in replies:
            if isinstance(reply, pb.LeaseReply) and reply.lease_id:
                self.claim(True, reply.lease_id)
            elif isinstance(reply, pb.ReserveReply) and reply.reservation_id:
                self.claim(False, reply.reservation_id)
            elif isinstance(reply, pb.PinReply) and reply.pin_id:
                self.add(Method.UNPIN, pb.UnpinRequest(pin_id=reply.pin_id))

    def send(self, events: Sender, deadline_s: float) -> None:
        """Send all that waits; what was not sent when that fails stays."""
        with self._sending:
            while self._queue:
                events.send(*self._queue[0], deadline_s, no_reply=True)
                self._queue.popleft()

    def clear(self) -> None:
        """The daemon has forgotten all of it."""
        with self._sending:
            self._queue.clear()
