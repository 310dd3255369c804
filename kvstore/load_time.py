"""How long moving bytes takes, learnt from what real moves took."""

from __future__ import annotations

import math
from collections import deque

MOVES_KEPT = 24
OLDER_COUNTS = 0.85
"""What a move counts for beside the one after it: the last six or so decide."""
ERROR_SHARE, ERROR_LOG_MAX = 0.2, 3.0
ERROR_OF_GUESS = 4.0
STRAY_LOG = 0.7
"""A move that took twice as long as expected, or half, counts in full; one that is further off by what it is off less,
so that a stall does not pass for what is normal."""
STIFFNESS = 0.01
"""What keeps start and rate where they are if moves say nothing about one of them, as those of one size."""
STEPS, STEP_LOG_MIN, STEP_LOG_MAX = 8, 0.01, 2.0
TOOK_S_MIN = 1e-7


class LoadTime:
    """A time to begin with, and one for each byte: ``start_s + n_bytes / bytes_per_s``.

    Fitted to the last moves with every observation, later ones counting for more (exponential weights), by the
    logarithms of times, so that small moves count as much as large ones: damped Gauss-Newton steps over the logarithms
    of both, which keeps them positive, with Huber's weights. Takes some tens of microseconds and constant memory. It
    has no clock: times are given.
    """

    def __init__(self, start_s: float, bytes_per_s: float) -> None:
        """Both are guesses, in force until there were moves."""
        self._start_s = start_s
        self._byte_s = 1.0 / bytes_per_s
        self._log_error = math.log(ERROR_OF_GUESS)
        self._moves: deque[tuple[int, float]] = deque(maxlen=MOVES_KEPT)
        self.n_observed = 0

    @property
    def bytes_per_s(self) -> float:
        """Of large moves."""
        return 1.0 / self._byte_s

    @property
    def error(self) -> float:
        """A factor, 1.0 or more: lately a move took, typically, so many times as long as expected, or as short.

        ``ERROR_OF_GUESS`` as long as nothing was observed.
        """
        return math.exp(self._log_error)

    def expected_s(self, n_bytes: int) -> float:
        """How long moving so many bytes takes, in seconds; 0 for none."""
        return self._start_s + n_bytes * self._byte_s if n_bytes > 0 else 0.0

    def observe(self, n_bytes: int, took_s: float) -> None:
        """So many bytes took so long. Nothing is learnt from none, or from a time that can't be."""
        if n_bytes <= 0 or not 0 <= took_s < math.inf:
            return
        log_took = math.log(max(took_s, TOOK_S_MIN))
        error = min(abs(log_took - math.log(self.expected_s(n_bytes))), ERROR_LOG_MAX)
        self.n_observed += 1
        self._log_error += max(ERROR_SHARE, 1 / (self.n_observed + 1)) * (error - self._log_error)
        self._moves.append((n_bytes, log_took))
        for _ in range(STEPS):
            if self._fit() < STEP_LOG_MIN:
                break

    def _fit(self) -> float:
        """One step; returns how far it went. ``of_start`` and ``of_bytes``, the shares in an expected time, are the
        slopes of its logarithm."""
        weight = 1.0
        starts, both, rates, start_pull, rate_pull = STIFFNESS, 0.0, STIFFNESS, 0.0, 0.0
        for n_bytes, log_took in reversed(self._moves):
            expected_s = self._start_s + n_bytes * self._byte_s
            off = log_took - math.log(expected_s)
            counts = weight * min(1.0, STRAY_LOG / abs(off)) if off else weight
            of_start = self._start_s / expected_s
            of_bytes = 1.0 - of_start
            starts += counts * of_start * of_start
            both += counts * of_start * of_bytes
            rates += counts * of_bytes * of_bytes
            start_pull += counts * of_start * off
            rate_pull += counts * of_bytes * off
            weight *= OLDER_COUNTS
        determinant = starts * rates - both * both
        start_step = _bounded((rates * start_pull - both * rate_pull) / determinant)
        rate_step = _bounded((starts * rate_pull - both * start_pull) / determinant)
        self._start_s *= math.exp(start_step)
        self._byte_s *= math.exp(rate_step)
        return max(abs(start_step), abs(rate_step))


def _bounded(step: float) -> float:
    return min(max(step, -STEP_LOG_MAX), STEP_LOG_MAX)
