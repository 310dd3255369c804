"""What routers ask: how much of prompts is stored where, and how long loading it would take."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import BadInputError
from kvstore.server.prompts import PromptReader
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.store.overlap import Overlap
from kvstore.store.store import Store
from kvstore.wire import kvstore_pb2 as pb

PROMPTS_MAX = 1024
SLICE_S = 0.001
"""So long the loop works on the prompts of one request before others have their turn."""


class OverlapHandlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(self, store: Store, prompts: PromptReader, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` measures slices."""
        self._store = store
        self._prompts = prompts
        self._clock = clock

    def overlap(self, session: Session, request: pb.OverlapRequest) -> Result:
        if len(request.prompts) > PROMPTS_MAX:
            raise BadInputError(f"{len(request.prompts)} prompts in one request; the most is {PROMPTS_MAX}")
        asked = _Asked(session, request.prompts)
        return _reply(asked.found) if self._go_on(asked) else self._later(asked)

    async def _later(self, asked: _Asked) -> Reply:
        while True:
            await asyncio.sleep(0)
            if self._go_on(asked):
                return _reply(asked.found)

    def _go_on(self, asked: _Asked) -> bool:
        """Work for one slice; True once all is answered."""
        until_s = self._clock() + SLICE_S
        for message in asked.messages[len(asked.found) :]:
            whole = self._prompts.read_family if message.shards else self._prompts.read
            asked.found.append(self._store.overlap(whole(asked.session, message)))
            if self._clock() >= until_s:
                break
        return len(asked.found) == len(asked.messages)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, and what is known of its first prompts."""

    session: Session
    messages: Sequence[pb.Prompt]
    found: list[Overlap] = field(default_factory=list)


def _reply(found: list[Overlap]) -> Reply:
    counts, times = struct.Struct(f"<{len(found)}Q").pack, struct.Struct(f"<{len(found)}d").pack
    return Reply(
        pb.OverlapReply(
            n_tokens=counts(*[each.n_tokens for each in found]),
            n_dram_tokens=counts(*[each.n_dram_tokens for each in found]),
            n_loading_tokens=counts(*[each.n_loading_tokens for each in found]),
            load_s=times(*[each.load_s for each in found]),
            load_error=times(*[each.load_error for each in found]),
            n_hbm_tokens=counts(*[each.n_hbm_tokens for each in found]),
        )
    )
