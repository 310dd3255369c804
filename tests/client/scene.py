"""Prompts and blocks for tests of the client."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.types import KVSpec

BLOCK_BYTES = 8192

BLOCK_TOKENS = 16


def spec_of(block_bytes: int = BLOCK_BYTES) -> KVSpec:
    return KVSpec.opaque(BLOCK_TOKENS, block_bytes)


def tokens_of(n_blocks: int, seed: int = 0, extra: int = 0) -> NDArray[np.uint32]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50_000, n_blocks * BLOCK_TOKENS + extra, dtype=np.uint32)


def blocks_of(n_blocks: int, seed: int = 0, block_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1000).integers(0, 256, (n_blocks, block_bytes), dtype=np.uint8)
