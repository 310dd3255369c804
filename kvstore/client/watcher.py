"""The thread of a session: waits for the daemon's events and for work, and lets the session deal with both."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import weakref
from typing import Protocol

from kvstore.logs import about

_LOG = logging.getLogger(__name__)


class Watched(Protocol):
    """What the thread serves."""

    def tick(self) -> tuple[int, float] | None:
        """One turn: what to poll (-1 for nothing) and for how many seconds; None to end."""
        ...

    def listen(self) -> None:
        """There is something to read."""
        ...


def watch(ref: weakref.ref[Watched], wake_fd: int, whose: str) -> None:
    """The thread: holds the session only while it works, so that a forgotten client can be collected.

    That is logged, with ``whose`` session it was: what it held was held until then.
    """
    while True:
        session = ref()
        if session is None:
            os.close(wake_fd)  # forgotten without a close: nobody else will
            _LOG.warning(
                "%s was never closed: call close(), or use it in a with statement", whose,
                extra=about("client_not_closed", client=whose),
            )  # fmt: skip
            return
        polled = session.tick()
        del session
        if polled is None:
            return
        fd, timeout_s = polled
        poller = select.poll()
        poller.register(wake_fd, select.POLLIN)
        if fd >= 0:
            poller.register(fd, select.POLLIN)
        ready = [ready_fd for ready_fd, _ in poller.poll(timeout_s * 1000)]
        if wake_fd in ready:
            with contextlib.suppress(OSError):  # the session was closed meanwhile
                os.eventfd_read(wake_fd)
        if fd in ready:
            session = ref()
            if session is not None:
                session.listen()
            del session
