"""Counters and histograms that are cheap enough for every request."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

LATENCY_BOUNDS_S = (20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.2, 1.0, 5.0, 30.0)
"""Upper bounds of the buckets of a histogram of times: around what a request takes, then ever wider."""


class Counters:
    """Named monotonic sums. Not thread-safe: each belongs to one thread."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1) -> None:
        """Raise one counter."""
        self._values[name] += amount

    def __getitem__(self, name: str) -> float:
        return self._values.get(name, 0.0)

    def snapshot(self) -> dict[str, float]:
        """A copy of all counters that were ever raised."""
        return dict(self._values)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram held at one moment. ``counts`` has one entry a bound, and one for what is above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def n(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """How many values were at most each bound; the last entry is all of them."""
        sums, total = [], 0
        for count in self.counts:
            total += count
            sums.append(total)
        return sums

    def since(self, before: Distribution | None) -> Distribution:
        """What has come since it was like that; all of it where that can't be, as after a restart."""
        if before is None or before.bounds != self.bounds or before.n > self.n:
            return self
        counts = tuple(now - was for now, was in zip(self.counts, before.counts, strict=True))
        return self if min(counts) < 0 else Distribution(self.bounds, counts, self.total - before.total)

    def quantile(self, share: float) -> float:
        """The value that so much of all (0 to 1) is not above, as far as the bounds tell: inf beyond the last of them.

        Values of a bucket count as evenly spread in it. NaN if there is none.
        """
        rank, passed, low = share * self.n, 0, 0.0
        if not self.n:
            return math.nan
        for count, high in zip(self.counts, (*self.bounds, math.inf), strict=True):
            if count and passed + count >= rank:
                return high if math.isinf(high) else low + (high - low) * (rank - passed) / count
            passed, low = passed + count, high
        return math.inf


class Histogram:
    """How often values fell between bounds. A fifth of a microsecond a value; belongs to one thread."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        """``bounds`` are the upper bounds of the buckets, rising; each belongs to its bucket."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Distribution:
        """What it holds now."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


class Histograms(Generic[Name]):
    """One histogram for each name (or number), all with the same bounds. Belongs to one thread."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._of: defaultdict[Name, Histogram] = defaultdict(lambda: Histogram(bounds))

    def observe(self, name: Name, value: float) -> None:
        """Count one value under a name."""
        self._of[name].observe(value)

    def snapshot(self) -> dict[Name, Distribution]:
        """What each holds now; those that were never used are not there."""
        return {name: histogram.snapshot() for name, histogram in self._of.items()}
