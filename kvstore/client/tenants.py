"""What operators are told of tenants: what each has of the tiers, what is due to it, and what became of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.client.session import Session
from kvstore.facts import TenantTier
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """A tenant; its name is empty for what nobody has described yet, as after a restart."""

    tenant: str
    weight: float
    tiers: tuple[TenantTier, ...]
    pinned_bytes: int
    pin_max_bytes: int
    n_pins: int


def ask_tenants(session: Session, *, all_tenants: bool) -> tuple[TenantInfo, ...]:
    """See ``Client.tenants``."""
    reply = session.call(Method.TENANTS, pb.TenantsRequest(all_tenants=all_tenants), pb.TenantsReply)
    return tuple(
        TenantInfo(
            each.tenant,
            each.weight,
            tuple(_tier(tier) for tier in each.tiers),
            each.pinned_bytes,
            each.pin_max_bytes,
            each.n_pins,
        )
        for each in reply.tenants
    )


def _tier(tier: pb.TenantTier) -> TenantTier:
    return TenantTier(
        tier.tier,
        tier.used_bytes,
        tier.share_bytes,
        tier.min_bytes,
        tier.max_bytes if tier.HasField("max_bytes") else None,
        tier.n_evicted,
        tier.n_suffered,
        tier.n_caused,
    )
