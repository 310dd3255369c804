"""What the daemon does for each method, whatever the transport.

A handler takes a session and a request and returns a reply, perhaps with descriptors; or an awaitable, when
blocks must be moved before there is room, or when the client waits for blocks to be read or written. Such
an awaitable may be cancelled: it gives back what it holds.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstore.errors import BadInputError, EndedError, SessionEndedError
from kvstore.lease import Lease, Reservation
from kvstore.offload import Persist
from kvstore.onboard import Load
from kvstore.prefix_index.block_table import DRAM, Ids
from kvstore.prefix_index.rows import RowPath
from kvstore.room import PendingReclaim
from kvstore.server.session import Session
from kvstore.server.waits import checked_wait_s, wait_for
from kvstore.store.requests import Prompt
from kvstore.store.store import Store
from kvstore.tiers.dram import DramTier
from kvstore.types import ExtraKey, Namespace, RowKind
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import MAX_DESCRIPTORS, Method
from kvstore.wire.packing import I64, U64, pack

STEPS_PER_RESERVE_MAX = 16
UNMAP_WAIT_S = 0.1
"""How long a reservation waits for clients to unmap what was retired for it; what is not there then is skipped."""

EXTRAS_MAX = 4096
REGIONS_MAX = 4096


class Reply(NamedTuple):
    """A message and the descriptors that travel with it."""

    message: Message
    descriptors: tuple[int, ...] = ()


Result = Reply | Awaitable[Reply]


class Handlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(
        self,
        store: Store,
        client_policy_clock: bool,
        more_stats: Callable[[], tuple[dict[str, float], dict[str, str]]],
        ask_to_unmap: Callable[[], None],
        epoch: int,
    ) -> None:
        self._store = store
        self._client_policy_clock = client_policy_clock
        self._more_stats = more_stats
        self._ask_to_unmap = ask_to_unmap
        self._epoch = epoch
        self._unmapped = asyncio.Event()
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
        opened = self._store.namespaces.open(namespace, request.name)
        return Reply(pb.OpenNamespaceReply(digest=opened.digest))

    def match(self, session: Session, request: pb.MatchRequest) -> Result:
        prompt = self._prompt(session, request.prompt)
        found = self._store.match(prompt)
        n_blocks = len(found.ids)
        reply = pb.MatchReply(
            n_blocks=n_blocks,
            partial_tokens=found.partial_tokens,
            n_tokens=n_blocks * prompt.namespace.namespace.spec.block_tokens + found.partial_tokens,
            n_dram_blocks=self._n_in_dram(found.ids),
        )
        return Reply(reply)

    def lease(self, session: Session, request: pb.LeaseRequest) -> Result:
        prompt = self._prompt(session, request.prompt)
        return self._with_load(session, prompt, request, lambda load: self._lease(session, prompt, request, load))

    def _lease(self, session: Session, prompt: Prompt, request: pb.LeaseRequest, load: Load | None) -> Reply:
        lease = self._store.lease(session.id, prompt, request.first_block, request.max_blocks, request.ttl_s, load)
        reply = self._lease_reply(lease)
        if lease.n_pending and load is not None:
            # Only what is on its way: the rest has been refused, or could not be read.
            reply.n_pending, reply.eta_s = min(lease.n_pending, load.n_waiting), load.eta_s
        return Reply(reply)

    def prefetch(self, session: Session, request: pb.PrefetchRequest) -> Result:
        prompt = self._prompt(session, request.prompt)
        return self._with_load(session, prompt, request, lambda load: self._prefetched(prompt, request, load))

    def _prefetched(self, prompt: Prompt, request: pb.PrefetchRequest, load: Load | None) -> Reply:
        ids = self._store.match(prompt).ids
        if request.max_blocks:
            ids = ids[: request.max_blocks]
        reply = pb.PrefetchReply(n_blocks=len(ids), n_ready=self._n_in_dram(ids))
        if load is not None and not load.done:
            reply.n_pending, reply.eta_s = load.n_waiting, load.eta_s
        return Reply(reply)

    def _with_load(
        self,
        session: Session,
        prompt: Prompt,
        request: pb.LeaseRequest | pb.PrefetchRequest,
        answer: Callable[[Load | None], Reply],
    ) -> Result:
        """``answer`` when what the request is about is in DRAM, or can't be waited for any longer."""
        wait_s = checked_wait_s(request.wait_s)
        load = self._store.begin_load(prompt, request.first_block, request.max_blocks)
        if load is None:
            return answer(None)
        if not load.done:
            self._ask_to_unmap()  # what it is read into may have to come from regions that clients still map
        if wait_s and not load.done:
            return self._after_load(session, load, wait_s, answer)
        try:
            return answer(load)
        finally:
            self._store.end_load(load)

    async def _after_load(
        self, session: Session, load: Load, wait_s: float, answer: Callable[[Load | None], Reply]
    ) -> Reply:
        try:
            await wait_for(load, wait_s)
            _must_live(session)
            return answer(load)
        finally:
            self._store.end_load(load)

    def persist(self, session: Session, request: pb.PersistRequest) -> Result:
        prompt, wait_s = self._prompt(session, request.prompt), checked_wait_s(request.wait_s)
        persist = self._store.begin_persist(prompt)
        if persist is None:
            n_blocks = len(self._store.match(prompt).ids)
            no_tier = "" if self._store.hierarchy is not None else "the daemon has no NVMe tier (--nvme-dir)"
            return Reply(pb.PersistReply(n_blocks=n_blocks, reason=no_tier or "nothing of the prompt is stored"))
        if wait_s and not persist.done:
            return self._persist_later(persist, wait_s)
        try:
            return self._persisted(persist)
        finally:
            self._store.end_persist(persist)

    async def _persist_later(self, persist: Persist, wait_s: float) -> Reply:
        try:
            await wait_for(persist, wait_s)
            return self._persisted(persist)
        finally:
            self._store.end_persist(persist)

    def _persisted(self, persist: Persist) -> Reply:
        n_durable = self._store.n_durable(persist)
        reply = pb.PersistReply(n_blocks=len(persist.ids), n_durable=n_durable, n_pending=persist.n_waiting)
        reply.reason = self._store.why_not_durable(persist)
        return Reply(reply)

    def attach_lease(self, session: Session, request: pb.AttachLeaseRequest) -> Result:
        return Reply(self._lease_reply(self._store.attach(session.id, session.tenant, request.lease_id)))

    def release(self, session: Session, request: pb.ReleaseRequest) -> Result:
        return Reply(pb.ReleaseReply(found=self._store.release(session.id, request.lease_id)))

    def renew(self, session: Session, request: pb.RenewRequest) -> Result:
        return Reply(pb.RenewReply(ttl_s=self._store.renew(session.id, request.lease_id, request.ttl_s)))

    def reserve(self, session: Session, request: pb.ReserveRequest) -> Result:
        prompt = self._prompt(session, request.prompt)
        reservation = self._store.begin_reserve(
            session.id, prompt, request.first_block, request.n_blocks, request.ttl_s
        )
        pending = self._store.make_room(reservation)
        if pending is None and not self._store.room_is_coming(reservation):
            return self._reserve_reply(self._store.finish_reserve(reservation))
        return self._reserve_slowly(reservation, pending)

    async def _reserve_slowly(self, reservation: Reservation, pending: PendingReclaim | None) -> Reply:
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
            self._store.abort(reservation.writer, reservation.id)
            raise
        if pending is not None:
            self._store.cancel_reclaim(pending)
        return self._reserve_reply(self._store.finish_reserve(reservation))

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
        reply = pb.MapRegionsReply(region_ids=ids, sizes_bytes=[region.size_bytes for region in regions])
        return Reply(reply, tuple(region.fd for region in regions))

    def regions_mapped(self, session: Session, request: pb.RegionsMappedRequest) -> Result:
        for region_id in _bounded(request.region_ids):
            self._store.seal_region(session.id, region_id)
        return Reply(pb.RegionsMappedReply())

    def regions_unmapped(self, session: Session, request: pb.RegionsUnmappedRequest) -> Result:
        for region_id in _bounded(request.region_ids):
            self._store.dram.remove_mapper(region_id, session.id)
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
        pin = self._store.pin(session.id, self._prompt(session, request.prompt), request.ttl_s)
        return Reply(pb.PinReply(pin_id=pin.id, n_blocks=len(pin.ids), ttl_s=self._life_s(pin.deadline_s)))

    def unpin(self, session: Session, request: pb.UnpinRequest) -> Result:
        return Reply(pb.UnpinReply(found=self._store.unpin(session.id, request.pin_id)))

    def stats(self, session: Session, request: pb.StatsRequest) -> Result:  # noqa: ARG002 - every handler has this shape
        numbers, texts = self._store.stats()
        more_numbers, more_texts = self._more_stats()
        return Reply(pb.StatsReply(numbers={**numbers, **more_numbers}, texts={**texts, **more_texts}))

    def _prompt(self, session: Session, message: pb.Prompt) -> Prompt:
        opened = self._store.namespaces.get(message.namespace)
        if opened is None or opened.namespace.tenant != session.tenant:
            raise EndedError(f"namespace {message.namespace.hex()!r:.40} is not open here: open the namespace again")
        namespace = opened.namespace
        if namespace.row_kind is RowKind.HASHES:
            if message.extras:
                raise BadInputError("extra keys go with token rows only; an engine's hash covers its own extras")
            path = RowPath.from_hashes(message.rows, namespace.hash_bytes)
        else:
            if len(message.extras) > EXTRAS_MAX:
                raise BadInputError(f"{len(message.extras)} extra keys in one prompt; the most is {EXTRAS_MAX}")
            extras = [ExtraKey(extra.start_token, extra.n_tokens, extra.digest) for extra in message.extras]
            path = RowPath.from_tokens(message.rows, namespace.spec.block_tokens, extras)
        time_s = message.policy_time_s if self._client_policy_clock else self._store.clock.now_s()
        if not math.isfinite(time_s):
            raise BadInputError(f"policy_time_s is {time_s!r}; it must be a finite number of seconds")
        return Prompt(opened, opened.root_key(message.salt, message.lora), path, time_s, message.category & 0xFF)

    def _n_in_dram(self, ids: Ids) -> int:
        """How many leading blocks are in DRAM."""
        if self._store.hierarchy is None:
            return len(ids)
        here = self._store.index.resident(ids, DRAM)
        return len(here) if here.all() else int(here.argmin())

    def _lease_reply(self, lease: Lease) -> pb.LeaseReply:
        reply = pb.LeaseReply(
            lease_id=lease.id,
            n_blocks=lease.n_blocks,
            partial_tokens=lease.partial_tokens,
            n_tokens=lease.n_tokens,
            n_nvme=lease.n_nvme,
        )
        if lease.id:
            reply.ttl_s = self._life_s(lease.deadline_s)
            _fill(reply.slots, self._store.dram, self._store.index.slots(lease.ids))
        return reply

    def _reserve_reply(self, reservation: Reservation) -> Reply:
        reply = pb.ReserveReply(
            n_present=reservation.n_present,
            n_reserved=len(reservation.slots),
            skipped_reason=reservation.skipped_reason,
        )
        if len(reservation.slots):
            reply.reservation_id = reservation.id
            reply.ttl_s = self._life_s(reservation.deadline_s)
            _fill(reply.slots, self._store.dram, reservation.slots)
        return Reply(reply)

    def _life_s(self, deadline_s: float) -> float:
        return max(deadline_s - self._store.clock.now_s(), 0.0)


def _must_live(session: Session) -> None:
    if not session.live:
        raise SessionEndedError("the session ended while this request waited: say hello again")


def _bounded(region_ids: Sequence[int]) -> Sequence[int]:
    if len(region_ids) > REGIONS_MAX:
        raise BadInputError(f"{len(region_ids)} regions in one message; the most is {REGIONS_MAX}")
    return region_ids


def _fill(message: pb.Slots, dram: DramTier, slots: NDArray[np.int64]) -> None:
    described = dram.describe(slots)
    message.ids = pack(slots, I64)
    message.generations = pack(described.generations, U64)
    for region_id, slot_bytes, base in zip(
        described.region_ids, described.slot_bytes, described.generation_bases, strict=True
    ):
        message.regions.add(id=region_id, slot_bytes=slot_bytes, generation_base=base)
