"""Requests about a shard family: the same methods, with prompts that name all its shards; and the shards' slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvstore.errors import EndedError
from kvstore.lease import NO_SESSION
from kvstore.onboard import Load
from kvstore.persist import Persist
from kvstore.server.loads import Waiting
from kvstore.server.prompts import PromptReader
from kvstore.server.replies import Reply, Result, lease_reply, life_s, no_persist, shard_reply
from kvstore.server.session import Session
from kvstore.server.waits import checked_wait_s
from kvstore.store.store import Store
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

Handler = Callable[[Session, Any], Result]


class FamilyHandlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(self, store: Store, prompts: PromptReader, waiting: Waiting) -> None:
        self._store = store
        self._prompts = prompts
        self._waiting = waiting

    def register(self, by_method: dict[int, Handler]) -> None:
        """Take the requests of these methods that name shards; those that don't go where they went before."""
        of_family: dict[int, Handler] = {
            Method.MATCH: self.match,
            Method.LEASE: self.lease,
            Method.PREFETCH: self.prefetch,
            Method.PERSIST: self.persist,
            Method.PIN: self.pin,
        }
        for method, handler in of_family.items():
            by_method[method] = partial(_either, by_method[method], handler)
        by_method[Method.LEASE_SHARD] = self.lease_shard

    def match(self, session: Session, request: pb.MatchRequest) -> Result:
        prompt = self._prompts.read_family(session, request.prompt)
        reach = self._store.family_match(prompt)
        reply = pb.MatchReply(
            n_blocks=reach.n_blocks,
            partial_tokens=reach.partial_tokens,
            n_tokens=reach.n_blocks * prompt.block_tokens + reach.partial_tokens,
            n_dram_blocks=self._store.family_in_dram(reach.ids[:, : reach.n_blocks]),
        )
        return Reply(reply)

    def lease(self, session: Session, request: pb.LeaseRequest) -> Result:
        prompt = self._prompts.read_family(session, request.prompt)
        first_block, max_blocks = request.first_block, request.max_blocks

        def answer(load: Load | None) -> Reply:
            lease = self._store.family_lease(session.id, prompt, first_block, max_blocks, request.ttl_s, load)
            reply = lease_reply(self._store, lease)
            if lease.n_pending and load is not None:
                reply.n_pending, reply.eta_s = min(lease.n_pending, load.n_waiting), load.eta_s
            return Reply(reply)

        begin = partial(self._store.begin_family_load, prompt, first_block, max_blocks)
        return self._waiting.loaded(session, begin, request.wait_s, answer)

    def prefetch(self, session: Session, request: pb.PrefetchRequest) -> Result:
        prompt = self._prompts.read_family(session, request.prompt)

        def answer(load: Load | None) -> Reply:
            reach = self._store.family_match(prompt, request.max_blocks)
            n_ready = self._store.family_in_dram(reach.ids[:, : reach.n_blocks])
            reply = pb.PrefetchReply(n_blocks=reach.n_blocks, n_ready=n_ready)
            if load is not None and not load.done:
                reply.n_pending, reply.eta_s = load.n_waiting, load.eta_s
            return Reply(reply)

        begin = partial(self._store.begin_family_load, prompt, request.first_block, request.max_blocks)
        return self._waiting.loaded(session, begin, request.wait_s, answer)

    def persist(self, session: Session, request: pb.PersistRequest) -> Result:
        """Every shard's stored prefix is written; what counts is the least that is durable of all."""
        prompt, wait_s = self._prompts.read_family(session, request.prompt), checked_wait_s(request.wait_s)
        if not self._store.family_match(prompt).ids.size:
            return Reply(no_persist(self._store, 0))
        begun = [self._store.begin_persist(shard) for shard in prompt.shards]
        persists = [persist for persist in begun if persist is not None]
        if len(persists) < len(begun):
            for persist in persists:
                self._store.end_persist(persist)
            return Reply(no_persist(self._store, self._store.family_match(prompt).n_blocks))
        return self._waiting.written(persists, wait_s, self._persisted)

    def _persisted(self, persists: Sequence[Persist]) -> Reply:
        reply = pb.PersistReply(
            n_blocks=min(len(persist.ids) for persist in persists),
            n_durable=min(self._store.n_durable(persist) for persist in persists),
            n_pending=max(persist.n_waiting for persist in persists),
        )
        if reply.n_durable < reply.n_blocks:
            reply.reason = next(filter(None, map(self._store.why_not_durable, persists)), "")
        return Reply(reply)

    def pin(self, session: Session, request: pb.PinRequest) -> Result:
        prompt = self._prompts.read_family(session, request.prompt)
        pin = self._store.family_pin(NO_SESSION if request.keep else session.id, prompt, request.ttl_s)
        n_blocks = len(pin.ids) // len(prompt.shards)
        return Reply(pb.PinReply(pin_id=pin.id, n_blocks=n_blocks, ttl_s=life_s(self._store, pin.deadline_s)))

    def lease_shard(self, session: Session, request: pb.LeaseShardRequest) -> Result:
        lease = self._store.leases.get(request.lease_id)
        if lease is None or not lease.right_of(session.id, self._store.clock.now_s()):
            raise EndedError(f"lease {request.lease_id} is unknown or has ended: lease the prefix again")
        return Reply(shard_reply(self._store, lease, request.shard))


def _either(plain: Handler, of_family: Handler, session: Session, request: Any) -> Result:
    return of_family(session, request) if request.prompt.shards else plain(session, request)
