"""Replay of a workload through a running daemon: every byte that is read is compared with what it must be.

Each client, per request: match, lease the longest prefix, compare all of its bytes in place, release, then
put the blocks that were absent. Several clients are processes of their own; requests are dealt round-robin
in file order.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.bench import workload as work
from kvstore.bench.generate import ConversationOptions, generate_trace
from kvstore.bench.measure import Latency
from kvstore.bench.replay_client import OPERATIONS, ClientOptions, ClientResult, run_client
from kvstore.bench.replay_fleet import run_fleet
from kvstore.bench.simulate import HitCounts, Progress
from kvstore.bench.trace import load_trace
from kvstore.bench.workload import Workload
from kvstore.client import Client
from kvstore.config import MIB
from kvstore.errors import BadInputError
from kvstore.types import MAX_BLOCK_BYTES

MAX_CLIENTS = 256
DEFAULT_CAPACITY_PERCENT = 5.0


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay and how. Without ``trace`` the conversations are generated.

    Capacity is a percentage of the unique blocks or a number of blocks, not both. When neither is given it is
    5%, but at least what the smallest daemon holds.
    """

    trace: Path | None = None
    conversations: ConversationOptions = field(default_factory=ConversationOptions)
    policy: str = "lru"
    capacity_percent: float | None = None
    capacity_blocks: int | None = None
    block_bytes: int = 64 << 10
    block_tokens: int | None = None
    clients: int = 1
    limit: int | None = None
    seed: int = 0
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.capacity_percent is not None and self.capacity_blocks is not None:
            raise BadInputError("give a capacity in percent or in blocks, not both")
        if self.capacity_percent is not None:
            work.capacity_blocks(1, self.capacity_percent)
        for name, most in (("block_bytes", MAX_BLOCK_BYTES), ("clients", MAX_CLIENTS)):
            if not 1 <= getattr(self, name) <= most:
                option = f"--{name.replace('_', '-')}"
                raise BadInputError(f"{name} ({option}) is {getattr(self, name)}; it must be from 1 to {most}")
        for name in ("capacity_blocks", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInputError(f"{name} is {value}; it must be at least 1")

    def load(self) -> Workload:
        """Read or generate the requests; blocks. Raises TraceError for a file that can't be used."""
        if self.trace is not None:
            return load_trace(self.trace, self.limit, self.block_tokens)
        return generate_trace(self.conversations, self.limit)

    def capacity(self, workload: Workload) -> int:
        """Room in blocks."""
        if self.capacity_blocks is not None:
            return self.capacity_blocks
        if self.capacity_percent is not None:
            return work.capacity_blocks(workload.unique_blocks, self.capacity_percent)
        least = MIB // work.dram_capacity_bytes(1, self.block_bytes)
        return max(work.capacity_blocks(workload.unique_blocks, DEFAULT_CAPACITY_PERCENT), least)

    def dram_bytes(self, workload: Workload) -> int:
        """What the DRAM tier of the daemon must be given for that room.

        Raises BadInputError if that is less than a daemon can have.
        """
        blocks = self.capacity(workload)
        n_bytes = work.dram_capacity_bytes(blocks, self.block_bytes)
        if n_bytes < MIB:
            least = -(-MIB * blocks // n_bytes)
            raise BadInputError(
                f"a capacity of {blocks} blocks of {self.block_bytes} bytes is below a daemon's least, 1 MiB"
                f": replay more requests, or give --capacity-blocks {least} or more"
            )
        return n_bytes


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one replay found, all clients together. Rates count the time inside the named operations only."""

    name: str
    counts: HitCounts
    unique_blocks: int
    capacity_blocks: int
    clients: int
    block_bytes: int
    policy: str
    mismatches: int
    skipped_blocks: int
    unanswered: int
    ended_leases: int
    bytes_read: int
    bytes_written: int
    wall_s: float
    read_gb_per_s: float
    write_gb_per_s: float
    latencies: dict[str, Latency]
    tiers: dict[str, dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """One JSON-able object."""
        return {
            "mode": "replay",
            "trace": self.name,
            "policy": self.policy,
            "clients": self.clients,
            "block_bytes": self.block_bytes,
            "capacity_blocks": self.capacity_blocks,
            "unique_blocks": self.unique_blocks,
            **counts_dict(self.counts),
            "mismatches": self.mismatches,
            "skipped_blocks": self.skipped_blocks,
            "unanswered": self.unanswered,
            "ended_leases": self.ended_leases,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "read_gb_per_s": self.read_gb_per_s,
            "write_gb_per_s": self.write_gb_per_s,
            "wall_s": self.wall_s,
            "operations": {name: latency.to_dict() for name, latency in self.latencies.items()},
            "tiers": self.tiers,
        }


def counts_dict(counts: HitCounts) -> dict[str, Any]:
    """The totals and ratios of a run, JSON-able."""
    return {
        "requests": counts.requests,
        "block_accesses": counts.block_accesses,
        "block_hits": counts.block_hits,
        "token_accesses": counts.token_accesses,
        "token_hits": counts.token_hits,
        "block_hit_ratio": counts.block_hit_ratio,
        "token_hit_ratio": counts.token_hit_ratio,
        "any_hit_ratio": counts.any_hit_ratio,
    }


def replay(workload: Workload, options: ReplayOptions, connect: str, progress: Progress | None = None) -> ReplayResult:
    """Run ``workload`` through the daemon at the socket ``connect``; blocks until all clients are done.

    Raises UnavailableError if the daemon can't be reached at the start, KVStoreError if a client fails.
    """
    client_options = ClientOptions(connect, options.block_bytes, options.seed, options.timeout_s)
    with Client(connect, timeout_s=options.timeout_s) as client:
        client.stats()
        start = time.perf_counter()
        if options.clients == 1:
            results = [run_client(workload, client_options, progress)]
        else:
            results = run_fleet(workload, client_options, options.clients, progress)
        wall_s = time.perf_counter() - start
        stats = client.stats()
    return _merge(workload, options, results, wall_s, stats)


def _merge(
    workload: Workload,
    options: ReplayOptions,
    results: list[ClientResult],
    wall_s: float,
    stats: dict[str, Any],
) -> ReplayResult:
    counts = HitCounts()
    for result in results:
        counts.add(result.counts)
    seconds = {name: [s for r in results for s in r.seconds[name]] for name in OPERATIONS}
    bytes_read = sum(r.bytes_read for r in results)
    bytes_written = sum(r.bytes_written for r in results)
    dram = {name.removeprefix("dram_"): value for name, value in stats.items() if name.startswith("dram_")}
    dram |= {"block_hits": counts.block_hits, "bytes_read": bytes_read, "bytes_written": bytes_written}
    return ReplayResult(
        name=workload.name,
        counts=counts,
        unique_blocks=workload.unique_blocks,
        # What the daemon really has; one that was running before may have more or less than was asked for.
        capacity_blocks=int(stats["dram_capacity_bytes"]) // work.dram_capacity_bytes(1, options.block_bytes),
        clients=options.clients,
        block_bytes=options.block_bytes,
        policy=options.policy,
        mismatches=sum(r.mismatches for r in results),
        skipped_blocks=sum(r.skipped_blocks for r in results),
        unanswered=sum(r.unanswered for r in results),
        ended_leases=sum(r.ended_leases for r in results),
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        wall_s=wall_s,
        read_gb_per_s=_rate(bytes_read, sum(seconds["lease"]) + sum(seconds["verify"]), options.clients),
        write_gb_per_s=_rate(bytes_written, sum(seconds["put"]), options.clients),
        latencies={name: Latency.from_seconds(values) for name, values in seconds.items()},
        tiers={"dram": dram},
    )


def _rate(n_bytes: int, busy_s: float, clients: int) -> float:
    """GB/s of all clients together, from the time they spent in the operation."""
    return n_bytes * clients / busy_s / 1e9 if busy_s else 0.0
