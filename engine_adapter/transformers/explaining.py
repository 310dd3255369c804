"""Why a model, or one prompt of it, does not find what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.client import Client
from kvstore.engine_adapter.parts import open_namespace
from kvstore.engine_adapter.transformers.identity import namespace_of, root_of
from kvstore.engine_adapter.transformers.rows import Rows
from kvstore.types import ExtraKey


def explain(
    client: Client,
    model: Any,
    input_ids: Any = None,
    *,
    extras: Sequence[ExtraKey] = (),
    salt: str = "",
    lora: str | None = None,
    **identity: Any,
) -> list[str]:
    """Of a prompt, ``input_ids`` [tokens] or [1, tokens]: what the daemon says became of it, and what to do.

    Without: one line for each other namespace of the same model's name that holds blocks, with the fields that differ.
    ``identity``: ``block_tokens``, ``name`` and ``revision``, and with a prompt ``extras``, ``salt`` and ``lora``, as
    they are given to ``for_prompt``. Blocks for a round trip. Raises UnavailableError, and BadInputError for a model
    whose KV can't be stored.
    """
    mine = namespace_of(model, tenant=client.tenant, **identity)
    if input_ids is not None:
        told = open_namespace(client, mine).explain(
            Rows.of(input_ids).ids[0], root=root_of(model, salt=salt, lora=lora), extras=extras
        )
        return [*told.lines, *(f"what to do: {line}" for line in told.advice)]
    lines = []
    for info in client.namespaces(model=mine.model):
        if info.namespace is not None and info.namespace != mine and info.n_blocks:
            differing = "; ".join(mine.differences(info.namespace))
            lines.append(f"{info.n_blocks} blocks are of another namespace (here != there): {differing}")
    return lines
