"""Counters that are cheap enough for every request."""

from __future__ import annotations

from collections import defaultdict


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
