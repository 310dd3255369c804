"""Saying hello: from nothing to the two connections of a session."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from kvstore.client.address import Address
from kvstore.client.glance import GlancingSession, glance
from kvstore.client.link import Greeted
from kvstore.client.slots import Bytes, MappedSlots, MappingSession
from kvstore.client.transport import Transport
from kvstore.errors import EndedError, KVStoreError, ProtocolError, UnavailableError
from kvstore.native import Mapping
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, Method


@dataclass(frozen=True, slots=True)
class SocketLink:
    """The way over a Unix socket: see ``Link``. The daemon's memory is mapped."""

    address: Address

    def __str__(self) -> str:
        return str(self.address)

    def greet(self, tenant: str, client_name: str, token: bytes, deadline_s: float) -> Greeted:
        """See ``Link``."""
        return greet(self.address, tenant, client_name, token, deadline_s)

    def join(self, token: bytes, deadline_s: float) -> Transport:
        """See ``Link``."""
        return join(self.address, token, pb.CHANNEL_WAITS, deadline_s)

    def reads_at_once(self, rows: Bytes) -> bool:  # noqa: ARG002 - see ``Link``
        """See ``Link``: of however much."""
        return True

    def read_at_once(
        self, session: GlancingSession, request: pb.LeaseRequest, rows: Bytes, threads: int
    ) -> pb.LeaseReply | None:
        """See ``Link``."""
        return glance(session, request, rows, threads)

    def slots(
        self,
        session: MappingSession,
        claim_id: int,  # noqa: ARG002 - the slots say all
        message: pb.Slots | None,
        block_bytes: int,
        *,
        writable: bool,
    ) -> MappedSlots:
        """See ``Link``. Call with the session's lock held."""
        return MappedSlots(session, message, block_bytes, writable=writable)


def greet(address: Address, tenant: str, client_name: str, token: bytes, deadline_s: float) -> Greeted:
    """Connect twice and say hello; with ``token`` back to the old session if the daemon still knows it.

    Blocks until ``deadline_s`` (monotonic) at most. Raises UnavailableError if it can't be done, or what else
    the daemon answers (too many clients, for example).
    """
    hello = _hello_of(pb.CHANNEL_CALLS, token)
    hello.tenant, hello.client_name = tenant, client_name
    fds: list[int] = []
    opened: list[Transport] = []
    try:
        calls = _connect(address, deadline_s)
        opened.append(calls)
        reply = _hello(calls, hello, deadline_s, fds)
        events = join(address, reply.session_token, pb.CHANNEL_EVENTS, deadline_s)
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
        raise UnavailableError(f"the daemon at {address} can't be used: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)


def join(address: Address, token: bytes, channel: pb.Channel, deadline_s: float) -> Transport:
    """One more connection for the session with this token. Blocks until ``deadline_s`` at most; raises as ``greet``."""
    transport = _connect(address, deadline_s)
    try:
        _hello(transport, _hello_of(channel, token), deadline_s, None)
    except BaseException:
        transport.close()
        raise
    return transport


def _connect(address: Address, deadline_s: float) -> Transport:
    return Transport(address, max(deadline_s - time.monotonic(), 0.001))


def _hello_of(channel: pb.Channel, token: bytes) -> pb.HelloRequest:
    return pb.HelloRequest(
        version_min=PROTOCOL_VERSION_MIN, version_max=PROTOCOL_VERSION_MAX, channel=channel, session_token=token
    )


def _hello(transport: Transport, hello: pb.HelloRequest, deadline_s: float, fds: list[int] | None) -> pb.HelloReply:
    return transport.call(Method.HELLO, hello, pb.HelloReply, deadline_s, fds)
