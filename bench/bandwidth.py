"""How near the store comes to the machine's limits: put, get_into, lease and match of a running daemon.

Every figure is a median of ratios of pairs that ran next to each other: the store's operation, and numpy
copying the same number of bytes between ordinary arrays with the same number of threads (or, for lookups, a
blocking echo of 4 KiB). Keys are distinct, data is random, and all bytes are compared after the timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvstore.bench.bandwidth_copy import CopyBench
from kvstore.bench.bandwidth_lookup import LookupRow, measure_lookups
from kvstore.bench.bandwidth_nvme import NvmeReport
from kvstore.bench.bandwidth_row import GIB, KIB, MIB, Row
from kvstore.bench.limits import Limits, measure_limits
from kvstore.client import Client
from kvstore.errors import BadInputError

Step = Callable[[str], None]
"""Told what is measured next."""


@dataclass(frozen=True, slots=True)
class BandwidthOptions:
    """What to measure. ``dram_bytes`` is what the daemon must have; ``batch_bytes`` one call moves."""

    block_sizes: tuple[int, ...] = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
    threads: tuple[int, ...] = (1, 2)
    pairs: int = 21
    batch_bytes: int = 128 * MIB
    dram_bytes: int = 2 * GIB
    lookup_blocks: int = 256
    lookups: int = 1000
    lease_block_sizes: tuple[int, ...] = (4 * KIB, 64 * KIB, 256 * KIB, MIB)
    seed: int = 0
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("pairs", "lookup_blocks", "lookups", "batch_bytes"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("block_sizes", "threads", "lease_block_sizes"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise BadInputError(f"{name} is {values}; it must be whole numbers from 1 on")
        largest = max(self.batch_bytes, *self.block_sizes, self.lookup_blocks * max(self.lease_block_sizes))
        if largest * 2 > self.dram_bytes:
            raise BadInputError(
                f"dram_bytes is {self.dram_bytes}; it must hold twice the largest batch of {largest} bytes"
            )


@dataclass(frozen=True, slots=True)
class BandwidthReport:
    """Everything one run measured."""

    limits: Limits
    rows: tuple[Row, ...]
    lookups: tuple[LookupRow, ...]
    mismatches: int
    pairs: int
    batch_bytes: int
    facts: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """One JSON-able object."""
        return {
            "mode": "bandwidth",
            "limits": self.limits.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "lookups": [row.to_dict() for row in self.lookups],
            "mismatches": self.mismatches,
            "pairs": self.pairs,
            "batch_bytes": self.batch_bytes,
            "facts": self.facts,
        }


def run_bandwidth(options: BandwidthOptions, connect: str, step: Step | None = None) -> BandwidthReport:
    """Measure everything against the daemon at the socket ``connect``; blocks for a minute or so.

    Fills the daemon's DRAM with its own blocks: meant for a daemon of its own. Raises UnavailableError if the
    daemon can't be reached.
    """
    tell = step or (lambda _: None)
    tell("limits of this machine")
    limits = measure_limits()
    rows: list[Row] = []
    mismatches = 0
    for block_bytes in options.block_sizes:
        with CopyBench(connect, options, block_bytes) as bench:
            tell(f"filling the tier with blocks of {block_bytes >> 10} KiB")
            n_bytes = bench.batch_bytes
            for name, seconds in bench.warm_up():
                rows.append(Row.from_first_call(name, block_bytes, n_bytes, seconds))
            for threads in options.threads:
                tell(f"blocks of {block_bytes >> 10} KiB, {threads} thread(s)")
                for name, pairs in bench.measure(threads):
                    rows.append(Row.from_pairs(name, block_bytes, threads, n_bytes, pairs))
            mismatches += bench.mismatches
    tell("match and lease")
    with Client(connect, timeout_s=options.timeout_s) as client:
        lookups = measure_lookups(client, options, limits)
        facts = {name: value for name, value in client.stats().items() if _is_fact(name)}
    return BandwidthReport(limits, tuple(rows), tuple(lookups), mismatches, options.pairs, options.batch_bytes, facts)


def _is_fact(name: str) -> bool:
    return name.startswith("dram_") or "native" in name or "version" in name


def report_dict(report: BandwidthReport | None, nvme: NvmeReport | None) -> dict[str, Any]:
    """What was measured of both, one JSON-able object; ``nvme`` is null where it was left out."""
    plain: dict[str, Any] = {"mode": "bandwidth", "mismatches": 0} if report is None else report.to_dict()
    plain["nvme"] = None if nvme is None else nvme.to_dict()
    plain["mismatches"] += 0 if nvme is None else nvme.mismatches
    return plain
