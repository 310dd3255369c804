"""Events of a device, used again and again: making one costs more than recording it."""

from __future__ import annotations

import threading

from kvstore.device.seam import Device


class EventPool:
    """May be used by any thread. Who gives one back may still be waited for on it: that only waits for more."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._all: list[int] = []

    def take(self) -> int:
        """An event that nobody else records."""
        with self._lock:
            if self._free:
                return self._free.pop()
            event = self._device.event()
            self._all.append(event)
            return event

    def give_back(self, *events: int) -> None:
        """They are recorded no more by who took them."""
        with self._lock:
            self._free += events

    def close(self) -> None:
        """End all events."""
        with self._lock:
            for event in self._all:
                self._device.free_event(event)
            self._all, self._free = [], []
