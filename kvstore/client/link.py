"""The way to a daemon: what differs between its Unix socket and gRPC, and nothing else.

Everything above (health, claims, acknowledgements, handles, leases) is the same for both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstore.client.slots import Bytes, Slots
from kvstore.client.transport import ReplyT
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


class Calls(Protocol):
    """A connection for requests, one at a time. Not thread-safe but for ``shut_down``.

    ``late`` collects replies that came after their caller had given up, so that the session can give back what
    they granted.
    """

    late: deque[Message]

    def call(
        self,
        method: Method,
        request: Message,
        kind: type[ReplyT],
        deadline_s: float,
        descriptors: list[int] | None = None,
    ) -> ReplyT:
        """Send a request and wait for its reply, a message of ``kind``.

        Raises what the daemon answered, TimedOutError at the deadline, RefusedError where only this call failed,
        UnavailableError if the connection broke.
        """
        ...

    def send(self, method: Method, request: Message, deadline_s: float, *, no_reply: bool = False) -> int:
        """Send a request; with ``no_reply`` nobody wants its answer."""
        ...

    def close(self) -> None: ...

    def shut_down(self) -> None:
        """Make a call under way on another thread fail; that thread closes."""
        ...


class Events(Protocol):
    """A connection for heartbeats, acknowledgements and the daemon's events."""

    def send(self, method: Method, request: Message, deadline_s: float, *, no_reply: bool = False) -> int:
        """See ``Calls``."""
        ...

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        ...

    def receive_ready(self) -> list[tuple[int, int, int, bytes]]:
        """What has come: (method, flags, request id, payload). Raises UnavailableError if the connection broke."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Greeted:
    """A session's connections, what the daemon said, and its table of generations (uint64, read-only)."""

    calls: Calls
    events: Events
    reply: pb.HelloReply
    generations: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))


class Link(Protocol):
    """A way to a daemon. ``str`` of it is what messages call it."""

    @property
    def address(self) -> Any:
        """Where it leads."""
        ...

    def greet(self, tenant: str, client_name: str, token: bytes, deadline_s: float) -> Greeted:
        """Connect and say hello; with ``token`` back to the old session if that is possible.

        Blocks until ``deadline_s`` (monotonic) at most. Raises UnavailableError if it can't be done, or what else
        the daemon answers (too many clients, for example).
        """
        ...

    def join(self, token: bytes, deadline_s: float) -> Calls:
        """One more connection for the session with this token, for requests that wait. Raises as ``greet``."""
        ...

    def reads_at_once(self, rows: Bytes) -> bool:
        """Whether ``read_at_once`` does better than a lease and a copy, for as much as ``rows``."""
        ...

    def read_at_once(self, session: Any, request: pb.LeaseRequest, rows: Bytes, threads: int) -> pb.LeaseReply | None:
        """See ``Session.read_at_once``."""
        ...

    def slots(
        self, session: Any, claim_id: int, message: pb.Slots | None, block_bytes: int, *, writable: bool
    ) -> Slots:
        """The blocks that a claim holds, None for none, as they are reached this way. ``session`` is a ``Session``."""
        ...
