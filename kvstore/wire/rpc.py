"""What both ends of gRPC call things, and errors as its statuses.

The status of an error is for everybody; the exact one travels in the trailing metadata.
"""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from kvstore.errors import (
    BadInputError,
    DeniedError,
    EndedError,
    KVStoreError,
    ProtocolError,
    SessionEndedError,
    SpecMismatchError,
    UnavailableError,
    VersionError,
)
from kvstore.wire import faults
from kvstore.wire import kvstore_pb2 as pb

SERVICE = "kvstore.v1.KVStore"
SESSION_KEY = "kvstore-session-bin"
"""Metadata of a call: the token of its session."""
TENANT_KEY = "kvstore-tenant"
"""Metadata of a call outside of any session: its tenant."""
ERROR_KEY = "kvstore-error-bin"
"""Trailing metadata: a serialized ``Error``."""

_STATUSES: tuple[tuple[type[KVStoreError], grpc.StatusCode], ...] = (
    # The most special class first: the first that fits is taken.
    (DeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (SpecMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (VersionError, grpc.StatusCode.FAILED_PRECONDITION),
    (SessionEndedError, grpc.StatusCode.ABORTED),
    (EndedError, grpc.StatusCode.NOT_FOUND),
    (BadInputError, grpc.StatusCode.INVALID_ARGUMENT),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
)


def rpc_name(method_name: str) -> str:
    """``LEASE_SHARD`` -> ``LeaseShard``."""
    return "".join(word.capitalize() for word in method_name.split("_"))


def status_of(error: Exception) -> tuple[grpc.StatusCode, pb.Error]:
    """The status of an error, and the message that says more."""
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    return status, faults.to_message(error)


def sent_error(error: grpc.RpcError) -> KVStoreError | None:
    """The error that a daemon sent with a status; None if the status is gRPC's own."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY and isinstance(value, bytes):
            message = pb.Error()
            try:
                message.ParseFromString(value)
            except DecodeError:
                return None
            return faults.to_exception(message)
    return None
