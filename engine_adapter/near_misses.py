"""Why nothing hits although the model's KV is stored: what is there differs from what is asked for in some field."""

from __future__ import annotations

from kvstore.client import Client
from kvstore.errors import KVStoreError
from kvstore.types import Namespace

LINES_MAX, FIELDS_MAX = 3, 4


def near_misses(client: Client, namespace: Namespace) -> list[str]:
    """What the daemon holds of the same model and rank that this namespace can't use, nearest first, each with the
    fields that differ as ``path: here != there``.

    Empty if there is nothing, if this very namespace holds blocks, or if the daemon can't be asked. Blocks for one
    round trip.
    """
    try:
        found = [each for each in client.namespaces(model=namespace.model) if each.n_blocks]
    except KVStoreError:
        return []
    if any(each.digest == namespace.digest() for each in found):
        return []
    near: list[tuple[int, str]] = []
    for each in found:
        there = each.namespace
        if there is None or _rank(there) != _rank(namespace):
            continue
        differences = namespace.differences(there)
        more = f"; and {len(differences) - FIELDS_MAX} more" if len(differences) > FIELDS_MAX else ""
        near.append((len(differences), f"{each.n_blocks} blocks: {'; '.join(differences[:FIELDS_MAX])}{more}"))
    return [line for _, line in sorted(near)[:LINES_MAX]]


def _rank(namespace: Namespace) -> tuple[int, int]:
    return namespace.shard.tp_rank, namespace.shard.pp_rank
