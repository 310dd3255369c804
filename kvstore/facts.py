"""What a daemon tells of itself, as it and its clients have it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantTier:
    """A tenant in one tier ("dram" or "nvme"). Bytes are of whole pages.

    ``share_bytes``: its part by weight among the tenants that have blocks there. ``max_bytes`` is None without a quota.
    Copies since the daemon started: ``n_evicted`` went for the tenant's own sake, ``n_suffered`` of its for others',
    ``n_caused`` of others for its.
    """

    tier: str
    used_bytes: int
    share_bytes: int
    min_bytes: int
    max_bytes: int | None
    n_evicted: int
    n_suffered: int
    n_caused: int


@dataclass(frozen=True, slots=True)
class NearRoot:
    """Another LoRA identity, or salt, which is not told, under which ``n_matching`` blocks of a prompt are stored."""

    salt_differs: bool
    lora_differs: bool
    lora: str
    n_matching: int
