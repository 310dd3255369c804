"""Blocks that are in HBM, for clients of a daemon of the same process with a simulated device of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client, NamespaceHandle
from kvstore.client.lease import Lease
from kvstore.config import MIB, HbmOptions
from kvstore.types import KVSpec, Namespace

BLOCK_TOKENS, BLOCK_BYTES, N = 16, 16384, 4
HBM = HbmOptions("simulated", MIB)
"""64 such blocks."""
WaitUntil = Callable[[Callable[[], bool], str], None]


def prompt(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1_000_000).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)


def opened(client: Client) -> NamespaceHandle:
    return client.open(Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES)))


def promoted(cache: NamespaceHandle, seed: int, wait_until: WaitUntil) -> Lease:
    """A lease of a prompt that is in HBM as a whole."""
    cache.put(prompt(seed), content(seed))
    return in_hbm(cache, prompt(seed), N, wait_until)


def in_hbm(cache: NamespaceHandle, tokens: Any, n_blocks: int, wait_until: WaitUntil) -> Lease:
    """A lease of a stored prompt once so many of its blocks are in HBM."""
    found: list[Lease] = []

    def is_there() -> bool:
        lease = cache.lease(tokens, hbm=True)
        if len(lease.hbm) < n_blocks:
            lease.release()
            return False
        found.append(lease)
        return True

    wait_until(is_there, "its copies are in HBM")
    return found[0]


def churn(cache: NamespaceHandle, wait_until: WaitUntil) -> None:
    """More than HBM has room for goes through it: every slot there that may be is used again."""
    for seed in range(100, 140):
        promoted(cache, seed, wait_until).release()
