"""What an adapter has done, counted: its threads share one set."""

from __future__ import annotations

import threading

from kvstore.metrics import Counters


class SharedCounters:
    """``Counters`` that any thread may raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters()

    def add(self, name: str, amount: float = 1) -> None:
        """Raise one counter."""
        with self._lock:
            self._counters.add(name, amount)

    def snapshot(self) -> dict[str, float]:
        """A copy of all counters that were ever raised."""
        with self._lock:
            return self._counters.snapshot()
