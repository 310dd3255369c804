"""Frames on the Unix socket: a 16-byte header, then one protobuf message.

    offset  size  field
    0       4     payload length in bytes (uint32, little-endian)
    4       2     method (uint16), the numbers of ``Method``
    6       2     flags (uint16): bit 0 = reply, bit 1 = error, bit 2 = no reply wanted
    8       8     request id (uint64), chosen by the caller and repeated in the reply

docs/FORMAT.md is the reference for other implementations.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.errors import BadInputError, ProtocolError
from kvstore.wire import kvstore_pb2 as pb

PROTOCOL_VERSION_MIN = 1
PROTOCOL_VERSION_MAX = 1

HEADER = struct.Struct("<IHHQ")
HEADER_BYTES = HEADER.size

FLAG_REPLY = 1
FLAG_ERROR = 2
FLAG_NO_REPLY = 4
KNOWN_FLAGS = FLAG_REPLY | FLAG_ERROR | FLAG_NO_REPLY

MAX_PAYLOAD_BYTES = 64 << 20
"""A prompt of 16 million tokens fits; anything longer is refused before it is read."""

MAX_SMALL_PAYLOAD_BYTES = 1 << 20
"""The same for requests that carry no prompt."""

MessageT = TypeVar("MessageT", bound=Message)

MAX_DESCRIPTORS = 64
"""Most descriptors in one reply; the kernel's own limit is 253."""


class Method(IntEnum):
    """What a frame asks for. Numbers are never reused."""

    HELLO = 1
    HEARTBEAT = 2
    OPEN_NAMESPACE = 3
    MATCH = 4
    LEASE = 5
    ATTACH_LEASE = 6
    RELEASE = 7
    RENEW = 8
    RESERVE = 9
    COMMIT = 10
    ABORT = 11
    MAP_REGIONS = 12
    REGIONS_MAPPED = 13
    REGIONS_UNMAPPED = 14
    PIN = 15
    UNPIN = 16
    STATS = 17
    GOODBYE = 18
    EVENT = 19
    PREFETCH = 20
    PERSIST = 21
    NAMESPACES = 22
    CLEAR = 23
    INSPECT = 24
    CLAIMS = 25
    WATCH = 26
    VERIFY = 27
    LEASE_SHARD = 30
    END_SESSION = 31
    OVERLAP = 34
    TENANTS = 35
    EXPLAIN = 36
    RECORD = 37
    MAP_HBM = 38


REQUESTS: dict[int, type[Message]] = {
    Method.HELLO: pb.HelloRequest,
    Method.HEARTBEAT: pb.HeartbeatRequest,
    Method.OPEN_NAMESPACE: pb.OpenNamespaceRequest,
    Method.MATCH: pb.MatchRequest,
    Method.LEASE: pb.LeaseRequest,
    Method.ATTACH_LEASE: pb.AttachLeaseRequest,
    Method.RELEASE: pb.ReleaseRequest,
    Method.RENEW: pb.RenewRequest,
    Method.RESERVE: pb.ReserveRequest,
    Method.COMMIT: pb.CommitRequest,
    Method.ABORT: pb.AbortRequest,
    Method.MAP_REGIONS: pb.MapRegionsRequest,
    Method.REGIONS_MAPPED: pb.RegionsMappedRequest,
    Method.REGIONS_UNMAPPED: pb.RegionsUnmappedRequest,
    Method.PIN: pb.PinRequest,
    Method.UNPIN: pb.UnpinRequest,
    Method.STATS: pb.StatsRequest,
    Method.GOODBYE: pb.GoodbyeRequest,
    Method.EVENT: pb.Event,
    Method.PREFETCH: pb.PrefetchRequest,
    Method.PERSIST: pb.PersistRequest,
    Method.NAMESPACES: pb.NamespacesRequest,
    Method.CLEAR: pb.ClearRequest,
    Method.INSPECT: pb.InspectRequest,
    Method.CLAIMS: pb.ClaimsRequest,
    Method.TENANTS: pb.TenantsRequest,
    Method.WATCH: pb.WatchRequest,
    Method.VERIFY: pb.VerifyRequest,
    Method.LEASE_SHARD: pb.LeaseShardRequest,
    Method.END_SESSION: pb.EndSessionRequest,
    Method.OVERLAP: pb.OverlapRequest,
    Method.EXPLAIN: pb.ExplainRequest,
    Method.RECORD: pb.RecordRequest,
    Method.MAP_HBM: pb.MapHbmRequest,
}

