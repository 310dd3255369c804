"""WATCH: the events of a tenant's blocks, as they come; a request waits for the first of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import DRAM
from kvstore.server.admin_handlers import tenant_asked_for
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.server.waits import checked_wait_s
from kvstore.store.admin import Administration
from kvstore.store.events import Batch, Events
from kvstore.store.store import Store
from kvstore.types import TOKEN_BYTES, Namespace, RowKind
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import U8, U32, U64, pack

EVENTS_PER_REPLY_MAX = 1 << 13


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
        wait_s = checked_wait_s(request.wait_s)
        self._log.watched(self._store.clock.now_s())
        seq = self._log.last_seq if request.from_now else request.after_seq
        most = min(request.max_events or EVENTS_PER_REPLY_MAX, EVENTS_PER_REPLY_MAX)
        reply = self._reply(self._log.after(seq, most), tenant)
        if not wait_s or _says_something(reply):
            return Reply(reply)
        return self._later(reply, tenant, most, wait_s)

    async def _later(self, reply: pb.WatchReply, tenant: str | None, most: int, wait_s: float) -> Reply:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        try:
            while not _says_something(reply):
                if self._log.last_seq <= reply.next_seq and not await self._next_event(deadline_s):
                    break
                reply = self._reply(self._log.after(reply.next_seq, most), tenant)
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

    def _reply(self, events: Events, tenant: str | None) -> pb.WatchReply:
        reply = pb.WatchReply(next_seq=events.next_seq, epoch=self._epoch, n_lost=events.n_lost, gap=events.gap)
        skip = events.skip
        for batch in events.batches:
            reply.batches.extend(self._messages(batch, skip, tenant))
            skip = 0
        return reply

    def _messages(self, batch: Batch, skip: int, tenant: str | None) -> Iterator[pb.EventBatch]:
        """A batch as messages, one for each namespace that the tenant may see."""
        ordinals = batch.namespaces[skip:]
        for ordinal in np.unique(ordinals).tolist():
            digest, namespace = self._admin.whose(ordinal)
            if tenant is not None and (namespace is None or namespace.tenant != tenant):
                continue
            at = np.flatnonzero(ordinals == ordinal) + skip
            message = pb.EventBatch(
                time_s=batch.time_s,
                kind=batch.kind,
                tier="dram" if batch.tier == DRAM else "nvme",
                reason=batch.reason or "",
                namespace=digest,
                seqs=pack(at + batch.first_seq, U64),
                keys=batch.keys[at].tobytes(),
            )
            if batch.parents is not None:
                message.parents = batch.parents[at].tobytes()
            if batch.row_bytes is not None:
                message.n_tokens = pack(_n_tokens(batch.row_bytes[at], namespace), U32)
            if batch.last is not None:
                message.last = pack(batch.last[at], U8)
            yield message


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
