"""One accepted Unix-socket connection: whole frames in, whole frames and descriptors out.

It talks to the socket directly instead of through an asyncio transport, because transports can't pass
descriptors and cost a few microseconds more per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.errors import ProtocolError
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import (
    FLAG_NO_REPLY,
    FLAG_REPLY,
    HEADER_BYTES,
    Method,
    decode_header,
    encode,
)

RECEIVE_BYTES = 256 << 10
BACKLOG_BYTES_MAX = 128 << 20
"""A client that lets so much pile up is cut off rather than kept in memory."""

_received = memoryview(bytearray(RECEIVE_BYTES))
"""Shared by all connections of the loop's thread: a fresh buffer for each read would be mapped and unmapped."""

BACKLOG_BYTES_PAUSED = 1 << 20
"""Replies that a client has yet to read, or frames that have yet to be worked on: no more is read beyond this."""

PAYLOAD_BYTES_BEFORE_HELLO = 4096

FRAMES_PER_TURN = 32
"""So that one busy client can't keep the loop from the others."""


class Connection:
    """``on_frame(connection, method, flags, request_id, payload)`` is called for each whole frame, in order;
    ``on_close(connection)`` once. Single-threaded; no call blocks."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_frame: Callable[[Connection, int, int, int, bytes], None],
        on_close: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_close = on_close
        self._inbox = bytearray()
        self._outbox: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._outbox_bytes = 0
        self._paused = False
        self._on_hangup: Callable[[], None] | None = None
        self._closing = False
        self._ended = False
        self.closed = False
        self.payload_bytes_max = PAYLOAD_BYTES_BEFORE_HELLO
        """Raised by the owner once it knows who this is."""
        self.context: object = None
        """Whatever the owner wants to remember about this connection."""
        loop.add_reader(sock, self._readable)

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send or queue one frame. Descriptors are duplicated if they have to wait: theirs may be closed by then."""
        if self.closed:
            return
        if self._outbox:
            self._queue(memoryview(frame), tuple(descriptors))
            return
        sent = self._try_send(memoryview(frame), tuple(descriptors))
        if sent is not None and sent < len(frame):
            self._queue(memoryview(frame)[sent:], () if sent else tuple(descriptors))

    def send_event(self, event: pb.Event) -> None:
        """Send one event, for which no reply comes."""
        self.send(encode(Method.EVENT, FLAG_NO_REPLY, 0, event))

    def pause(self, on_hangup: Callable[[], None]) -> None:
        """Take no more frames until ``resume``: the current one is still being worked on.

        ``on_hangup`` is called if the client goes away meanwhile, or says that nothing more will come.
        """
        self._paused, self._on_hangup = True, on_hangup
        self._update_reader()

    def resume(self) -> None:
        """Go on taking frames."""
        self._paused, self._on_hangup = False, None
        self._go_on()

    def _go_on(self) -> None:
        self._update_reader()
        if self._inbox or self._ended:
            self._loop.call_soon(self._drain)

    @property
    def _blocked(self) -> bool:
        # Who does not read his replies gets no further ones.
        return self.closed or self._closing or self._paused or self._outbox_bytes > BACKLOG_BYTES_PAUSED

    @property
    def _reading(self) -> bool:
        if self._ended or self._closing or self._outbox_bytes > BACKLOG_BYTES_PAUSED:
            return False
        # While paused too, as the end of the connection shows in nothing else.
        return not self._paused or len(self._inbox) <= BACKLOG_BYTES_PAUSED

    def _update_reader(self) -> None:
        if self.closed:
            return
        if not self._reading:
            self._loop.remove_reader(self._sock)
        else:
            self._loop.add_reader(self._sock, self._readable)

    def close_after_sending(self) -> None:
        """Take no more frames, send what is queued, then close."""
        self._closing = True
        if not self._outbox:
            self.close()

    def close(self) -> None:
        """Close at once. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for _, descriptors in self._outbox:
            for descriptor in descriptors:
                os.close(descriptor)
        self._outbox.clear()
        self._on_close(self)

    def after_fork(self) -> None:
        """In a forked child: the connection ends when its owner closes it, whatever becomes of the child.

        Nothing else may be done there: the loop's selector is shared with the owner.
        """
        self.closed = True
        self._sock.close()

    def _readable(self) -> None:
        try:
            n_bytes = self._sock.recv_into(_received)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if n_bytes:
            self._inbox += _received[:n_bytes]
            self._drain()
            return
        # What was sent before the end counts: releases above all.
        self._ended = True
        self._update_reader()
        if self._on_hangup is not None:
            self._on_hangup()
        self._drain()

    def _drain(self) -> None:
        taken, more = 0, False
        try:
            for _ in range(FRAMES_PER_TURN):
                frame = None if self._blocked else self._frame_at(taken)
                if frame is None:
                    break
                method, flags, request_id, payload, taken = frame
                self._on_frame(self, method, flags, request_id, payload)
            else:
                more = True
        except ProtocolError:
            # Nothing after a malformed header can be trusted to be a frame.
            self.close()
            return
        if taken:
            del self._inbox[:taken]
        if self._paused:
            self._update_reader()  # how much waits has just changed
        if more:
            self._loop.call_soon(self._drain)
        elif self._ended and not self._paused:
            self.close()

    def _frame_at(self, start: int) -> tuple[int, int, int, bytes, int] | None:
        """(method, flags, request id, payload, end) of the whole frame there, None if it is not all there."""
        if len(self._inbox) - start < HEADER_BYTES:
            return None
        view = memoryview(self._inbox)
        length, method, flags, request_id = decode_header(view[start : start + HEADER_BYTES])
        if flags & FLAG_REPLY:
            raise ProtocolError("a client sent a reply")
        if length > self.payload_bytes_max:
            raise ProtocolError(f"a frame of {length} bytes; the most is {self.payload_bytes_max} here")
        end = start + HEADER_BYTES + length
        if len(self._inbox) < end:
            return None
        return method, flags, request_id, bytes(view[start + HEADER_BYTES : end]), end

    def _try_send(self, data: memoryview, descriptors: tuple[int, ...]) -> int | None:
        try:
            if descriptors:
                return socket.send_fds(self._sock, [data], list(descriptors))
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.close()
            return None

    def _queue(self, data: memoryview, descriptors: tuple[int, ...]) -> None:
        self._outbox_bytes += len(data)
        if self._outbox_bytes > BACKLOG_BYTES_MAX:
            self.close()
            return
        self._outbox.append((data, tuple(map(os.dup, descriptors))))
        self._update_reader()
        with contextlib.suppress(ValueError):
            self._loop.add_writer(self._sock, self._writable)

    def _writable(self) -> None:
        while self._outbox:
            data, descriptors = self._outbox[0]
            sent = self._try_send(data, descriptors)
            if sent is None or sent == 0:
                return
            for descriptor in descriptors:
                os.close(descriptor)
            self._outbox_bytes -= sent
            if sent < len(data):
                self._outbox[0] = (data[sent:], ())
                return
            self._outbox.popleft()
        self._loop.remove_writer(self._sock)
        self._go_on()
        if self._closing:
            self.close()
