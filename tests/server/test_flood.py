"""A tenant that floods the tiers, and a quiet one that comes back for what it has stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, NamespaceHandle
from kvstore.config import TenantOptions
from kvstore.types import KVSpec, Namespace

MIB = 1 << 20
BLOCK_BYTES, BLOCK_TOKENS, N = 16384, 16, 8
SPEC = KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES)
QUIET_PROMPTS = 16
FLOOD_PROMPTS = 96
"""Per round: half as much again as DRAM holds."""
ROUNDS = 3

Start = Callable[..., Any]


def tokens(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


CONTENT = np.zeros((N, BLOCK_BYTES), np.uint8)


def found(ns: NamespaceHandle, seed: int) -> int:
    """Blocks of a prompt that are read, from any tier; what is missing is stored again."""
    with ns.lease(tokens(seed)) as lease:
        n = int(lease.n_blocks)
    if n < N:
        ns.put(tokens(seed), CONTENT)
    return n


def quiet_hit_ratio(daemon: Any) -> tuple[float, dict[str, list[int]]]:
    """Of the quiet tenant, after its first round; and what was evicted of whom: for itself, for others."""
    path = daemon.config.socket_path
    hits = asked = 0
    flood = iter(range(10_000, 1_000_000))
    with Client(path, "quiet", timeout_s=20.0) as quiet:
        mine = quiet.open(Namespace("m", SPEC, tenant="quiet"))
        for turn in range(ROUNDS):
            for seed in range(QUIET_PROMPTS):
                n = found(mine, seed)
                if turn:
                    hits, asked = hits + n, asked + N
                # Processes that come and go: none has room of its own to write to, each evicts others'.
                with Client(path, "loud", timeout_s=20.0) as loud:
                    theirs = loud.open(Namespace("m", SPEC, tenant="loud"))
                    for _ in range(FLOOD_PROMPTS // QUIET_PROMPTS):
                        theirs.put(tokens(next(flood)), CONTENT)
    return hits / asked, daemon.call(_evictions)


def _evictions(daemon: Any) -> dict[str, list[int]]:
    tenants = daemon.store.index.tenants
    return {
        name: [int(column[:, number].sum()) for column in (tenants.n_evicted, tenants.n_suffered)]
        for number, name in enumerate(tenants.names)
    }


@pytest.mark.parametrize("tiers", ["dram", "dram and nvme"])
def test_a_flood_of_another_tenant_does_no_harm(tiers: str, start_daemon: Start, nvme: dict[str, Any]) -> None:
    more = {**nvme, "nvme_bytes": 12 * MIB} if "nvme" in tiers else {}
    ratios = {}
    for shares in ("none", "fair"):
        settings = {key: value.with_name(shares) if key == "nvme_dir" else value for key, value in more.items()}
        daemon = start_daemon(tenants=TenantOptions(shares=shares), policy="lru", **settings)
        ratios[shares], evictions = quiet_hit_ratio(daemon)
        print(f"{tiers}, shares {shares}: the quiet tenant finds {ratios[shares]:.1%} of its blocks; {evictions}")  # noqa: T201
        daemon.call(lambda daemon: daemon.store.check())
        daemon.stop()
        if shares == "fair":
            assert evictions["quiet"][1] == 0
            assert evictions["loud"][0] > 0
    assert ratios["fair"] == 1.0
    assert ratios["none"] < 0.5
