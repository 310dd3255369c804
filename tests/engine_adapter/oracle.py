"""KV as plain numpy arrays, plane by plane: what copies are compared with. Shares no code with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.types import DTYPE_BYTES, KVSpec

Bytes = NDArray[np.uint8]


def random_kv(rng: np.random.Generator, spec: KVSpec, n_tokens: int) -> list[Bytes]:
    """Per layer uint8 [planes, n_tokens, heads, unit_bytes]."""
    layers: list[Bytes] = []
    for group in spec.groups:
        planes = 1 if group.kind == "mla" else 2
        unit_bytes = group.head_dim * DTYPE_BYTES[group.dtype]
        shape = planes, n_tokens, group.kv_heads, unit_bytes
        layers += [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(group.layers)]
    return layers


def as_blocks(spec: KVSpec, layers: list[Bytes], filler: int = 0) -> Bytes:
    """The blocks that hold this KV, uint8 [n_blocks, block_bytes]; ``filler`` stands behind the last token."""
    n_tokens = layers[0].shape[1]
    n_blocks = -(-n_tokens // spec.block_tokens)
    parts = []
    index = 0
    for group in spec.groups:
        for _ in range(group.layers):
            kv = layers[index]
            index += 1
            planes, _, heads, unit_bytes = kv.shape
            whole = np.full((planes, n_blocks * spec.block_tokens, heads, unit_bytes), filler, np.uint8)
            whole[:, :n_tokens] = kv
            pages = whole.reshape(planes, n_blocks, -1, spec.tokens_per_page, heads, unit_bytes)
            order: Any = (1, 2, 0, 3, 4, 5) if group.layout == "NHD" else (1, 2, 0, 4, 3, 5)
            parts.append(np.ascontiguousarray(pages.transpose(order)).reshape(n_blocks, -1))
    return np.concatenate(parts, axis=1)
