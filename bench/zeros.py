"""Zeros stored in place of KV: the control of comparisons, which must then come out otherwise."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvstore.client import Client, HybridHandle
from kvstore.engine_adapter.parts import open_namespace
from kvstore.hybrid import place_of
from kvstore.tokens import token_array
from kvstore.types import Namespace, Root

DEFAULT_ROOT = Root()


def put_zeros(client: Client, namespace: Namespace, tokens: ArrayLike, root: Root = DEFAULT_ROOT) -> None:
    """Store zeros as all blocks of a prompt, a short last one included, and of every part of them."""
    ids = token_array(tokens)
    n_blocks = -(-len(ids) // namespace.spec.block_tokens)
    handle = open_namespace(client, namespace)
    if isinstance(handle, HybridHandle):
        sizes = [place_of(namespace.spec, group)[2] for group in range(len(namespace.spec.groups))]
        handle.put(ids, {i: np.zeros((n_blocks, size), np.uint8) for i, size in enumerate(sizes)}, root=root)
    else:
        handle.put(ids, np.zeros((n_blocks, namespace.spec.block_bytes), np.uint8), root=root)
