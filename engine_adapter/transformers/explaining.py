"""Why a model does not find what is stored: what its namespace has other than those that the daemon knows."""

from __future__ import annotations

from typing import Any

from kvstore.client import Client
from kvstore.engine_adapter.transformers.identity import namespace_of


def explain(client: Client, model: Any, **identity: Any) -> list[str]:
    """One line for each other namespace of the same model's name that holds blocks, with the fields that differ.

    ``identity``: ``block_tokens``, ``name`` and ``revision`` as they are given to ``for_prompt``. Salt and adapters are
    no part of a namespace: prompts that differ in them never share blocks. Blocks for a round trip. Raises
    UnavailableError, and BadInputError for a model whose KV can't be stored.
    """
    mine = namespace_of(model, tenant=client.tenant, **identity)
    lines = []
    for info in client.namespaces(model=mine.model):
        if info.namespace is not None and info.namespace != mine and info.n_blocks:
            differing = "; ".join(mine.differences(info.namespace))
            lines.append(f"{info.n_blocks} blocks are of another namespace (here != there): {differing}")
    return lines
