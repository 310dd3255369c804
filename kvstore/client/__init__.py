"""The Python client library."""

from kvstore.client.client import Client
from kvstore.client.family import FamilyHandle, FamilyLease
from kvstore.client.hybrid import HybridGet, HybridHandle, HybridLease, HybridPut
from kvstore.client.lease import Lease, WriteReservation
from kvstore.client.namespace import NamespaceHandle
from kvstore.client.results import GetResult, Match, Overlap, Persist, Pinned, Prefetch, PutResult
from kvstore.client.waiting import Wait, WaitRule

__all__ = [
    "Client",
    "FamilyHandle",
    "FamilyLease",
    "GetResult",
    "HybridGet",
    "HybridHandle",
    "HybridLease",
    "HybridPut",
    "Lease",
    "Match",
    "NamespaceHandle",
    "Overlap",
    "Persist",
    "Pinned",
    "Prefetch",
    "PutResult",
    "Wait",
    "WaitRule",
    "WriteReservation",
]
