"""One accepted Unix-socket connection: whole frames in, whole frames and descriptors out.

It talks to the socket directly instead of through an asyncio transport, because transports can't pass
descriptors and cost a few microseconds more per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.errors import ProtocolError
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import (
    FLAG_NO_REPLY,
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
        self._closing = False
        self.closed = False
        self.context: object = None
        """Whatever the owner wants to remember about this connection."""
        loop.add_reader(sock, self._readable)

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send or queue one frame; the descriptors must stay open until it is sent, which for replies is now."""
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

    def pause(self) -> None:
        """Take no more frames until ``resume``: the current one is still being worked on."""
        self._paused = True
        if not self.closed:
            self._loop.remove_reader(self._sock)

    def resume(self) -> None:
        """Go on taking frames."""
        self._paused = False
        if not self.closed:
            self._loop.add_reader(self._sock, self._readable)
            if self._inbox:
                self._loop.call_soon(self._drain)

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
        self._outbox.clear()
        self._on_close(self)

    def _readable(self) -> None:
        try:
            n_bytes = self._sock.recv_into(_received)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not n_bytes:
            self.close()
            return
        self._inbox += _received[:n_bytes]
        self._drain()

    def _drain(self) -> None:
        taken = 0
        try:
            for _ in range(FRAMES_PER_TURN):
                if self.closed or self._closing or self._paused or len(self._inbox) - taken < HEADER_BYTES:
                    break
                length, method, flags, request_id = decode_header(memoryview(self._inbox)[taken : taken + HEADER_BYTES])
                end = taken + HEADER_BYTES + length
                if len(self._inbox) < end:
                    break
                payload = bytes(memoryview(self._inbox)[taken + HEADER_BYTES : end])
                taken = end
                self._on_frame(self, method, flags, request_id, payload)
            else:
                self._loop.call_soon(self._drain)
        except ProtocolError:
            # Nothing after a malformed header can be trusted to be a frame.
            self.close()
            return
        if taken:
            del self._inbox[:taken]

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
        self._outbox.append((data, descriptors))
        with contextlib.suppress(ValueError):
            self._loop.add_writer(self._sock, self._writable)

    def _writable(self) -> None:
        while self._outbox:
            data, descriptors = self._outbox[0]
            sent = self._try_send(data, descriptors)
            if sent is None or sent == 0:
                return
            self._outbox_bytes -= sent
            if sent < len(data):
                self._outbox[0] = (data[sent:], ())
                return
            self._outbox.popleft()
        self._loop.remove_writer(self._sock)
        if self._closing:
            self.close()
