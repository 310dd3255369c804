"""A blocking framed socket with a deadline on every call."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import threading
import time
from collections import defaultdict, deque
from typing import TypeVar

from google.protobuf.message import Message

from kvstore.client.address import Address
from kvstore.errors import DeniedError, ProtocolError, UnavailableError
from kvstore.wire import faults
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import (
    FLAG_ERROR,
    FLAG_NO_REPLY,
    FLAG_REPLY,
    HEADER_BYTES,
    MAX_DESCRIPTORS,
    REPLIES,
    Method,
    decode,
    decode_header,
    encode,
)

RECEIVE_BYTES = 64 << 10
READY_S = 1.0
SPIN_S = 0.0002
"""How long a caller looks for its reply before it sleeps: most replies are there by then, and waking up costs
more than looking."""

VAIN_MAX = 6
"""After so many looks in vain in a row (or more) 2**6 - 1 replies are waited for asleep before the next look."""

CROWDED_MAX, GOOD_ENOUGH = 10, 1000
"""As often as the core was taken away between two looks the exponent grows by one, up to 2**10 - 1 replies asleep;
after so many good looks in a row it is 0 again."""


ReplyT = TypeVar("ReplyT", bound=Message)


class TimedOutError(UnavailableError):
    """No answer by the deadline. The connection is intact; the answer may still come and is then skipped."""


class RefusedError(UnavailableError):
    """Only this call could not be served; says nothing about the daemon or the connection."""


class NoWayError(UnavailableError):
    """A daemon may well be there, but this client has no way to it as things are; trying again alone won't help."""


class TurnedAwayError(NoWayError, DeniedError):
    """The daemon does not let this client in (any more): no call of its session will be served until it does."""


class _Looks:
    """How looking for replies of one method went."""

    __slots__ = ("n_asleep", "n_vain")

    def __init__(self) -> None:
        self.n_vain = 0
        """Looks in vain in a row."""
        self.n_asleep = 0
        """Replies that will be waited for asleep before the next look."""


