"""Blocks in parts: the same calls for namespaces whose blocks are one piece and for hybrid ones (``kvstore.hybrid``).

Of those each part is stored, found and held by itself. Blocks in one piece have part 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import ArrayLike

from kvstore.client import Client, HybridHandle, HybridLease, Lease, NamespaceHandle, WriteReservation
from kvstore.client.hybrid import GroupView
from kvstore.hybrid import PARTS_MAX, parts_of
from kvstore.types import GroupKind, KVGroup, Namespace

Handle = NamespaceHandle | HybridHandle


def open_namespace(client: Client, namespace: Namespace, attention_doubling_tokens: float = 0.0) -> Handle:
    """``client.open`` or ``client.open_hybrid``, whichever the spec asks for."""
    opened = client.open_hybrid if parts_of(namespace.spec) else client.open
    return opened(namespace, attention_doubling_tokens=attention_doubling_tokens)


def held_of(lease: Lease, part: int) -> Lease | GroupView:
    """What a lease holds of one part: ``first_block``, ``addresses``, and arrays by index."""
    return lease.part(part) if isinstance(lease, HybridLease) else lease


def reserve_part(handle: Handle, part: int, tokens: ArrayLike, **more: Any) -> WriteReservation:
    """Slots for one part of blocks; part 0 must be committed before the others are. Else as ``reserve``."""
    if isinstance(handle, HybridHandle):
        return handle.reserve(tokens, part, ahead=part > 0, **more)
    return handle.reserve(tokens, **more)


def in_groups(layers: Sequence[KVGroup], *, windows_apart: bool = True) -> tuple[tuple[KVGroup, ...], list[int]]:
    """The groups in which layers are stored, and the layers (by index) in the order of those.

    ``layers``: each as a group of one layer, a sliding one if it looks at a window only. Layers that are alike make a
    group, in their order. Windows are apart, behind all others, if there are others and not too many kinds of windows;
    else, or unless ``windows_apart``, they are stored as the rest is: then a hit needs every block of them.
    """
    kinds = list(layers)
    windows = {kind for kind in kinds if kind.kind is GroupKind.SLIDING}
    if not windows_apart or len(windows) > PARTS_MAX or windows.issuperset(kinds):
        kinds = [replace(kind, kind=GroupKind.FULL, window_tokens=None) if kind in windows else kind for kind in kinds]
        windows = set()
    alike = sorted(dict.fromkeys(kinds), key=lambda kind: kind in windows)
    order = sorted(range(len(kinds)), key=lambda i: alike.index(kinds[i]))
    return tuple(replace(kind, layers=kinds.count(kind)) for kind in alike), order
