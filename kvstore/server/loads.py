"""Requests that may wait until blocks have been read from NVMe, or written to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.errors import SessionEndedError
from kvstore.onboard import Load
from kvstore.persist import Persist
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.server.waits import checked_wait_s, wait_for
from kvstore.store.store import Store


class Waiting:
    """Answers at once where nothing is to be waited for, else with an awaitable. May be cancelled at any time."""

    def __init__(self, store: Store, ask_to_unmap: Callable[[], None]) -> None:
        self._store = store
        self._ask_to_unmap = ask_to_unmap

    def loaded(
        self, session: Session, begin: Callable[[], Load | None], wait_s: float, answer: Callable[[Load | None], Reply]
    ) -> Result:
        """``answer`` when what the request is about is in DRAM, or can't be waited for any longer."""
        checked_wait_s(wait_s)
        load = begin()
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

    def written(
        self, persists: Sequence[Persist], wait_s: float, answer: Callable[[Sequence[Persist]], Reply]
    ) -> Result:
        """``answer`` when all that could be written is durable, or can't be waited for any longer."""
        if wait_s and not all(persist.done for persist in persists):
            return self._after_writes(persists, wait_s, answer)
        try:
            return answer(persists)
        finally:
            self._end(persists)

    async def _after_writes(
        self, persists: Sequence[Persist], wait_s: float, answer: Callable[[Sequence[Persist]], Reply]
    ) -> Reply:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        try:
            for persist in persists:
                await wait_for(persist, max(deadline_s - loop.time(), 0.0))
            return answer(persists)
        finally:
            self._end(persists)

    def _end(self, persists: Sequence[Persist]) -> None:
        for persist in persists:
            self._store.end_persist(persist)


def _must_live(session: Session) -> None:
    if not session.live:
        raise SessionEndedError("the session ended while this request waited: say hello again")
