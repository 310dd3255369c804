"""Saying hello: from nothing to the two connections of a session."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.client.transport import Transport
from kvstore.errors import EndedError, KVStoreError, ProtocolError, UnavailableError
from kvstore.native import Mapping
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, Method


@dataclass(frozen=True, slots=True)
class Greeted:
    """A session's connections, what the daemon said, and its table of generations (uint64, read-only)."""

    calls: Transport
    events: Transport
    reply: pb.HelloReply
    generations: NDArray[np.uint64]


def greet(path: Path, tenant: str, client_name: str, token: bytes, deadline_s: float) -> Greeted:
    """Connect twice and say hello; with ``token`` back to the old session if the daemon still knows it.

    Blocks until ``deadline_s`` (monotonic) at most. Raises UnavailableError if it can't be done, or what else
    the daemon answers (too many clients, for example).
    """
    hello = _hello_of(pb.CHANNEL_CALLS, token)
    hello.tenant, hello.client_name = tenant, client_name
    fds: list[int] = []
    opened: list[Transport] = []
    try:
        calls = _connect(path, deadline_s)
        opened.append(calls)
        reply = _hello(calls, hello, deadline_s, fds)
        events = join(path, reply.session_token, pb.CHANNEL_EVENTS, deadline_s)
        opened.append(events)
        if len(fds) != 1:
            raise UnavailableError("the daemon passed no descriptor: is a descriptor limit reached?")
        table = Mapping(fds[0], reply.generations_bytes, writable=False, inherit=False)
        return Greeted(calls, events, reply, table.array().view(np.uint64))
    except (KVStoreError, OSError, ValueError) as error:
        for transport in opened:
            transport.close()
        if isinstance(error, KVStoreError) and not isinstance(error, EndedError | ProtocolError):
            raise
        raise UnavailableError(f"the daemon at {path} can't be used: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)


def join(path: Path, token: bytes, channel: pb.Channel, deadline_s: float) -> Transport:
    """One more connection for the session with this token. Blocks until ``deadline_s`` at most; raises as ``greet``."""
    transport = _connect(path, deadline_s)
    try:
        _hello(transport, _hello_of(channel, token), deadline_s, None)
    except BaseException:
        transport.close()
        raise
    return transport


def _connect(path: Path, deadline_s: float) -> Transport:
    return Transport(path, max(deadline_s - time.monotonic(), 0.001))


def _hello_of(channel: pb.Channel, token: bytes) -> pb.HelloRequest:
    return pb.HelloRequest(
        version_min=PROTOCOL_VERSION_MIN, version_max=PROTOCOL_VERSION_MAX, channel=channel, session_token=token
    )


def _hello(transport: Transport, hello: pb.HelloRequest, deadline_s: float, fds: list[int] | None) -> pb.HelloReply:
    return transport.call(Method.HELLO, hello, pb.HelloReply, deadline_s, fds)
