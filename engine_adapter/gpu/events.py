"""Events of a device: used again and again, as making one costs more than recording it; and what is done after them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvstore.device.seam import Device
from kvstore.errors import DeviceError
from kvstore.logs import about

_LOG = logging.getLogger(__name__)


class EventPool:
    """May be used by any thread, also while garbage is collected: it has no lock.

    Who gives an event back may still be waited for on it: that only waits for more.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: deque[int] = deque()
        self._all: list[int] = []

    def take(self) -> int:
        """An event that nobody else records."""
        try:
            return self._free.pop()
        except IndexError:
            event = self._device.event()
            self._all.append(event)
            return event

    def give_back(self, *events: int) -> None:
        """They are recorded no more by who took them."""
        self._free.extend(events)

    def close(self) -> None:
        """End all events."""
        self._free.clear()
        while self._all:
            self._device.free_event(self._all.pop())


class AfterEvents:
    """Does things when events are over, on a thread that lives as long as there are any. May be used by any thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._state = threading.Condition()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._running = False
        self._lost: list[Callable[[], None]] = []

    def do(self, event: int, then: Callable[[], None]) -> None:
        """Call ``then`` after an event, as recorded by now, is over; never, if the device fails before."""
        with self._state:
            self._waiting.append((event, then))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="kvstore-after", daemon=True).start()

    def close(self) -> None:
        """Wait until all is done."""
        with self._state:
            self._state.wait_for(lambda: not self._running)

    def _run(self) -> None:
        while True:
            with self._state:
                if not self._waiting:
                    self._running = False
                    self._state.notify_all()
                    return
                event, then = self._waiting[0]
            try:
                self._device.sync_event(event)
                then()
            except DeviceError as error:
                self._lost.append(then)
                _LOG.error("a device failed with work under way", extra=about("device_failed", reason=str(error)))
            with self._state:
                self._waiting.popleft()
            del then
