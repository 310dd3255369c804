"""Measured rates, kept true by what real transfers take."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from kvstore.clock import Clock, SystemClock
from kvstore.plan.bandwidth import BandwidthTable
from kvstore.plan.ways import Direction, Way

HALF_LIFE_S = 30.0
"""What was observed counts for half as much after so long without anything new: a way that did badly is tried again."""
STEP = 0.3
"""Which share of what is unexplained an observation explains."""
LOG_MAX = math.log(32.0)
"""A transfer that took longer than this many times what was expected was stopped by something else."""
CONTENDED_RATIO = 0.7
CONTENDED_OBSERVED = 4.0
"""So many transfers must have been observed lately, by weight."""


@dataclass(frozen=True, slots=True)
class Contention:
    """A direction of the link that gives well below what was measured; ``ratio`` is what is left of it."""

    direction: Direction
    ratio: float
    reason: str


class _Drift:
    """How far off expectations are lately, as a logarithm, forgotten with time."""

    def __init__(self) -> None:
        self._log = 0.0
        self._weight = 0.0
        self._since_s = 0.0

    def log(self, now_s: float) -> float:
        return self._log * self._left(now_s)

    def weight(self, now_s: float) -> float:
        return self._weight * self._left(now_s)

    def move(self, by: float, now_s: float) -> None:
        left = self._left(now_s)
        self._log = min(max(self._log * left + by, -LOG_MAX), LOG_MAX)
        self._weight = self._weight * left + 1.0
        self._since_s = now_s

    def _left(self, now_s: float) -> float:
        return float(0.5 ** (max(now_s - self._since_s, 0.0) / HALF_LIFE_S))


class Calibration:
    """What a transfer takes by each way, now. May be used by any thread.

    The rates are those of ``table`` times two factors, learnt from ``observe``: one of the direction, as all ways share
    the link, and one of the way. Each explains half of what the two leave unexplained, so that a slow link does not
    make the other ways look fast, nor a way that the table flatters make them look slow.
    """

    def __init__(self, table: BandwidthTable, clock: Clock | None = None) -> None:
        self.table = table
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._directions = {direction: _Drift() for direction in Direction}
        self._ways = {key: _Drift() for key in table.curves}

    def knows(self, direction: Direction, way: Way) -> bool:
        """Whether that way was measured."""
        return (direction, way) in self.table.curves

    def expected_s(self, direction: Direction, way: Way, piece_bytes: float, n_pieces: float) -> float:
        """Seconds that so many pieces take now; infinite by a way that was not measured."""
        curve = self.table.curve(direction, way)
        if curve is None:
            return math.inf
        if n_pieces <= 0:
            return 0.0
        return curve.expected_s(piece_bytes, n_pieces) / self._factor(direction, way)

    def rate(self, direction: Direction, way: Way, piece_bytes: float) -> float:
        """GB/s of many such pieces now; 0 by a way that was not measured."""
        curve = self.table.curve(direction, way)
        return 0.0 if curve is None else curve.rate(piece_bytes) * self._factor(direction, way)

    def observe(self, direction: Direction, way: Way, piece_bytes: float, n_pieces: float, took_s: float) -> None:
        """So many pieces took so long, alone on their stream. Ignored where it says nothing: none, or no time."""
        curve = self.table.curve(direction, way)
        if curve is None or n_pieces <= 0 or piece_bytes <= 0 or not 0 < took_s < math.inf:
            return
        seen = math.log(curve.expected_s(piece_bytes, n_pieces) / took_s)
        with self._lock:
            now_s = self._clock.now_s()
            shared, own = self._directions[direction], self._ways[direction, way]
            off = min(max(seen, -LOG_MAX), LOG_MAX) - shared.log(now_s) - own.log(now_s)
            shared.move(STEP / 2 * off, now_s)
            own.move(STEP / 2 * off, now_s)

    def contention(self, direction: Direction) -> Contention | None:
        """Whether the link gives well below what was measured, whatever the way; None while it does not."""
        with self._lock:
            now_s = self._clock.now_s()
            shared = self._directions[direction]
            # A single way in use can't tell itself from the link: both factors are what it lost then.
            used = [drift for (to, _), drift in self._ways.items() if to == direction and drift.weight(now_s) >= 0.5]
            log = shared.log(now_s) + max((drift.log(now_s) for drift in used), default=0.0)
            weight = shared.weight(now_s)
        ratio = math.exp(log)
        if ratio >= CONTENDED_RATIO or weight < CONTENDED_OBSERVED:
            return None
        words = (
            f"transfers ({direction}) lately ran at {ratio:.0%} of the rate measured at the start: "
            "somebody else uses the link, or the measurement was made on another one"
        )
        return Contention(direction, ratio, words)

    def _factor(self, direction: Direction, way: Way) -> float:
        with self._lock:
            now_s = self._clock.now_s()
            return math.exp(self._directions[direction].log(now_s) + self._ways[direction, way].log(now_s))
