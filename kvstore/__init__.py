"""kvstore: a tiered KV-cache store for LLM inference.

What a client needs is importable from here; everything else has its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvstore.client import (
        Client,
        FamilyHandle,
        FamilyLease,
        GetResult,
        HybridHandle,
        HybridLease,
        Lease,
        Match,
        NamespaceHandle,
        Overlap,
        Persist,
        Pinned,
        Prefetch,
        PutResult,
        WaitRule,
        WriteReservation,
    )
    from kvstore.client.aio import AsyncClient
    from kvstore.embedded import Embedded
    from kvstore.embedded import open as open  # noqa: A004 - as in gzip or tarfile
    from kvstore.hints import Hints
    from kvstore.types import ExtraKey, GroupKind, KVGroup, KVSpec, Namespace, Root, RowKind, Shard

_HOME = {
    **dict.fromkeys(
        (
            "Client", "FamilyHandle", "FamilyLease", "GetResult", "HybridHandle", "HybridLease", "Lease", "Match",
            "NamespaceHandle", "Overlap", "Persist", "Pinned", "Prefetch", "PutResult", "WaitRule", "WriteReservation",
        ),
        "kvstore.client",
    ),
    "AsyncClient": "kvstore.client.aio",
    **dict.fromkeys(("Embedded", "open"), "kvstore.embedded"),
    "Hints": "kvstore.hints",
    **dict.fromkeys(
        ("ExtraKey", "GroupKind", "KVGroup", "KVSpec", "Namespace", "Root", "RowKind", "Shard"),
        "kvstore.types",
    ),
}  # fmt: skip

__all__ = [
    "AsyncClient", "Client", "Embedded", "ExtraKey", "FamilyHandle", "FamilyLease", "GetResult", "GroupKind",
    "Hints", "HybridHandle", "HybridLease", "KVGroup", "KVSpec", "Lease", "Match", "Namespace", "NamespaceHandle",
    "Overlap", "Persist", "Pinned", "Prefetch", "PutResult", "Root", "RowKind", "Shard", "WaitRule",
    "WriteReservation", "__version__",
]  # fmt: skip
"""Not ``open``, which ``import *`` would put in the place of Python's own."""


def __dir__() -> list[str]:
    return [*__all__, "open"]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that importing one leaf does not import the client and numpy.
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(import_module(home), name)
