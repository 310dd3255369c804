"""A selector that stays awake between the requests of a burst.

Putting a core to sleep and waking it costs more than most requests take (on virtual machines several times
as much). So after an event that came soon after the one before, look again for a moment before sleeping.
An idle daemon sleeps; one that is asked now and then sleeps in between.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import time

from kvstore.config import DaemonConfig

Events = list[tuple[selectors.SelectorKey, int]]


class PollingSelector(selectors.EpollSelector):
    """``EpollSelector`` that polls for ``poll_s`` at most where the last wait was shorter than that."""

    def __init__(self, poll_s: float) -> None:
        super().__init__()
        self._poll_s = poll_s
        self._busy = False

    def select(self, timeout: float | None = None) -> Events:
        """As ``EpollSelector.select``; blocks, the first ``poll_s`` of it without sleeping in a burst."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        start_s = time.monotonic()
        if self._busy:
            end_s = start_s + (self._poll_s if timeout is None else min(self._poll_s, timeout))
            while time.monotonic() < end_s:
                ready = super().select(0)
                if ready:
                    return ready
                os.sched_yield()  # the kernel likes to wake a client on the core of who answers it
            timeout = None if timeout is None else max(timeout - self._poll_s, 0)
        ready = super().select(timeout)
        self._busy = bool(ready) and time.monotonic() - start_s < self._poll_s
        return ready


def new_loop(config: DaemonConfig) -> asyncio.AbstractEventLoop:
    """The event loop a daemon of this configuration runs on."""
    if not config.poll_us:
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(PollingSelector(config.poll_us * 1e-6))