class Transport:
    """One connection to a daemon. Not thread-safe.

    ``late`` collects replies that came after their caller had given up, so that the session can give back
    what they granted.
    """

    def __init__(self, address: Address, timeout_s: float) -> None:
        """Connect; raises UnavailableError with the way out if nobody answers there."""
        self.late: deque[Message] = deque()
        self._address = address
        self._inbox = bytearray()
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._next_id = 1
        self._sock = address.connect(timeout_s)
        # On a single core the daemon can only answer while this process sleeps.
        self._spin_s = SPIN_S if address.spins and len(os.sched_getaffinity(0)) > 1 else 0.0
        self._looks: defaultdict[int, _Looks] = defaultdict(_Looks)
        self._awaited = 0
        """The method whose reply is awaited: one that takes long says nothing of the others."""
        self._n_asleep = 0
        self._seen = (threading.get_ident(), times_preempted())
        self._n_crowded = 0
        self._n_good = 0
        self._poller = select.poll()
        self._poller.register(self._sock, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def shut_down(self) -> None:
        """Make a call under way on another thread fail; that thread closes. Ends the connection for forks too."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def call(
        self,
        method: Method,
        request: Message,
        kind: type[ReplyT],
        deadline_s: float,
        descriptors: list[int] | None = None,
    ) -> ReplyT:
        """Send a request and wait for its reply, a message of ``kind``.

        With ``descriptors`` a list, received ones are appended to it; the caller owns and closes them.
        Raises what the daemon answered, TimedOutError at the deadline, UnavailableError if the connection broke.
        """
        request_id = self.send(method, request, deadline_s)
        while True:
            reply_method, flags, reply_id, payload = self.receive(deadline_s, descriptors)
            if not flags & FLAG_REPLY:
                continue
            if reply_id == request_id:
                if flags & FLAG_ERROR:
                    raise faults.to_exception(decode(pb.Error, payload))
                return decode(kind, payload)
            if not flags & FLAG_ERROR:
                self.late.append(decode(REPLIES[reply_method], payload))

    def send(self, method: Method, request: Message, deadline_s: float, *, no_reply: bool = False) -> int:
        """Send one request and return its id; a partly sent frame at the deadline breaks the connection."""
        request_id = self._next_id
        self._next_id += 1
        self._awaited = method
        frame = encode(method, FLAG_NO_REPLY if no_reply else 0, request_id, request)
        try:
            self._arm(deadline_s)  # fails where another thread has closed the connection
            self._sock.sendall(frame)
        except OSError as error:
            # Part of the frame may be gone: what follows would not be understood.
            self.close()
            raise UnavailableError(f"the daemon took no {method.name} request: {error}") from error
        return request_id

    def receive(self, deadline_s: float, descriptors: list[int] | None = None) -> tuple[int, int, int, bytes]:
        """The next whole frame: (method, flags, request id, payload)."""
        while (frame := self._take()) is None:
            self._inbox += self._receive_some(deadline_s, descriptors)
        return frame

    def receive_ready(self) -> list[tuple[int, int, int, bytes]]:
        """The whole frames that are there, after one read; for use when the socket is readable."""
        self._inbox += self._receive_some(time.monotonic() + READY_S, None)
        frames = []
        while (frame := self._take()) is not None:
            frames.append(frame)
        return frames

    def _take(self) -> tuple[int, int, int, bytes] | None:
        if len(self._inbox) < HEADER_BYTES:
            return None
        length, method, flags, request_id = decode_header(self._inbox)
        end = HEADER_BYTES + length
        if len(self._inbox) < end:
            return None
        payload = bytes(memoryview(self._inbox)[HEADER_BYTES:end])
        del self._inbox[:end]
        if flags & FLAG_REPLY and method not in REPLIES:
            raise ProtocolError(f"a reply to method {method} can't be")
        return method, flags, request_id, payload

    def _receive_some(self, deadline_s: float, descriptors: list[int] | None) -> memoryview:
        self._wait_readable(deadline_s)
        try:
            if descriptors is None:
                data = self._received[: self._sock.recv_into(self._received)]
            else:
                part, fds, _, _ = socket.recv_fds(self._sock, RECEIVE_BYTES, MAX_DESCRIPTORS)
                data = memoryview(part)
                descriptors.extend(fds)
        except OSError as error:
            self.close()
            raise UnavailableError(f"the connection to the daemon broke: {error}") from error
        if not data:
            self.close()
            raise UnavailableError("the daemon closed the connection")
        return data

    def _wait_readable(self, deadline_s: float) -> None:
        """Look for a moment, then sleep until there is something to read. TimedOutError at the deadline."""
        # By ``poll``, not by reading in vain: that would take the socket's lock away from the sender.
        if not self._poller.poll(0) and not self._look(deadline_s):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._poller.poll(left_s * 1000):
                raise self._timed_out()

    def _look(self, deadline_s: float) -> bool:
        """Whether there is something to read after a moment of looking for it.

        Where all cores are busy the daemon gets one sooner if this process sleeps, and who looks for long is the last
        to get one. So looks in vain make the next ones rarer, until one is worth it. And who looks, never sleeping, has
        its core taken away in the end, for as long as all others who want it take their turns: with many clients a
        hundred times as long as a reply. So that makes looks rarer, too, even if all of them are worth it.
        """
        if self._n_asleep or not self._spin_s:
            self._n_asleep -= self._n_asleep > 0
            return False
        looks = self._looks[self._awaited]
        if looks.n_asleep:
            looks.n_asleep -= 1
            return False
        if self._lost_core():
            self._n_good = 0
            self._n_crowded = min(self._n_crowded + 1, CROWDED_MAX)
            self._n_asleep = (1 << self._n_crowded) - 1
            return False
        poll, until_s = self._poller.poll, min(time.monotonic() + self._spin_s, deadline_s)
        while time.monotonic() < until_s:
            if poll(0):
                looks.n_vain = 0
                self._n_good += 1
                if self._n_good >= GOOD_ENOUGH:
                    self._n_crowded = 0
                return True
        looks.n_vain = min(looks.n_vain + 1, VAIN_MAX)
        looks.n_asleep = (1 << looks.n_vain) - 1
        return False

    def _lost_core(self) -> bool:
        """Whether this thread has had its core taken away since it looked last, if no other thread has since."""
        seen, self._seen = self._seen, (threading.get_ident(), times_preempted())
        return seen[0] == self._seen[0] and seen != self._seen

    def _arm(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._timed_out()
        self._sock.settimeout(left_s)

    def _timed_out(self) -> TimedOutError:
        return TimedOutError(f"the daemon at {self._address} gave no answer in time: is it stopped or overloaded?")


def times_preempted() -> int:
    """How often this thread had its core taken away while it wanted to go on."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
