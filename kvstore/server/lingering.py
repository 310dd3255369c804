"""Sessions that were cut off for good: their processes live, but nothing says any more what those have mapped.

Such is a client that was closed while no daemon was there, or while arrays over its memory were alive. What its
process really maps is looked up every few seconds; what it maps no longer is nobody's any more.

A region that is not mapped can't be mapped later: a client that has mapped one asks the daemon for a sign of life
over the session's connection before it uses it, and the sessions looked at have none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable

from kvstore.logs import about
from kvstore.server.mapped_files import mapped_inodes
from kvstore.server.session import Session, Sessions
from kvstore.store.mapped import Mapped

LOOK_S = 2.0

Seen = list[tuple[Session, frozenset[int]]]

log = logging.getLogger("kvstore.server")


class Lingering:
    """Looks after the sessions of a daemon that linger. Called on the loop's thread; no call blocks."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sessions: Sessions,
        mapped: Mapped,
        end_session: Callable[[Session], None],
        memory_came_back: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._sessions = sessions
        self._mapped = mapped
        self._end_session = end_session
        self._memory_came_back = memory_came_back
        self._look_at_s = 0.0
        self._lives: dict[int, int] = {}
        """Of the sessions being looked at, how often each had come back then. Empty: no look is under way."""

    def tick(self, now_s: float) -> None:
        """Begin to look if it is time. That is done on a thread of its own, as it may take long."""
        if self._lives or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        # This very process maps everything itself: nothing can be told of a client inside it.
        lingering = [each for each in self._sessions if _lingers(each) and each.pid != os.getpid()]
        if not lingering:
            return
        try:
            looks = [(session, os.dup(session.pidfd)) for session in lingering]
        except OSError:
            return  # out of descriptors: another time
        self._lives = {session.id: session.n_returns for session in lingering}
        threading.Thread(target=self._look, args=(looks,), name="kvstore-look", daemon=True).start()

    def _look(self, looks: list[tuple[Session, int]]) -> None:
        seen: Seen = []
        for session, pidfd in looks:
            inodes = mapped_inodes(pidfd)
            os.close(pidfd)
            if inodes is not None:
                seen.append((session, inodes))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            self._loop.call_soon_threadsafe(self._looked, seen)

    def _looked(self, seen: Seen) -> None:
        lives, self._lives = self._lives, {}
        for session, inodes in seen:
            is_here = self._sessions.get(session.id) is session
            if is_here and _lingers(session) and session.n_returns == lives[session.id]:
                self._let_go(session, inodes)

    def _let_go(self, session: Session, inodes: frozenset[int]) -> None:
        mapped = self._mapped.mapped_by(session.id)
        gone = [region_id for region_id, inode in mapped.items() if inode and inode not in inodes]
        if len(gone) == len(mapped):
            log.info(
                "client %s (process %d) has unmapped everything without a word: it is gone",
                session.client_name, session.pid,
                extra=about("client_left", client=session.client_name, session=session.id, pid=session.pid),
            )  # fmt: skip
            self._end_session(session)
        elif gone:
            for region_id in gone:
                self._mapped.remove_mapper(region_id, session.id)
            self._memory_came_back()


def _lingers(session: Session) -> bool:
    """Whether nothing more comes from the client, unless it says hello again."""
    return not session.live and session.calls is None and session.pidfd >= 0
