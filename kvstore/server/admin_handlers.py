"""Operators' requests: which namespaces there are, clearing them, what is stored of a prompt, who holds what.

They cover the session's own tenant. Whoever may use the local socket may ask for all tenants, by saying so; nobody
else may. No answer here takes long on the loop: what looks at many blocks does so a little at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvstore.errors import BadInputError, DeniedError
from kvstore.lease import NO_SESSION, Claim
from kvstore.prefix_index.explain import End, Explanation
from kvstore.prefix_index.hiding import Hidden
from kvstore.server.prompts import PromptReader
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session, Sessions
from kvstore.server.waits import checked_wait_s, paced
from kvstore.store.admin import Administration, Holdings, KnownNamespace, NamespaceFilter
from kvstore.store.requests import Prompt
from kvstore.store.store import Store
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import F64, I32, U8, U32, pack

NAMESPACES_PER_REPLY_MAX = 4096
BLOCKS_PER_REPLY_MAX = 1 << 16
CLAIMS_PER_REPLY_MAX = 10_000
LOOK_S = 0.01
"""How often a request that waits for names to be gone looks whether they are."""


class AdminHandlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(self, store: Store, prompts: PromptReader, sessions: Sessions) -> None:
        self._store = store
        self._prompts = prompts
        self._sessions = sessions
        self._admin = Administration(store)

    def register(self, by_method: dict[int, Callable[[Session, Any], Result]]) -> None:
        """Take the requests that are answered here."""
        by_method |= {
            Method.NAMESPACES: self.namespaces,
            Method.CLEAR: self.clear,
            Method.INSPECT: self.inspect,
            Method.CLAIMS: self.claims,
        }

    # Namespaces ----------------------------------------------------------------------------------

    def namespaces(self, session: Session, request: pb.NamespacesRequest) -> Result:
        return self._namespaces(filter_of(request.filter), tenant_asked_for(session, all_tenants=request.all_tenants))

    async def _namespaces(self, wanted: NamespaceFilter, tenant: str | None) -> Reply:
        known = await self._known(wanted, tenant)
        listed = known[:NAMESPACES_PER_REPLY_MAX]
        holdings: list[Holdings] = []
        await paced(self._admin.census(listed, holdings))
        reply = pb.NamespacesReply(truncated=len(listed) < len(known))
        reply.namespaces.extend(self._info(*each) for each in zip(listed, holdings, strict=True))
        return Reply(reply)

    async def _known(self, wanted: NamespaceFilter, tenant: str | None) -> list[KnownNamespace]:
        known: list[KnownNamespace] = []
        await paced(self._admin.namespaces(wanted, tenant, known))
        return known

    def _info(self, known: KnownNamespace, holds: Holdings) -> pb.NamespaceInfo:
        info = pb.NamespaceInfo(
            digest=known.digest,
            description_json="" if known.namespace is None else json.dumps(known.namespace.to_dict()),
            names=known.names,
            is_open=known.opened is not None,
            n_blocks=holds.n_blocks,
            n_dram_blocks=holds.n_dram_blocks,
            n_nvme_blocks=holds.n_nvme_blocks,
            dram_bytes=holds.dram_bytes,
            nvme_bytes=holds.nvme_bytes,
            n_pinned_blocks=holds.n_pinned_blocks,
            idle_s=-1.0,
        )
        if known.opened is not None and known.opened.n_lookups:
            info.n_lookups, info.n_lookup_blocks = known.opened.n_lookups, known.opened.n_lookup_blocks
            info.n_hit_blocks = known.opened.n_hit_blocks
            info.idle_s = max(self._store.clock.now_s() - known.opened.used_at_s, 0.0)
        return info

    # Clearing ------------------------------------------------------------------------------------

    def clear(self, session: Session, request: pb.ClearRequest) -> Result:
        wanted, wait_s = filter_of(request.filter), checked_wait_s(request.wait_s)
        if wanted.is_empty != request.everything:
            raise BadInputError(
                "everything goes with an empty filter, and an empty filter only with it: name a namespace or a model, "
                "or say that you mean everything"
            )
        tenant = tenant_asked_for(session, all_tenants=request.all_tenants)
        if request.dry_run:
            return self._would_clear(wanted, tenant)
        return self._clear(wanted, tenant, wait_s)

    async def _would_clear(self, wanted: NamespaceFilter, tenant: str | None) -> Reply:
        known = await self._known(wanted, tenant)
        holdings: list[Holdings] = []
        await paced(self._admin.census(known, holdings))
        reply = pb.ClearReply()
        for each, holds in zip(known, holdings, strict=True):
            reply.namespaces.add(
                digest=each.digest,
                n_blocks=holds.n_blocks,
                n_dram_blocks=holds.n_dram_blocks,
                n_nvme_blocks=holds.n_nvme_blocks,
            )
        return Reply(reply)

    async def _clear(self, wanted: NamespaceFilter, tenant: str | None, wait_s: float) -> Reply:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        known = await self._known(wanted, tenant)
        n_reservations = self._store.n_reservations_in_force
        hidden = self._store.clear({ordinal for each in known for ordinal in each.ordinals})
        n_reservations -= self._store.n_reservations_in_force
        clearing = self._store.clearing
        while loop.time() < deadline_s:
            await paced(_steps(clearing.step))
            if clearing.is_durable:
                break
            await asyncio.sleep(LOOK_S)
        reply = pb.ClearReply(
            n_ended_reservations=n_reservations,
            n_left_blocks=clearing.n_left_blocks,
            n_left_names=clearing.n_left_names,
        )
        for each in known:
            # Of one whose blocks have parts, these have numbers of their own: the blocks count.
            counted = hidden.get(each.ordinal, Hidden(0, 0, 0))
            reply.namespaces.add(
                digest=each.digest,
                n_blocks=counted.n_blocks,
                n_dram_blocks=counted.n_dram_blocks,
                n_nvme_blocks=counted.n_nvme_blocks,
            )
        return Reply(reply)

    # Prompts -------------------------------------------------------------------------------------

    def inspect(self, session: Session, request: pb.InspectRequest) -> Result:
        prompt = self._prompts.read(session, request.prompt)
        found = self._admin.explain(prompt)
        ids = found.match.ids
        if found.match.partial_tokens:
            ids = np.append(ids, np.uint32(found.match.partial_id))
        most = min(request.max_blocks or BLOCKS_PER_REPLY_MAX, BLOCKS_PER_REPLY_MAX)
        shown = ids[request.first_block : request.first_block + most]
        facts = self._admin.blocks(shown)
        reply = pb.InspectReply(
            n_rows=prompt.path.n_rows,
            n_blocks=len(found.match.ids),
            partial_tokens=found.match.partial_tokens,
            keys=facts.keys.tobytes(),
            tiers=pack(facts.in_dram + 2 * facts.on_nvme.astype(np.uint8) + 4 * facts.in_hbm.astype(np.uint8), U8),
            sizes=pack(facts.size_bytes, U32),
            hits=pack(facts.hits, U8),
            idle_s=pack(facts.idle_s, F64),
            pins=pack(facts.pins, I32),
            ends=self._hybrid_ends(found, prompt) if prompt.namespace.parts else in_words(found, prompt),
            differs_at_token=found.differs_at,
        )
        if self._store.index.hints.is_used:
            now_s = self._store.clock.now_s()
            reply.hints_json = json.dumps([self._store.index.hints.of(block, now_s) for block in shown.tolist()])
        return Reply(reply)

    def _hybrid_ends(self, found: Explanation, prompt: Prompt) -> str:
        """What ends the blocks themselves, and how much of a hit each group allows, as a hit may need more of some."""
        opened = prompt.namespace
        n_stored, n_hit = len(found.match.ids), len(self._store.hybrid_match(prompt, 0).ids)
        reaches = self._store.reach_by_part(prompt)
        groups = sorted(
            (group, opened.namespace.spec.groups[group].kind, min(reaches[part.number], n_stored))
            for part in opened.parts
            for group in part.groups
        )
        each = ", ".join(f"group {group} ({kind}) {reach}" for group, kind, reach in groups)
        each = f"blocks that a hit may have by what is stored of each group: {each}"
        ends = in_words(found, prompt)
        if n_hit >= n_stored:
            return f"{ends}; {each}"
        ends = "every block of the prompt is stored" if found.end is End.WHOLE else ends
        wanting = " and ".join(f"group {group} ({kind})" for group, kind, reach in groups if reach < n_stored)
        return (
            f"{ends}, but a hit has {n_hit} blocks only, for want of {wanting or 'blocks whose time is not over'}; "
            f"{each}"
        )

    # Claims --------------------------------------------------------------------------------------

    def claims(self, session: Session, request: pb.ClaimsRequest) -> Result:
        tenant = tenant_asked_for(session, all_tenants=request.all_tenants)
        now_s = self._store.clock.now_s()
        reply = pb.ClaimsReply()
        for each in self._sessions:
            if tenant in (None, each.tenant):
                reply.sessions.add(
                    id=each.id,
                    tenant=each.tenant,
                    client_name=each.client_name,
                    pid=each.pid,
                    live=each.live,
                    silent_s=max(now_s - each.heartbeat_at_s, 0.0),
                )
        for kind, claim, n_blocks in self._held():
            if tenant not in (None, claim.tenant):
                continue
            if len(reply.claims) == CLAIMS_PER_REPLY_MAX:
                reply.truncated = True
                break
            reply.claims.add(
                kind=kind,
                id=claim.id,
                tenant=claim.tenant,
                session_ids=[each for each in claim.holders if each != NO_SESSION],
                left_s=claim.deadline_s - now_s,
                ended=claim.ended,
                n_blocks=n_blocks,
            )
        return Reply(reply)

    def _held(self) -> Iterator[tuple[str, Claim, int]]:
        """Kind, claim and its blocks: slots to be filled of a reservation, else blocks that stay for it."""
        for lease in self._store.leases:
            yield "lease", lease, len(lease.ids)
        for reservation in self._store.reservations:
            yield "reservation", reservation, len(reservation.slots)
        for pin in self._store.pins:
            yield "pin", pin, len(pin.ids)


def tenant_asked_for(session: Session, *, all_tenants: bool) -> str | None:
    """The tenant that an operator's request is about, None for all. Raises DeniedError for who may not ask that."""
    if not all_tenants:
        return session.tenant
    if session.remote:
        raise DeniedError("all tenants can be asked for over the daemon's own socket only: run this on its machine")
    return None


