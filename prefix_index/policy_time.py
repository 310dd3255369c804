"""How long an eviction policy works: all that a table asks of it, and what looks at the whole table for its sake."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import DRAM, At, BlockTable
from kvstore.prefix_index.policy import EvictionPolicy, Newcomers, Use


class Stopwatch:
    """Sums up the time spent inside of ``with``, also where one is inside of another. For one thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.longest_s = 0.0
        """The longest time without a break."""
        self._depth = 0
        self._since_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._since_s = time.perf_counter()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            took_s = time.perf_counter() - self._since_s
            self.seconds += took_s
            self.longest_s = max(self.longest_s, took_s)


class TimedPolicy(EvictionPolicy):
    """A policy, with a stopwatch that runs while it works."""

    def __init__(self, policy: EvictionPolicy, watch: Stopwatch | None = None) -> None:
        self.watch = watch if watch is not None else Stopwatch()
        self._policy = policy
        self._of: dict[int, TimedPolicy] = {}
        self.name, self.moves, self.reprieves = policy.name, policy.moves, policy.reprieves
        self.weighs, self.margin = policy.weighs, policy.margin

    @property
    def version(self) -> int:
        """The policy's."""
        return self._policy.version

    @version.setter
    def version(self, version: int) -> None:
        self._policy.version = version

    def attach(self, table: BlockTable, tiers: Sequence[int] = (DRAM,)) -> None:
        super().attach(table, tiers)
        self._policy.attach(table, tiers)

    def of(self, tier: int) -> EvictionPolicy:
        policy = self._policy.of(tier)
        if policy is self._policy:
            return self
        if tier not in self._of:
            self._of[tier] = TimedPolicy(policy, self.watch)
        return self._of[tier]

    def timed(self) -> Stopwatch:
        return self.watch

    def accessed(self, ids: At, use: Use) -> float:
        with self.watch:
            return self._policy.accessed(ids, use)

    def inserted(self, ids: At, use: Use) -> None:
        with self.watch:
            self._policy.inserted(ids, use)

    def weigh(self, newcomers: Newcomers) -> NDArray[np.float64]:
        with self.watch:
            return self._policy.weigh(newcomers)

    def declined(self, newcomers: Newcomers, n_entering: int) -> None:
        with self.watch:
            self._policy.declined(newcomers, n_entering)

    def demoted(self, ids: At) -> None:
        with self.watch:
            self._policy.demoted(ids)

    def entered(self, ids: At, tier: int) -> None:
        with self.watch:
            self._policy.entered(ids, tier)

    def left(self, ids: At, tier: int) -> None:
        with self.watch:
            self._policy.left(ids, tier)

    def ended(self, ids: At, use: Use) -> None:
        with self.watch:
            self._policy.ended(ids, use)

    def evicted(self, ids: At) -> None:
        with self.watch:
            self._policy.evicted(ids)

    def reprieve(self, block: int, tier: int) -> At | None:
        with self.watch:
            return self._policy.reprieve(block, tier)

    def spares(self, ids: At, tier: int) -> NDArray[np.bool_]:
        with self.watch:
            return self._policy.spares(ids, tier)

    def rank(self, ids: At, tier: int) -> NDArray[np.float64]:
        with self.watch:
            return self._policy.rank(ids, tier)

    def frozen(self, tier: int) -> Callable[[At], NDArray[np.float64]] | None:
        with self.watch:
            ranks = self._policy.frozen(tier)
        if ranks is None:
            return None

        def timed(ids: At) -> NDArray[np.float64]:
            with self.watch:
                return ranks(ids)

        return timed

    def admits(self, ids: At, use: Use, tier: int) -> NDArray[np.bool_]:
        with self.watch:
            return self._policy.admits(ids, use, tier)

    def close(self) -> None:
        self._policy.close()
