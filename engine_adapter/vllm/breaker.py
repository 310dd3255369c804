"""Whether a daemon that has been slow is worth asking: after slow answers in a row it is left alone for a while."""

from __future__ import annotations

from kvstore.clock import Clock

SLOW_MAX = 3
REST_S_MIN, REST_S_MAX = 1.0, 30.0


class Breaker:
    """For one thread. ``slow_s``: what an answer may take without being slow."""

    def __init__(self, clock: Clock, slow_s: float) -> None:
        self._clock, self._slow_s = clock, slow_s
        self._n_slow = 0
        self._rest_s = REST_S_MIN
        self._until_s = 0.0

    def is_open(self) -> bool:
        """Whether to leave the daemon alone."""
        return self._clock.now_s() < self._until_s

    def took(self, seconds: float) -> None:
        """An answer, or the lack of one, took so long. One slow one after a rest begins the next, a longer one."""
        if seconds < self._slow_s:
            self._n_slow, self._rest_s = 0, REST_S_MIN
            return
        self._n_slow += 1
        if self._n_slow >= SLOW_MAX:
            self._until_s = self._clock.now_s() + self._rest_s
            self._rest_s = min(2 * self._rest_s, REST_S_MAX)
