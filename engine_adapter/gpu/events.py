"""Events of a device: used again and again, as making one costs more than recording it; and what is done after them."""

from __future__ import annotations

import contextlib
import logging
import os
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
    """Does things when events are over, on a thread that lives as long as there are any. May be used by any thread.

    In a forked child nothing is done: the work and what is to follow it are the parent's.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pid = os.getpid()
        self._marks = EventPool(device)
        self._stream: int | None = None
        """Has nothing but waits, so that an event may be recorded again or freed as soon as it was given here."""
        self._state = threading.Condition()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._running = False
        self._lost: list[Callable[[], None]] = []

    def do(self, event: int, then: Callable[[], None]) -> None:
        """Call ``then`` after an event, as recorded by now, and those of earlier calls are over; never, if the device
        fails before. Raises BadInputError for what is no event: nothing is to be done then.
        """
        with self._state:
            if self._stream is None:
                self._stream = self._device.stream()
            mark = self._marks.take()
            try:
                self._device.wait_event(self._stream, event)
                self._device.record(mark, self._stream)
                if not self._running:
                    threading.Thread(target=self._run, name="kvstore-after", daemon=True).start()
                    self._running = True
            except BaseException:
                self._marks.give_back(mark)
                raise
            self._waiting.append((mark, then))

    def close(self) -> None:
        """Wait until all is done that can be."""
        if os.getpid() != self._pid:
            return
        with self._state:
            self._state.wait_for(lambda: not self._running)
            stream, self._stream = self._stream, None
            with contextlib.suppress(DeviceError):  # a device that failed gives nothing back
                self._marks.close()
                if stream is not None:
                    self._device.free_stream(stream)

    def _run(self) -> None:
        while True:
            with self._state:
                if not self._waiting:
                    self._running = False
                    self._state.notify_all()
                    return
                mark, then = self._waiting[0]
            try:
                self._device.sync_event(mark)
                then()
            except DeviceError as error:
                self._lost.append(then)
                _LOG.error("a device failed with work under way", extra=about("device_failed", reason=str(error)))
            except Exception as error:
                # What else waits here must not be held up by it.
                self._lost.append(then)
                _LOG.exception(
                    "what was to follow work of a device failed", extra=about("after_event_failed", reason=str(error))
                )
            with self._state:
                self._waiting.popleft()
                self._marks.give_back(mark)
            del then
