"""How long a daemon's eviction policy works for each block that is looked up to use it, over a span of time."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvstore.client import Client


class PolicyShare:
    """Asks the daemon at ``address`` for its counters at the beginning and the end of ``with``; those calls block.

    Raises UnavailableError if it can't be asked."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.us_per_block = 0.0
        """Microseconds; 0 if no block was looked up."""

    def __enter__(self) -> Self:
        self._before = self._counters()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            worked_s, n_blocks = (after - before for after, before in zip(self._counters(), self._before, strict=True))
            self.us_per_block = worked_s / n_blocks * 1e6 if n_blocks else 0.0

    def _counters(self) -> tuple[float, float]:
        with Client(self._address) as client:
            stats = client.stats()
        return float(stats["policy_s"]), float(stats.get("lookup_blocks", 0))
