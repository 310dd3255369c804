"""One line of the bandwidth benchmark: an operation beside its limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One measured operation. ``ratio`` is the median over pairs of store to limit, ``ratio_low`` the lower
    end of its 95% bootstrap interval; ``cold`` rows are single first calls and have no ratio.
    """

    name: str
    block_bytes: int
    threads: int
    gb_per_s: float
    limit_gb_per_s: float
    ratio: float
    ratio_low: float
    p50_us: float
    p99_us: float
    cold: bool = False

    @classmethod
    def from_pairs(cls, name: str, block_bytes: int, threads: int, n_bytes: int, pairs: NDArray[np.float64]) -> Row:
        """``pairs``: seconds, float64 [n, 2]: the store's side, the limit's side."""
        ratios = pairs[:, 1] / pairs[:, 0]
        p50, p99 = np.percentile(pairs[:, 0] * 1e6, [50, 99])
        own, limit = n_bytes / np.median(pairs, axis=0) / 1e9
        low = bootstrap_low(ratios)
        return cls(
            name,
            block_bytes,
            threads,
            float(own),
            float(limit),
            float(np.median(ratios)),
            low,
            float(p50),
            float(p99),
        )

    @classmethod
    def from_first_call(cls, name: str, block_bytes: int, n_bytes: int, seconds: float) -> Row:
        """A call that still had to map memory."""
        return cls(name, block_bytes, 1, n_bytes / seconds / 1e9, 0, 0, 0, seconds * 1e6, seconds * 1e6, True)

    @property
    def ratio_of_medians(self) -> float:
        """The other way to compare, which a slow moment in one pair bends less or more; 0 for cold rows."""
        return self.gb_per_s / self.limit_gb_per_s if self.limit_gb_per_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: getattr(self, name) for name in (*self.__dataclass_fields__, "ratio_of_medians")}


def bootstrap_low(values: NDArray[np.float64], resamples: int = 1000) -> float:
    """Lower end of the 95% bootstrap interval of the median."""
    return bootstrap_interval(values, resamples)[0]


def bootstrap_interval(values: NDArray[np.float64], resamples: int = 1000) -> tuple[float, float]:
    """Both ends of the 95% bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (resamples, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)
