"""Places for calls: each that runs takes one of the daemon's threads, so that they are counted."""

from __future__ import annotations

import threading
from collections import Counter

from kvstore.errors import UnavailableError


class Places:
    """At most so many calls at a time, and so many of one caller. For the threads of calls; nothing blocks."""

    def __init__(self, calls_max: int, calls_per_token_max: int) -> None:
        self._calls_max = calls_max
        self._calls_per_token_max = calls_per_token_max
        self._lock = threading.Lock()
        self._n_of: Counter[bytes] = Counter()
        self._n = 0

    def take(self, owner: bytes) -> None:
        """A place for a call of this caller, until ``give``. Raises UnavailableError where there is none."""
        with self._lock:
            if self._n >= self._calls_max:
                raise UnavailableError(
                    f"{self._calls_max} calls run already, the most this daemon takes (--grpc-calls-max): try later"
                )
            # Without tokens everybody is the same caller.
            if owner and self._n_of[owner] >= self._calls_per_token_max:
                raise UnavailableError(
                    f"{self._calls_per_token_max} calls with this token run already, the most that one may have "
                    "(--grpc-calls-per-token): try later"
                )
            self._n += 1
            self._n_of[owner] += 1

    def give(self, owner: bytes) -> None:
        """A call has ended."""
        with self._lock:
            self._n -= 1
            self._n_of[owner] -= 1
            if not self._n_of[owner]:
                del self._n_of[owner]
