"""What makes namespaces a shard family: the slices of one model's KV that several ranks hold, matched together."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import BadInputError
from kvstore.types import Namespace, Shard

SHARDS_MAX = 64
"""Most shards of a family: a request matches and pins in each, and others wait meanwhile."""


def check_family(namespaces: Sequence[Namespace]) -> None:
    """Raises BadInputError, naming the field, unless these namespaces differ only in what a rank has of its own.

    That is its place in ``shard``, and what is in ``spec`` but for ``block_tokens``: ranks of a pipeline may have
    other layers. Not all ranks need be there (those of other machines are not), but each shard once.
    """
    if not 1 <= len(namespaces) <= SHARDS_MAX:
        raise BadInputError(f"a family of {len(namespaces)} shards; it can have 1 to {SHARDS_MAX}")
    first = namespaces[0]
    shards: dict[Shard, int] = {}
    for i, namespace in enumerate(namespaces):
        for name, mine, other in _common(first, namespace):
            if mine != other:
                raise BadInputError(
                    f"these namespaces are no family: {name} of number {i} is {other!r}, of number 0 {mine!r}; "
                    f"only the rank in shard, and spec but for block_tokens, may differ"
                )
        if namespace.shard in shards:
            raise BadInputError(
                f"namespaces {shards[namespace.shard]} and {i} of the family have the same shard ({namespace.shard}): "
                "ranks that hold the same KV (replicated, MLA) share one namespace, give it once"
            )
        shards[namespace.shard] = i


def _common(first: Namespace, other: Namespace) -> list[tuple[str, object, object]]:
    """What ranks of one family have in common: the name of a field, and both values."""
    names = ("model", "revision", "tenant", "engine", "row_kind", "hash_bytes")
    return [
        *((name, getattr(first, name), getattr(other, name)) for name in names),
        ("spec.block_tokens", first.spec.block_tokens, other.spec.block_tokens),
        ("shard.tp_size", first.shard.tp_size, other.shard.tp_size),
        ("shard.pp_size", first.shard.pp_size, other.shard.pp_size),
    ]
