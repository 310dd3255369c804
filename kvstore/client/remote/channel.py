"""A session's connections over gRPC: calls, events, and chunks of blocks.

A call that meets its deadline is left running for a while: what it grants can then be given back, as over the Unix
socket, instead of being lost until its own deadline.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from kvstore.client.transport import RefusedError, ReplyT, TimedOutError, TurnedAwayError
from kvstore.errors import BadInputError, DeniedError, KVStoreError, ProtocolError, UnavailableError
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from kvstore.wire.framing import FLAG_ERROR, FLAG_REPLY, REPLIES, Method, decode
from kvstore.wire.rpc import SERVICE, SESSION_KEY, rpc_name, sent_error

LATE_S = 10.0
"""How long a call that met its deadline may still be answered."""
HEARTBEAT_S = 600.0
"""How long a heartbeat may be on its way, if the connection stands: a daemon that was stopped may go on."""

Metadata = tuple[tuple[str, str | bytes], ...]
Frame = tuple[int, int, int, bytes]


def error_of(error: grpc.RpcError, address: object) -> KVStoreError:
    """What a failed call means here."""
    sent = sent_error(error)
    status, details = error.code(), error.details() or ""
    if isinstance(sent, DeniedError) and status is grpc.StatusCode.UNAUTHENTICATED:
        return TurnedAwayError(f"{address} does not let this client in: {sent}")
    if sent is not None:
        # What the daemon itself says it can't do now is no end of the connection.
        return RefusedError(str(sent)) if isinstance(sent, UnavailableError) else sent
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimedOutError(f"the daemon at {address} gave no answer in time: is it stopped or overloaded?")
    if status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return TurnedAwayError(f"{address} does not let this client in: {details}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if "larger than max" in details:
            return BadInputError(f"{address} takes no message of this size ({details}): send less in one call")
        return RefusedError(f"{address} is at its limit: {details}")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"{address} does not know this call: install matching versions ({details})")
    return UnavailableError(f"the connection to {address} broke ({status.name if status else '?'}: {details})")


class Channel:
    """The gRPC channel of one session. Its methods may be called from any thread."""

    def __init__(self, channel: grpc.Channel, metadata: Metadata, address: object) -> None:
        self.address = address
        self.message_bytes_max = 1 << 20
        self._channel = channel
        self._metadata = metadata
        self._pid = os.getpid()
        self._unary: dict[int, Any] = {}
        self._closed = False

    def join(self, hello: spb.SessionMessage) -> None:
        """All further calls belong to the session of this hello."""
        self._metadata = (*self._metadata, (SESSION_KEY, hello.hello.session_token))
        self.message_bytes_max = hello.message_bytes_max

    def open_session(self, request: pb.HelloRequest) -> Any:
        """The stream of a session's messages."""
        # The same to the daemon as unary_stream, which in this channel only its reader's thread drives.
        stub = self._channel.stream_stream(f"/{SERVICE}/Session")
        return stub(iter((request.SerializeToString(),)), metadata=self._metadata)

    def start(self, method: Method, request: Message, timeout_s: float) -> Any:
        """Begin a call; returns its future. Raises BadInputError for a message that is too long."""
        if self._closed:
            raise UnavailableError("the connection was closed")
        stub = self._unary.get(method)
        if stub is None:
            stub = self._unary[method] = self._channel.unary_unary(f"/{SERVICE}/{rpc_name(method.name)}")
        payload = request.SerializeToString()
        if len(payload) > self.message_bytes_max:
            raise BadInputError(
                f"a {method.name} message has {len(payload)} bytes; {self.address} takes "
                f"{self.message_bytes_max} at most: send fewer tokens or blocks in one call"
            )
        try:
            return stub.future(payload, timeout=timeout_s, metadata=self._metadata)
        except ValueError as error:
            raise UnavailableError(f"the connection was closed: {error}") from error

    def read(self, request: spb.ReadRequest, timeout_s: float) -> Any:
        """The stream of a Read."""
        stub = self._channel.unary_stream(f"/{SERVICE}/Read")
        return stub(request.SerializeToString(), timeout=timeout_s, metadata=self._metadata)

    def write(self, messages: Iterator[bytes], timeout_s: float) -> Any:
        """The stream of answers to a Write."""
        stub = self._channel.stream_stream(f"/{SERVICE}/Write")
        return stub(messages, timeout=timeout_s, metadata=self._metadata)

    def close(self) -> None:
        """End everything that is under way. Idempotent."""
        self._closed = True
        if self._pid == os.getpid():
            self._channel.close()