def in_words(found: Explanation, prompt: Prompt) -> str:
    """Why a match ends where it does."""
    n = len(found.match.ids)
    behind = f"behind block {n - 1}" if n else "for this namespace, salt and LoRA"
    if found.end is End.WHOLE:
        return "the whole prompt is stored"
    if found.end is End.EMPTY:
        return "nothing is stored for this namespace, salt and LoRA"
    if found.end is End.OPEN:
        return f"nothing is stored {behind}"
    if found.end is End.BROKEN:
        return f"block {n} is known, but its bytes are lost"
    if prompt.path.unit_bytes == prompt.path.row_bytes:
        return f"what is stored behind {n} blocks has another hash for block {n}"
    tokens = f" ({found.stored}, here {found.here})" if found.stored >= 0 and found.here >= 0 else ""
    extra = ", or another image or sound there" if prompt.path.has_extra(n) else ""
    if not found.match.partial_tokens:  # no stored block comes closer than any other
        return f"what is stored {behind} has another token at {found.differs_at} (here {found.here}){extra}"
    what = f"another token at {found.differs_at}" if found.stored >= 0 else f"no token at {found.differs_at}"
    return f"the stored block that comes closest to block {n} has {what}{tokens}{extra}"


def filter_of(message: pb.NamespaceFilter) -> NamespaceFilter:
    """Which namespaces are meant. Raises BadInputError for what can't fit any."""
    return NamespaceFilter(
        message.name,
        message.digest_prefix,
        message.model,
        message.revision if message.HasField("revision") else None,
        message.tp_rank if message.HasField("tp_rank") else None,
        message.pp_rank if message.HasField("pp_rank") else None,
    )


def _steps(step: Callable[[], bool]) -> Iterator[None]:
    """Steps until one says that there are no more for now."""
    while step():
        yield
