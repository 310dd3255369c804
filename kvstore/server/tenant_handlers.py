"""Who has how much of the tiers: an operators' request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvstore.server.admin_handlers import tenant_asked_for
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.store.store import Store
from kvstore.store.tenancy import TenantFacts, tenant_facts
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

TENANTS_PER_REPLY_MAX = 4096


class TenantHandlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def register(self, by_method: dict[int, Callable[[Session, Any], Result]]) -> None:
        """Take the requests that are answered here."""
        by_method[Method.TENANTS] = self.tenants

    def tenants(self, session: Session, request: pb.TenantsRequest) -> Result:
        tenant = tenant_asked_for(session, all_tenants=request.all_tenants)
        known = [each for each in tenant_facts(self._store) if tenant is None or each.tenant == tenant]
        reply = pb.TenantsReply(truncated=len(known) > TENANTS_PER_REPLY_MAX)
        for each in known[:TENANTS_PER_REPLY_MAX]:
            reply.tenants.append(_info(each))
        return Reply(reply)


def _info(facts: TenantFacts) -> pb.TenantInfo:
    return pb.TenantInfo(
        tenant=facts.tenant,
        weight=facts.weight,
        tiers=[pb.TenantTier(**asdict(each)) for each in facts.tiers],
        pinned_bytes=facts.pinned_bytes,
        pin_max_bytes=facts.pin_max_bytes,
        n_pins=facts.n_pins,
    )
