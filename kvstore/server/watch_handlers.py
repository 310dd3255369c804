"""WATCH: the events of a tenant's blocks, as they come; a request waits for the first of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.prefix_index.block_table import TIER_NAMES
from kvstore.server.admin_handlers import filter_of, tenant_asked_for
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.server.waits import checked_wait_s
from kvstore.store.admin import Administration, NamespaceFilter
from kvstore.store.events import Batch, Events, Kind
from kvstore.store.store import Store
from kvstore.types import TOKEN_BYTES, Namespace, RowKind
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import U8, U32, U64, pack

EVENTS_PER_REPLY_MAX = 1 << 13


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events are meant: of whose namespaces (None: of all tenants'), of which kinds."""

    tenant: str | None
    namespaces: NamespaceFilter
    kinds: frozenset[Kind]


class WatchHandlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._log = store.events
        self._admin = Administration(store)
        self._epoch = epoch

    def register(self, by_method: dict[int, Callable[[Session, Any], Result]]) -> None:
        """Take the requests that are answered here."""
        by_method[Method.WATCH] = self.watch

    def watch(self, session: Session, request: pb.WatchRequest) -> Result:
        tenant = tenant_asked_for(session, all_tenants=request.all_tenants)
        wanted = Wanted(tenant, filter_of(request.filter), _kinds(request))
        wait_s = checked_wait_s(request.wait_s)
        self._log.watched(self._store.clock.now_s())
        seq = self._log.last_seq if request.from_now else request.after_seq
        most = min(request.max_events or EVENTS_PER_REPLY_MAX, EVENTS_PER_REPLY_MAX)
        reply = self._reply(self._log.after(seq, most), wanted)
        if not wait_s or _says_something(reply):
            return Reply(reply)
        return self._later(reply, wanted, most, wait_s)

    async def _later(self, reply: pb.WatchReply, wanted: Wanted, most: int, wait_s: float) -> Reply:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        try:
            while not _says_something(reply):
                if self._log.last_seq <= reply.next_seq and not await self._next_event(deadline_s):
                    break
                reply = self._reply(self._log.after(reply.next_seq, most), wanted)
        finally:
            self._log.watched(self._store.clock.now_s())
        return Reply(reply)

    async def _next_event(self, deadline_s: float) -> bool:
        """Wait for one; False if there was none in time."""
        come = asyncio.get_running_loop().create_future()
        forget = self._log.on_event(lambda: None if come.done() else come.set_result(None))
        try:
            async with asyncio.timeout_at(deadline_s):
                await come
        except TimeoutError:
            return False
        finally:
            forget()
        return True

    def _reply(self, events: Events, wanted: Wanted) -> pb.WatchReply:
        reply = pb.WatchReply(next_seq=events.next_seq, epoch=self._epoch, n_lost=events.n_lost, gap=events.gap)
        skip = events.skip
        for batch in events.batches:
            if batch.kind in wanted.kinds:
                reply.batches.extend(self._messages(batch, skip, wanted))
            skip = 0
        return reply

    def _messages(self, batch: Batch, skip: int, wanted: Wanted) -> Iterator[pb.EventBatch]:
        """A batch as messages, one for each namespace that is meant."""
        ordinals = batch.namespaces[skip:]
        for ordinal, known in self._admin.fitting(ordinals, wanted.namespaces, wanted.tenant).items():
            at = np.flatnonzero(ordinals == ordinal) + skip
            message = pb.EventBatch(
                time_s=batch.time_s,
                kind=batch.kind,
                tier=TIER_NAMES[batch.tier],
                reason=batch.reason or "",
                namespace=known.digest,
                seqs=pack(at + batch.first_seq, U64),
                keys=batch.keys[at].tobytes(),
            )
            if batch.parents is not None:
                message.parents = batch.parents[at].tobytes()
            if batch.row_bytes is not None:
                message.n_tokens = pack(_n_tokens(batch.row_bytes[at], known.namespace), U32)
            if batch.last is not None:
                message.last = pack(batch.last[at], U8)
            yield message


def _kinds(request: pb.WatchRequest) -> frozenset[Kind]:
    """Raises BadInputError for one that there isn't."""
    try:
        return frozenset(map(Kind, request.kinds)) or frozenset(Kind)
    except ValueError:
        wrong = next(each for each in request.kinds if each not in set(Kind))
        raise BadInputError(f"there are no events of kind {wrong[:40]!r}; give {', '.join(Kind)}") from None


def _says_something(reply: pb.WatchReply) -> bool:
    return bool(reply.batches) or reply.gap or reply.n_lost > 0


def _n_tokens(row_bytes: NDArray[np.uint32], namespace: Namespace | None) -> NDArray[np.uint32]:
    """Tokens of blocks; 0 where nobody has said what the namespace is."""
    if namespace is None:
        return np.zeros(len(row_bytes), np.uint32)
    whole = np.uint32(namespace.spec.block_tokens)
    if namespace.row_kind is RowKind.HASHES:
        return np.full(len(row_bytes), whole)
    return np.where(row_bytes == 0, whole, row_bytes // TOKEN_BYTES).astype(np.uint32)
