"""The Python client library."""

from kvstore.client.client import Client, GetResult, Match, NamespaceHandle, Pinned, PutResult
from kvstore.client.lease import Lease, WriteReservation

__all__ = [
    "Client",
    "GetResult",
    "Lease",
    "Match",
    "NamespaceHandle",
    "Pinned",
    "PutResult",
    "WriteReservation",
]
