"""``RemoteLink``: the way to a daemon over gRPC."""

from __future__ import annotations

import os
import weakref

import grpc
import grpc.experimental

from kvstore.client.link import Greeted
from kvstore.client.remote.channel import Channel, ChannelCalls, ChannelEvents
from kvstore.client.remote.diagnosis import tls_trouble
from kvstore.client.remote.slots import CALL_BYTES_MAX, BulkSession, RemoteSlots, read_at_once
from kvstore.client.remote.target import UNIX, Target
from kvstore.client.slots import Bytes
from kvstore.client.transport import NoWayError, TimedOutError, TurnedAwayError
from kvstore.errors import DeniedError, EndedError, ProtocolError, UnavailableError
from kvstore.native.heap import keep_freed_messages
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN

KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 20_000, 10_000
"""A server that is gone without a word is noticed after the sum."""

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # what comes is what was asked for
    ("grpc.max_send_message_length", -1),  # the server's limit is checked before
    ("grpc.use_local_subchannel_pool", 1),  # a new channel tries at once, whatever others have met
    ("grpc.enable_retries", 0),  # a call is made once
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Whoever waits for a message receives it: a thread of the channel that hands it over costs a tenth of a Read.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
)


_pid = 0
"""The process that has used gRPC: its threads are not in a forked child, where it would wait for them for ever."""


class RemoteLink:
    """See ``Link``. Every session is a new one: nothing here outlives a connection."""

    def __init__(self, target: Target) -> None:
        keep_freed_messages()
        self.address = target
        self._channels: weakref.WeakValueDictionary[bytes, Channel] = weakref.WeakValueDictionary()

    def __str__(self) -> str:
        return str(self.address)

    def greet(self, tenant: str, client_name: str, token: bytes, deadline_s: float) -> Greeted:  # noqa: ARG002
        """See ``Link``. Raises DeniedError for a token or a tenant that is not let in."""
        _must_not_be_forked(self.address)
        channel = Channel(self._connect(), self._metadata(), self.address)
        hello = pb.HelloRequest(
            version_min=PROTOCOL_VERSION_MIN, version_max=PROTOCOL_VERSION_MAX, tenant=tenant, client_name=client_name
        )
        events = ChannelEvents(channel, hello)
        try:
            first = events.hello(deadline_s)
        except BaseException as error:
            events.close()
            channel.close()
            if isinstance(error, TimedOutError | TurnedAwayError):
                raise
            if isinstance(error, DeniedError):
                raise TurnedAwayError(f"{self.address} does not let this client in: {error}") from error
            if isinstance(error, UnavailableError):
                if trouble := tls_trouble(self.address, str(error), deadline_s):
                    raise NoWayError(f"{self.address} can't be used: {trouble}") from error
                raise UnavailableError(
                    f"no kvstore daemon answers at {self.address} ({error}): "
                    f"start one with `kvstore serve {self.address.serve_option}`"
                ) from error
            if isinstance(error, EndedError | ProtocolError):
                raise UnavailableError(f"the daemon at {self.address} can't be used: {error}") from error
            raise
        channel.join(first)
        self._channels[first.hello.session_token] = channel
        return Greeted(ChannelCalls(channel, owner=True), events, first.hello)

    def join(self, token: bytes, deadline_s: float) -> ChannelCalls:  # noqa: ARG002 - takes no round trip
        """See ``Link``."""
        channel = self._channels.get(token)
        if channel is None:
            raise UnavailableError(f"the connection to {self.address} was lost meanwhile")
        return ChannelCalls(channel, owner=False)

    def reads_at_once(self, rows: Bytes) -> bool:
        """See ``Link``: what one call may move."""
        return rows.nbytes <= CALL_BYTES_MAX

    def read_at_once(
        self,
        session: BulkSession,
        request: pb.LeaseRequest,
        rows: Bytes,
        threads: int,  # noqa: ARG002 - see ``Link``: they come over one connection
    ) -> pb.LeaseReply:
        """See ``Link``."""
        return read_at_once(session, request, rows)

    def slots(
        self, session: BulkSession, claim_id: int, message: pb.Slots | None, block_bytes: int, *, writable: bool
    ) -> RemoteSlots:
        """See ``Link``."""
        return RemoteSlots(session, claim_id, message, block_bytes, writable=writable)

    def _metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return (("authorization", f"Bearer {self.address.token}"),) if self.address.token else ()

    def _connect(self) -> grpc.Channel:
        target = self.address
        if target.plain or target.address.startswith(UNIX):
            return grpc.insecure_channel(target.place, options=_OPTIONS)
        certificate, key = target.client_certificate or (None, None)
        credentials = grpc.ssl_channel_credentials(target.root_certificates, key, certificate)
        return grpc.secure_channel(target.place, credentials, options=_OPTIONS)


def _must_not_be_forked(target: Target) -> None:
    global _pid
    _pid = _pid or os.getpid()
    if _pid != os.getpid():
        raise NoWayError(
            f"{target} can't be used here: this process was forked from one that used gRPC, which does not survive "
            "that; start it with the method 'spawn', or make no client before the fork"
        )