class ChannelCalls:
    """See ``Calls``. Over one channel with others of its session; ``owner`` is set for the one that closes it."""

    def __init__(self, channel: Channel, *, owner: bool) -> None:
        self.late: deque[Message] = deque()
        self.channel = channel
        self._owner = owner
        self._unanswered: list[Any] = []

    def call(
        self,
        method: Method,
        request: Message,
        kind: type[ReplyT],
        deadline_s: float,
        descriptors: list[int] | None = None,  # noqa: ARG002 - no descriptor comes this way
    ) -> ReplyT:
        """See ``Calls``."""
        self._after_unanswered(deadline_s)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._timed_out()
        future = self.channel.start(method, request, left_s + LATE_S)
        try:
            return decode(kind, future.result(left_s))
        except grpc.FutureTimeoutError:
            self._take_late(method, future)
            raise self._timed_out() from None
        except grpc.FutureCancelledError:
            raise UnavailableError("the connection was closed") from None
        except grpc.RpcError as error:
            raise error_of(error, self.channel.address) from error
        except BaseException:
            self._take_late(method, future)
            raise

    def send(self, method: Method, request: Message, deadline_s: float, *, no_reply: bool = False) -> int:
        """See ``Calls``. What is called next waits for it: that finds the daemon as it is after this."""
        if not no_reply:
            raise ProtocolError(f"a {method.name} request whose answer somebody wants must be called")
        self._unanswered.append(self.channel.start(method, request, deadline_s - time.monotonic() + LATE_S))
        return 0

    def _after_unanswered(self, deadline_s: float) -> None:
        unanswered, self._unanswered = self._unanswered, []
        for i, future in enumerate(unanswered):
            try:
                future.exception(max(deadline_s - time.monotonic(), 0.0))
            except grpc.FutureTimeoutError:
                self._unanswered = unanswered[i:]
                raise self._timed_out() from None
            except grpc.FutureCancelledError:
                pass  # the channel was closed, which the call will see

    def _take_late(self, method: Method, future: Any) -> None:
        late = self.late

        def take(done: Any) -> None:
            with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError, ProtocolError):
                late.append(decode(REPLIES[method], done.result()))

        future.add_done_callback(take)

    def _timed_out(self) -> TimedOutError:
        return TimedOutError(
            f"the daemon at {self.channel.address} gave no answer in time: is it stopped or overloaded?"
        )

    def close(self) -> None:
        """See ``Calls``."""
        if self._owner:
            self.channel.close()

    def shut_down(self) -> None:
        """See ``Calls``."""
        self.close()


class ChannelEvents:
    """See ``Events``: a session's stream, read by a thread of its own, which ends with the stream."""

    def __init__(self, channel: Channel, request: pb.HelloRequest) -> None:
        self._channel = channel
        self._stream = channel.open_session(request)
        self._inbox: queue.SimpleQueue[Frame | KVStoreError] = queue.SimpleQueue()
        self._wake = _Wake()
        self._unanswered: set[Any] = set()
        self._beat: Any = None
        self._pid = os.getpid()
        self._hello: queue.SimpleQueue[spb.SessionMessage | KVStoreError] = queue.SimpleQueue()
        threading.Thread(
            target=_listen,
            args=(self._stream, self._hello, self._inbox, self._wake, channel.address),
            name="kvstore-events",
            daemon=True,
        ).start()

    def hello(self, deadline_s: float) -> spb.SessionMessage:
        """The first message; once. Raises what the daemon answered, or UnavailableError."""
        try:
            first = self._hello.get(timeout=max(deadline_s - time.monotonic(), 0.001))
        except queue.Empty:
            raise TimedOutError(f"the daemon at {self._channel.address} gave no answer in time") from None
        if isinstance(first, KVStoreError):
            raise first
        return first

    def fileno(self) -> int:
        """See ``Events``."""
        return self._wake.fd

    def send(self, method: Method, request: Message, deadline_s: float, *, no_reply: bool = False) -> int:
        """See ``Events``: the answer to a heartbeat comes with the events."""
        if no_reply:
            # Kept until it is done: gRPC cancels a call whose future nobody has.
            future = self._channel.start(method, request, deadline_s - time.monotonic() + LATE_S)
            self._unanswered.add(future)
            future.add_done_callback(self._unanswered.discard)
        else:
            self._beat = future = self._channel.start(method, request, HEARTBEAT_S)
            future.add_done_callback(_answer_to(method, self._inbox, self._wake, self._channel.address))
        return 0

    def receive_ready(self) -> list[Frame]:
        """See ``Events``."""
        self._wake.clear()
        frames: list[Frame] = []
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, TurnedAwayError):
                    raise item
                if isinstance(item, KVStoreError):
                    raise UnavailableError(str(item)) from item
                frames.append(item)
        return frames

    def close(self) -> None:
        """See ``Events``."""
        if self._pid == os.getpid():
            self._stream.cancel()

    def __del__(self) -> None:
        self.close()


class _Wake:
    """An eventfd that lives as long as anybody may write to it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        os.close(self.fd)


def _listen(
    stream: Any,
    hello: queue.SimpleQueue[spb.SessionMessage | KVStoreError],
    inbox: queue.SimpleQueue[Frame | KVStoreError],
    wake: _Wake,
    address: object,
) -> None:
    """The thread of a session's stream. It keeps neither the session nor its client."""
    ended: KVStoreError = UnavailableError(f"the daemon at {address} has ended the session")
    try:
        for i, payload in enumerate(stream):
            message = decode(spb.SessionMessage, payload)
            if i == 0:
                hello.put(message)
            elif message.HasField("event"):
                inbox.put((Method.EVENT, 0, 0, message.event.SerializeToString()))
                wake.set()
    except grpc.RpcError as error:
        ended = error_of(error, address)
    except ProtocolError as error:
        ended = error
    hello.put(ended)
    inbox.put(ended)
    wake.set()


def _answer_to(
    method: Method, inbox: queue.SimpleQueue[Frame | KVStoreError], wake: _Wake, address: object
) -> Callable[[Any], None]:
    def answered(future: Any) -> None:
        try:
            inbox.put((method, FLAG_REPLY, 0, future.result()))
        except grpc.FutureCancelledError:
            inbox.put(UnavailableError("the connection was closed"))
        except grpc.RpcError as error:
            meant = error_of(error, address)
            if isinstance(meant, UnavailableError) and not isinstance(meant, RefusedError):
                inbox.put(meant)
            else:
                inbox.put((method, FLAG_REPLY | FLAG_ERROR, 0, b""))
        wake.set()

    return answered
