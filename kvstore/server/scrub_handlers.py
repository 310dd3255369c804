"""VERIFY: one slice of a check of all that the daemon holds. The client asks for one slice after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.errors import UnavailableError
from kvstore.prefix_index.block_table import Ids
from kvstore.server.admin_handlers import tenant_asked_for
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.server.waits import checked_wait_s, paced, wait_for
from kvstore.store.scrub import Scrub, Scrubber
from kvstore.store.store import Store
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

SCRUBS_MAX = 2
"""Slices whose frames are read at a time, whoever asks: each takes memory."""
PROBLEMS_MAX = 100
"""Contradictions told in one reply."""


class ScrubHandlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._scrubber = Scrubber(store)
        self._under_way: set[Scrub] = set()

    def register(self, by_method: dict[int, Callable[[Session, Any], Result]]) -> None:
        """Take the requests that are answered here."""
        by_method[Method.VERIFY] = self.verify

    def verify(self, session: Session, request: pb.VerifyRequest) -> Result:
        tenant_asked_for(session, all_tenants=True)  # it is about everybody's blocks
        wait_s = checked_wait_s(request.wait_s)
        self._under_way = {scrub for scrub in self._under_way if not scrub.done}
        if request.frames and len(self._under_way) >= SCRUBS_MAX:
            raise UnavailableError("frames are being verified for others already: wait until they are done")
        ids = self._scrubber.slice_from(request.first_id)
        scrub = self._scrubber.begin(ids) if request.frames else None
        if scrub is not None:
            self._under_way.add(scrub)
        return self._later(request.first_id, ids, scrub, wait_s)

    async def _later(self, first_id: int, ids: Ids, scrub: Scrub | None, wait_s: float) -> Reply:
        table = self._store.index.table
        problems: list[str] = []
        await paced(self._scrubber.contradictions(ids, problems))
        self._store.counters.add("scrub_contradictions", len(problems))
        next_id = int(ids[-1]) + 1 if len(ids) else max(table.n_used, first_id)
        reply = pb.VerifyReply(next_id=next_id, end_id=table.n_used, n_blocks=len(ids))
        reply.problems.extend(problems[:PROBLEMS_MAX])
        if scrub is not None:
            await wait_for(scrub, wait_s)
            if scrub.done:
                reply.n_frames, reply.n_bytes = len(scrub.ids) - scrub.n_gone, int(scrub.sizes.sum())
                reply.n_corrupt, reply.n_unreadable = scrub.n_corrupt, scrub.n_unreadable
            else:
                reply.n_unread = len(scrub.ids)
        return Reply(reply)
