"""What came of a replay, as one object for tables, JSON and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstore.bench.measure import Latency
from kvstore.bench.replay_crash import CrashReport
from kvstore.bench.simulate import HitCounts


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one replay found, all clients together. Rates count the time inside the named operations only.

    ``late_blocks`` matched but did not come from NVMe in time; ``durable_blocks`` are the different blocks that were
    acknowledged durable. Capacities are what the daemon's tiers really have room for. ``nvme_overhead`` is the space
    that the NVMe tier takes beyond the blocks' own bytes, as a share of these. ``simulated`` is a hierarchy of the same
    capacities on the index alone, if it was asked for. ``tenants``: by tenant, if there were several.
    ``policy_us_per_block``: time that the eviction policy worked in the daemon, over all block accesses.
    """

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
    nvme_capacity_blocks: int | None = None
    hbm_capacity_blocks: int | None = None
    nvme_overhead: float = 0.0
    write_policy: str = "through"
    durable_every: int = 0
    durable_blocks: int = 0
    late_blocks: int = 0
    crash: CrashReport | None = None
    simulated: HitCounts | None = None
    tenants: dict[str, HitCounts] = field(default_factory=dict)
    policy_us_per_block: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """One JSON-able object."""
        return {
            "mode": "replay",
            "trace": self.name,
            "policy": self.policy,
            "clients": self.clients,
            "block_bytes": self.block_bytes,
            "capacity_blocks": self.capacity_blocks,
            "nvme_capacity_blocks": self.nvme_capacity_blocks,
            "nvme_overhead": self.nvme_overhead,
            "hbm_capacity_blocks": self.hbm_capacity_blocks,
            "write_policy": self.write_policy,
            "unique_blocks": self.unique_blocks,
            **counts_dict(self.counts),
            "mismatches": self.mismatches,
            "skipped_blocks": self.skipped_blocks,
            "late_blocks": self.late_blocks,
            "unanswered": self.unanswered,
            "ended_leases": self.ended_leases,
            "durable_every": self.durable_every,
            "durable_blocks": self.durable_blocks,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "read_gb_per_s": self.read_gb_per_s,
            "write_gb_per_s": self.write_gb_per_s,
            "wall_s": self.wall_s,
            "policy_us_per_block": self.policy_us_per_block,
            "operations": {name: latency.to_dict() for name, latency in self.latencies.items()},
            "tiers": self.tiers,
            "crash": None if self.crash is None else self.crash.to_dict(),
            "tenants": {name: counts_dict(counts) for name, counts in self.tenants.items()},
            "simulated": None if self.simulated is None else counts_dict(self.simulated),
        }


def counts_dict(counts: HitCounts) -> dict[str, Any]:
    """The totals and ratios of a run, JSON-able."""
    return {
        "requests": counts.requests,
        "block_accesses": counts.block_accesses,
        "block_hits": counts.block_hits,
        "hbm_block_hits": counts.hbm_block_hits,
        "dram_block_hits": counts.dram_block_hits,
        "nvme_block_hits": counts.nvme_block_hits,
        "token_accesses": counts.token_accesses,
        "token_hits": counts.token_hits,
        "block_hit_ratio": counts.block_hit_ratio,
        "token_hit_ratio": counts.token_hit_ratio,
        "any_hit_ratio": counts.any_hit_ratio,
        "prefill_saved_ratio": counts.prefill_saved_ratio,
    }