PROMPTS = frozenset(
    {
        Method.MATCH, Method.LEASE, Method.RESERVE, Method.PIN, Method.PREFETCH, Method.PERSIST, Method.INSPECT,
        Method.OVERLAP, Method.EXPLAIN,
    }
)  # fmt: skip
"""Requests that carry prompts."""

REPLIES: dict[int, type[Message]] = {
    Method.HELLO: pb.HelloReply,
    Method.HEARTBEAT: pb.HeartbeatReply,
    Method.OPEN_NAMESPACE: pb.OpenNamespaceReply,
    Method.MATCH: pb.MatchReply,
    Method.LEASE: pb.LeaseReply,
    Method.ATTACH_LEASE: pb.LeaseReply,
    Method.RELEASE: pb.ReleaseReply,
    Method.RENEW: pb.RenewReply,
    Method.RESERVE: pb.ReserveReply,
    Method.COMMIT: pb.CommitReply,
    Method.ABORT: pb.AbortReply,
    Method.MAP_REGIONS: pb.MapRegionsReply,
    Method.REGIONS_MAPPED: pb.RegionsMappedReply,
    Method.REGIONS_UNMAPPED: pb.RegionsUnmappedReply,
    Method.PIN: pb.PinReply,
    Method.UNPIN: pb.UnpinReply,
    Method.STATS: pb.StatsReply,
    Method.GOODBYE: pb.GoodbyeReply,
    Method.PREFETCH: pb.PrefetchReply,
    Method.PERSIST: pb.PersistReply,
    Method.NAMESPACES: pb.NamespacesReply,
    Method.CLEAR: pb.ClearReply,
    Method.INSPECT: pb.InspectReply,
    Method.CLAIMS: pb.ClaimsReply,
    Method.TENANTS: pb.TenantsReply,
    Method.WATCH: pb.WatchReply,
    Method.VERIFY: pb.VerifyReply,
    Method.LEASE_SHARD: pb.LeaseReply,
    Method.END_SESSION: pb.EndSessionReply,
    Method.OVERLAP: pb.OverlapReply,
    Method.EXPLAIN: pb.ExplainReply,
    Method.RECORD: pb.RecordReply,
    Method.MAP_HBM: pb.MapHbmReply,
}


def encode(method: int, flags: int, request_id: int, message: Message) -> bytes:
    """One whole frame. Raises BadInputError if the message is longer than a frame may be."""
    payload = message.SerializeToString()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BadInputError(
            f"a {Method(method).name} message has {len(payload)} bytes; the most is {MAX_PAYLOAD_BYTES}: "
            "send, or ask for, fewer tokens or blocks in one call"
        )
    return HEADER.pack(len(payload), method, flags, request_id) + payload


def decode_header(data: bytes | bytearray | memoryview) -> tuple[int, int, int, int]:
    """(payload length, method, flags, request id); raises ProtocolError before anything large is read."""
    if len(data) < HEADER_BYTES:
        raise ProtocolError(f"a frame has only {len(data)} bytes; its header alone has {HEADER_BYTES}")
    length, method, flags, request_id = HEADER.unpack_from(data)
    most = MAX_PAYLOAD_BYTES if method in PROMPTS or flags & FLAG_REPLY else MAX_SMALL_PAYLOAD_BYTES
    if length > most:
        raise ProtocolError(f"a frame announces {length} bytes; the most is {most}")
    if method not in REQUESTS:
        raise ProtocolError(f"unknown method {method}; the highest known is {max(Method)}")
    if flags & ~KNOWN_FLAGS:
        raise ProtocolError(f"unknown flags {flags:#x} in a frame; known are {KNOWN_FLAGS:#x}")
    return length, method, flags, request_id


def decode(kind: type[MessageT], payload: bytes) -> MessageT:
    """Parse a payload; raises ProtocolError if it is not such a message."""
    message = kind()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise ProtocolError(f"a {kind.__name__} of {len(payload)} bytes can't be parsed: {error}") from None
    return message
