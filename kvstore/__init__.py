"""kvstore: a tiered KV-cache store for LLM inference.

What a client needs is importable from here; everything else has its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvstore.client import Client, Lease, NamespaceHandle, PutResult, WaitRule
    from kvstore.types import ExtraKey, GroupKind, KVGroup, KVSpec, Namespace, Root, RowKind, Shard

_HOME = {
    **dict.fromkeys(("Client", "Lease", "NamespaceHandle", "PutResult", "WaitRule"), "kvstore.client"),
    **dict.fromkeys(
        ("ExtraKey", "GroupKind", "KVGroup", "KVSpec", "Namespace", "Root", "RowKind", "Shard"),
        "kvstore.types",
    ),
}

__all__ = [
    "Client", "ExtraKey", "GroupKind", "KVGroup", "KVSpec", "Lease", "Namespace", "NamespaceHandle",
    "PutResult", "Root", "RowKind", "Shard", "WaitRule", "__version__",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that importing one leaf does not import the client and numpy.
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(import_module(home), name)
