"""Time as a dependency, so that deadlines can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now_s(self) -> float:
        """Seconds since an arbitrary origin; never goes back. Doesn't block."""
        ...


class SystemClock:
    """CLOCK_MONOTONIC."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock can't go back by {-seconds} s")
        self._now_s += seconds
