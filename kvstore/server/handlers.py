"""What the daemon does for each method, whatever the transport.

A handler takes a session and a request and returns a reply, perhaps with descriptors; or an awaitable, when
blocks must be moved before there is room, or when the client waits for blocks to be read or written. Such
an awaitable may be cancelled: it gives back what it holds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore.errors import BadInputError
from kvstore.lease import NO_SESSION, Reservation
from kvstore.metrics import LATENCY_BOUNDS_S, Distribution
from kvstore.onboard import Load
from kvstore.persist import Persist
from kvstore.prefix_index.block_table import DRAM, Ids
from kvstore.room import PendingReclaim
from kvstore.server.family_handlers import FamilyHandlers
from kvstore.server.hbm_handlers import HbmHandlers
from kvstore.server.hint_handlers import HintHandlers
from kvstore.server.loads import Waiting
from kvstore.server.overlap_handlers import OverlapHandlers
from kvstore.server.prompts import PromptReader, digests_of
from kvstore.server.replies import Reply, Result, lease_reply, life_s, no_persist, reserve_reply, shard_reply
from kvstore.server.session import Session
from kvstore.server.waits import checked_wait_s
from kvstore.store.requests import Prompt
from kvstore.store.store import Store
from kvstore.types import Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import MAX_DESCRIPTORS, Method
from kvstore.wire.packing import F64, U32, U64, pack

__all__ = ["Handlers", "Reply", "Result"]

STEPS_PER_RESERVE_MAX = 16
UNMAP_WAIT_S = 0.1
"""How long a reservation waits for clients to unmap what was retired for it; what is not there then is skipped."""

REGIONS_MAX = 4096


class Handlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(
        self,
        store: Store,
        client_policy_clock: bool,
        stats: Callable[[], tuple[dict[str, float], dict[str, str]]],
        latencies: Callable[[], Iterable[tuple[str, bool, Distribution]]],
        ask_to_unmap: Callable[[], None],
        epoch: int,
    ) -> None:
        self._store = store
        self._prompts = PromptReader(store, client_policy_clock)
        self._stats = stats
        self._latencies = latencies
        self._ask_to_unmap = ask_to_unmap
        self._epoch = epoch
        self._unmapped = asyncio.Event()
        self._waiting = Waiting(store, ask_to_unmap)
        self.by_method: dict[int, Callable[[Session, Any], Result]] = {
            Method.OPEN_NAMESPACE: self.open_namespace,
            Method.MATCH: self.match,
            Method.LEASE: self.lease,
            Method.ATTACH_LEASE: self.attach_lease,
            Method.RELEASE: self.release,
            Method.RENEW: self.renew,
            Method.RESERVE: self.reserve,
            Method.COMMIT: self.commit,
            Method.ABORT: self.abort,
            Method.MAP_REGIONS: self.map_regions,
            Method.REGIONS_MAPPED: self.regions_mapped,
            Method.REGIONS_UNMAPPED: self.regions_unmapped,
            Method.PIN: self.pin,
            Method.UNPIN: self.unpin,
            Method.STATS: self.stats,
            Method.PREFETCH: self.prefetch,
            Method.PERSIST: self.persist,
        }
        self.by_method[Method.END_SESSION] = HintHandlers(store, self._prompts).end_session
        self.by_method[Method.OVERLAP] = OverlapHandlers(store, self._prompts).overlap
        FamilyHandlers(store, self._prompts, self._waiting).register(self.by_method)
        HbmHandlers(store).register(self.by_method)

    def open_namespace(self, session: Session, request: pb.OpenNamespaceRequest) -> Result:
        try:
            plain = json.loads(request.description_json)
        except ValueError as error:
            raise BadInputError(f"the namespace description is not JSON: {error}") from None
        if not isinstance(plain, dict):
            raise BadInputError(f"the namespace description is {plain!r:.80}; it must be an object with fields")
        namespace = Namespace.from_dict(plain)
        if namespace.tenant != session.tenant:
            raise BadInputError(
                f"the namespace belongs to tenant {namespace.tenant!r}, the session to {session.tenant!r}: "
                f"connect as that tenant"
            )
        opened = self._store.namespaces.open(namespace, request.name, request.attention_doubling_tokens)
        return Reply(pb.OpenNamespaceReply(digest=opened.digest))

    def match(self, session: Session, request: pb.MatchRequest) -> Result:
        prompt = self._prompts.read(session, request.prompt)
        found = self._store.match(prompt)
        n_blocks = len(found.ids)
        reply = pb.MatchReply(
            n_blocks=n_blocks,
            partial_tokens=found.partial_tokens,
            n_tokens=n_blocks * prompt.namespace.namespace.spec.block_tokens + found.partial_tokens,
            n_dram_blocks=self._n_in_dram(prompt, found.ids),
        )
        if prompt.namespace.parts:
            reply.part_blocks = pack(np.array(self._store.reach_by_part(prompt)), U32)
        return Reply(reply)

    def lease(self, session: Session, request: pb.LeaseRequest) -> Result:
        prompt = self._prompts.read(session, request.prompt)
        if request.copied_bytes and not session.remote:
            self._store.note_copy(
                prompt.namespace, request.copied_bytes, request.copied_s, after_read=request.copied_after_read
            )
        begin = partial(
            self._store.begin_load, prompt, request.first_block, request.max_blocks,
            reads_hbm=_reads_hbm(session, request),
        )  # fmt: skip
        answer = partial(self._lease, session, prompt, request)
        return self._waiting.loaded(session, begin, request.wait_s, answer)

    def _lease(self, session: Session, prompt: Prompt, request: pb.LeaseRequest, load: Load | None) -> Reply:
        lease = self._store.lease(
            session.id, prompt, request.first_block, request.max_blocks, request.ttl_s, load,
            glance=request.glance and not session.remote, reads_hbm=_reads_hbm(session, request),
        )  # fmt: skip
        reply = lease_reply(self._store, lease)
        if load is not None:
            reply.waited_s = self._store.clock.now_s() - load.begun_s
        if lease.n_pending and load is not None:
            # Only what is on its way: the rest has been refused, or could not be read.
            reply.n_pending, reply.eta_s = min(lease.n_pending, load.n_waiting), load.eta_s
        return Reply(reply)

    def prefetch(self, session: Session, request: pb.PrefetchRequest) -> Result:
        prompt = self._prompts.read(session, request.prompt)
        begin = partial(self._store.begin_load, prompt, request.first_block, request.max_blocks)
        return self._waiting.loaded(session, begin, request.wait_s, partial(self._prefetched, prompt, request))

    def _prefetched(self, prompt: Prompt, request: pb.PrefetchRequest, load: Load | None) -> Reply:
        ids = self._store.match(prompt, request.max_blocks).ids
        n_ready = self._n_in_dram(prompt, ids, request.max_blocks)
        reply = pb.PrefetchReply(n_blocks=len(ids), n_ready=n_ready)
        if load is not None and not load.done:
            reply.n_pending, reply.eta_s = load.n_waiting, load.eta_s
        return Reply(reply)

    def persist(self, session: Session, request: pb.PersistRequest) -> Result:
        prompt, wait_s = self._prompts.read(session, request.prompt), checked_wait_s(request.wait_s)
        persist = self._store.begin_persist(prompt)
        if persist is None:
            return Reply(no_persist(self._store, len(self._store.match(prompt).ids)))
        return self._waiting.written([persist], wait_s, self._persisted)

    def _persisted(self, persists: Sequence[Persist]) -> Reply:
        (persist,) = persists
        n_durable = self._store.n_durable(persist)
        reply = pb.PersistReply(n_blocks=persist.n_blocks, n_durable=n_durable, n_pending=persist.n_waiting)
        reply.reason = self._store.why_not_durable(persist)
        return Reply(reply)

    def attach_lease(self, session: Session, request: pb.AttachLeaseRequest) -> Result:
        shards = digests_of(request.shards)
        lease = self._store.attach(
            session.id, session.tenant, request.lease_id, shards, request.namespace, request.block_bytes
        )
        if len(shards) == 1:
            return Reply(shard_reply(self._store, lease, shards[0]))
        return Reply(lease_reply(self._store, lease))

    def release(self, session: Session, request: pb.ReleaseRequest) -> Result:
        return Reply(pb.ReleaseReply(found=self._store.release(session.id, request.lease_id)))

    def renew(self, session: Session, request: pb.RenewRequest) -> Result:
        return Reply(pb.RenewReply(ttl_s=self._store.renew(session.id, request.lease_id, request.ttl_s)))

    def reserve(self, session: Session, request: pb.ReserveRequest) -> Result:
        prompt = self._prompts.read(session, request.prompt)
        reservation = self._store.begin_reserve(
            session.id, prompt, request.first_block, request.n_blocks, request.ttl_s, session.writer
        )
        pending = self._store.make_room(reservation)
        if pending is None and not self._store.room_is_coming(reservation):
            return self._reserved(reservation)
        return self._reserve_slowly(session, reservation, pending)

    async def _reserve_slowly(
        self, session: Session, reservation: Reservation, pending: PendingReclaim | None
    ) -> Reply:
        """Move blocks, and wait a moment for clients that were asked to unmap a region."""
        deadline_s = asyncio.get_running_loop().time() + UNMAP_WAIT_S
        try:
            for _ in range(STEPS_PER_RESERVE_MAX):
                if pending is not None:
                    await self._move(pending)
                elif not self._store.room_is_coming(reservation) or not await self._wait_unmapped(deadline_s):
                    break
                pending = self._store.make_room(reservation)
        except BaseException:
            self._store.abort(session.id, reservation.id)
            raise
        if pending is not None:
            self._store.cancel_reclaim(pending)
        return self._reserved(reservation)

    def _reserved(self, reservation: Reservation) -> Reply:
        return Reply(reserve_reply(self._store, self._store.finish_reserve(reservation)))

    async def _wait_unmapped(self, deadline_s: float) -> bool:
        self._unmapped.clear()
        self._ask_to_unmap()
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._unmapped.wait()
        except TimeoutError:
            return False
        return True

    async def _move(self, pending: PendingReclaim) -> None:
        copying = asyncio.ensure_future(asyncio.to_thread(pending.copy))
        try:
            await asyncio.shield(copying)
        except BaseException:
            # Whoever cancels must wait for the thread: it writes to slots that are about to be free.
            await asyncio.wait([copying])
            self._store.cancel_reclaim(pending)
            raise
        self._store.finish_reclaim(pending)

    def commit(self, session: Session, request: pb.CommitRequest) -> Result:
        done = self._store.commit(session.id, request.reservation_id, request.n_blocks)
        return Reply(pb.CommitReply(n_committed=done.n_committed, n_duplicate=done.n_duplicate))

    def abort(self, session: Session, request: pb.AbortRequest) -> Result:
        return Reply(pb.AbortReply(found=self._store.abort(session.id, request.reservation_id)))

    def map_regions(self, session: Session, request: pb.MapRegionsRequest) -> Result:
        """Descriptors of regions of the session's own tenant; a writable one goes to its writer only."""
        ids = list(request.region_ids)
        if not 0 < len(ids) <= MAX_DESCRIPTORS:
            raise BadInputError(f"{len(ids)} regions were asked for; ask for 1 to {MAX_DESCRIPTORS} at a time")
        regions = [
            self._store.share_region(session.id, session.tenant, region_id, writable=request.writable)
            for region_id in ids
        ]
        reply = pb.MapRegionsReply(
            region_ids=ids,
            sizes_bytes=[region.size_bytes for region in regions],
            unsealed_ids=[region.id for region in regions if region.unsealed],
        )
        return Reply(reply, tuple(region.fd for region in regions))

    def regions_mapped(self, session: Session, request: pb.RegionsMappedRequest) -> Result:
        for region_id in _bounded(request.region_ids):
            self._store.seal_region(session.id, region_id)
        return Reply(pb.RegionsMappedReply())

    def regions_unmapped(self, session: Session, request: pb.RegionsUnmappedRequest) -> Result:
        for region_id in _bounded(request.region_ids):
            self._store.mapped.remove_mapper(region_id, session.id)
        if request.settled_epoch == self._epoch:
            self._store.dram.settle(session.id)
        self.memory_came_back()
        return Reply(pb.RegionsUnmappedReply())

    def memory_came_back(self) -> None:
        """A client has unmapped regions or is gone: whoever waits for room looks again."""
        self._unmapped.set()
        if self._store.hierarchy is not None:
            self._store.hierarchy.onboarder.pump()

    def pin(self, session: Session, request: pb.PinRequest) -> Result:
        holder = NO_SESSION if request.keep else session.id
        pin = self._store.pin(holder, self._prompts.read(session, request.prompt), request.ttl_s)
        n_blocks = len(pin.ids) if pin.n_blocks is None else pin.n_blocks
        return Reply(pb.PinReply(pin_id=pin.id, n_blocks=n_blocks, ttl_s=life_s(self._store, pin.deadline_s)))

    def unpin(self, session: Session, request: pb.UnpinRequest) -> Result:
        return Reply(pb.UnpinReply(found=self._store.unpin(session.id, request.pin_id, session.tenant)))

    def stats(self, session: Session, request: pb.StatsRequest) -> Result:  # noqa: ARG002 - every handler has this shape
        numbers, texts = self._stats()
        latencies = [
            pb.Latency(method=method, waited=waited, counts=pack(np.array(each.counts), U64), total_s=each.total)
            for method, waited, each in self._latencies()
        ]
        bounds_s = pack(np.array(LATENCY_BOUNDS_S), F64)
        return Reply(pb.StatsReply(numbers=numbers, texts=texts, bounds_s=bounds_s, latencies=latencies))

    def _n_in_dram(self, prompt: Prompt, ids: Ids, max_blocks: int = 0) -> int:
        """How many leading blocks a lease would give at once."""
        if self._store.hierarchy is None:
            return len(ids)
        if prompt.namespace.parts:
            return self._store.hybrid_in_dram(prompt, max_blocks)
        here = self._store.index.resident(ids, DRAM)
        return len(here) if here.all() else int(here.argmin())


def _reads_hbm(session: Session, request: pb.LeaseRequest) -> bool:
    return request.hbm and not request.glance and not session.remote


def _bounded(region_ids: Sequence[int]) -> Sequence[int]:
    if len(region_ids) > REGIONS_MAX:
        raise BadInputError(f"{len(region_ids)} regions in one message; the most is {REGIONS_MAX}")
    return region_ids
