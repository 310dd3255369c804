"""Tables of a replay and of a simulation, for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from kvstore.bench.replay_crash import CrashReport
from kvstore.bench.replay_result import ReplayResult
from kvstore.bench.report import alarm, facts_table
from kvstore.bench.simulate import HitCounts
from kvstore.bench.simulation_report import SimulationReport
from kvstore.config import format_size


def replay_tables(result: ReplayResult) -> list[Table]:
    """Hits and bytes, tier by tier if there are two, then latency by operation."""
    counts = result.counts
    facts = [
        ("requests", f"{counts.requests:,}"),
        ("clients", str(result.clients)),
        ("policy", result.policy),
        ("capacity", f"room for {result.capacity_blocks:,} blocks; {result.unique_blocks:,} unique"),
        ("block size", format_size(result.block_bytes)),
        *_ratio_facts(counts.block_hit_ratio, counts.token_hit_ratio, counts.any_hit_ratio),
        ("read", f"{format_size(result.bytes_read)}, lease + compare at {result.read_gb_per_s:.2f} GB/s"),
        ("written", f"{format_size(result.bytes_written)}, put at {result.write_gb_per_s:.2f} GB/s"),
        ("skipped blocks", f"{result.skipped_blocks:,}"),
        ("mismatching blocks", alarm(result.mismatches)),
        ("time", f"{result.wall_s:.1f} s"),
        ("eviction policy", f"{result.policy_us_per_block:.1f} µs a block accessed"),
    ]
    oddities = (
        ("requests not answered", result.unanswered),
        ("leases ended", result.ended_leases),
        ("blocks not read from NVMe in time", result.late_blocks),
    )
    facts += [(name, alarm(count)) for name, count in oddities if count]
    latency = Table("operation", "calls", "p50", "p99", title="Latency in µs")
    for column in latency.columns[1:]:
        column.justify = "right"
    for name, values in result.latencies.items():
        latency.add_row(name, f"{values.n:,}", f"{values.p50_us:,.0f}", f"{values.p99_us:,.0f}")
    tables = [facts_table(f"Replay of {result.name}", facts), latency]
    if any(each is not None for each in (result.nvme_capacity_blocks, result.hbm_capacity_blocks, result.simulated)):
        tables.insert(1, _tiers_table(result))
    if result.tenants:
        tables.append(_tenants_table(result.tenants))
    if result.crash is not None:
        tables.append(_crash_table(result.crash))
    return tables


def _tenants_table(tenants: Mapping[str, HitCounts]) -> Table:
    table = Table("tenant", "requests", "blocks", "block hit ratio", "token hit ratio", title="Tenants")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, counts in tenants.items():
        ratios = (f"{counts.block_hit_ratio:.4f}", f"{counts.token_hit_ratio:.4f}")
        table.add_row(name, f"{counts.requests:,}", f"{counts.block_accesses:,}", *ratios)
    return table


def _tiers_table(result: ReplayResult) -> Table:
    """Where the hits came from, beside the simulation if there was one; what was written to NVMe."""
    title = f"Tiers, write policy {result.write_policy}" if result.nvme_capacity_blocks is not None else "Tiers"
    table = Table("tier", "capacity", "share of blocks", "simulated", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    counts, simulated, nvme_blocks = result.counts, result.simulated, result.nvme_capacity_blocks

    def share(of: HitCounts | None, name: str) -> str:
        return "-" if of is None or not of.block_accesses else f"{getattr(of, name) / of.block_accesses:.4f}"

    rows = [("DRAM", f"{result.capacity_blocks:,} blocks", "dram_block_hits")]
    if result.hbm_capacity_blocks is not None:
        rows.insert(0, ("HBM", f"{result.hbm_capacity_blocks:,} blocks", "hbm_block_hits"))
    if nvme_blocks is not None:
        beyond = f" (+{100 * result.nvme_overhead:.1f}% space)" if result.nvme_overhead else ""
        rows.append(("NVMe", f"{nvme_blocks:,} blocks{beyond}", "nvme_block_hits"))
    rows.append(("together", "", "block_hits"))
    for name, capacity, field in rows:
        table.add_row(name, capacity, share(counts, field), share(simulated, field))
    hbm, nvme = result.tiers.get("hbm"), result.tiers.get("nvme", {})
    if hbm is not None:
        table.add_section()
        for name, counter in (
            ("blocks copied to HBM", "promoted_blocks"),
            ("skipped, too many waited", "skipped_blocks"),
            ("skipped for want of room", "no_room_blocks"),
            ("failed", "failed_blocks"),
            ("evicted from HBM", "evicted_blocks"),
        ):
            table.add_row(name, "", f"{hbm.get(counter, 0):,.0f}", "")
    if nvme:
        table.add_section()
        # A daemon counts from its start.
        before = {} if result.crash is None else result.crash.before
        for name, counter in (
            ("blocks written to NVMe", "offloaded_blocks"),
            ("skipped, the disk was behind", "offload_skipped_blocks"),
            ("failed", "offload_failed_blocks"),
            ("evicted from NVMe", "nvme_evicted_blocks"),
            ("read from NVMe", "onboarded_blocks"),
        ):
            n_blocks = nvme.get(counter.removeprefix("nvme_"), 0) + before.get(counter, 0)
            table.add_row(name, "", f"{n_blocks:,.0f}", "")
        waits = f"every {result.durable_every} requests" if result.durable_every else "never waited for"
        table.add_row("acknowledged durable", waits, f"{result.durable_blocks:,}", "")
    return table


def _crash_table(crash: CrashReport) -> Table:
    facts = [
        ("requests done before", f"{crash.at_request:,}"),
        ("away for", f"{crash.down_s:.2f} s"),
        ("blocks acknowledged durable", f"{crash.acknowledged:,}"),
        ("of them LRU must have kept", f"{crash.must_be_found:,}"),
        ("found again", f"{crash.found:,}"),
        ("lost", alarm(crash.lost)),
        ("with other bytes", alarm(crash.mismatches)),
    ]
    return facts_table("SIGKILL and restart of the daemon", facts)


def simulation_tables(report: SimulationReport) -> list[Table]:
    """Hits at the asked capacity, then over capacities."""
    counts = report.counts
    facts = [
        ("requests", f"{counts.requests:,}"),
        ("policy", report.policy),
        ("capacity of DRAM", f"room for {report.capacity_blocks:,} blocks; {report.unique_blocks:,} unique"),
        *_simulated_tiers(report),
        *_ratio_facts(counts.block_hit_ratio, counts.token_hit_ratio, counts.any_hit_ratio),
    ]
    if report.whole_block_counts is not None:
        facts.append(("token hit, whole blocks only", f"{report.whole_block_counts.token_hit_ratio:.4f}"))
    table = Table(
        "capacity %", "blocks", "block hit", "token hit", "any hit", title="Hit ratio over capacity, DRAM alone"
    )
    for column in table.columns:
        column.justify = "right"
    for point in report.points:
        c = point.counts
        ratios = (f"{r:.4f}" for r in (c.block_hit_ratio, c.token_hit_ratio, c.any_hit_ratio))
        table.add_row(f"{point.capacity_percent:g}", f"{point.capacity_blocks:,}", *ratios)
    return [facts_table(f"Simulation of {report.name}", facts), table]


def _simulated_tiers(report: SimulationReport) -> list[tuple[str, str]]:
    """Room and hits tier by tier, where there are several."""
    counts = report.counts
    rooms = [
        ("HBM", report.hbm_capacity_blocks, counts.hbm_block_hits),
        ("DRAM", report.capacity_blocks, counts.dram_block_hits),
        ("NVMe", report.nvme_capacity_blocks, counts.nvme_block_hits),
    ]
    there = [(name, room, hits) for name, room, hits in rooms if room is not None]
    if len(there) == 1:
        return []
    n = max(counts.block_accesses, 1)
    return [(name, f"room for {room:,} blocks; {hits / n:.4f} of the blocks found there") for name, room, hits in there]


def _ratio_facts(block: float, token: float, any_hit: float) -> list[tuple[str, str]]:
    return [
        ("block hit ratio", f"{block:.4f}"),
        ("token hit ratio", f"{token:.4f}"),
        ("requests with any hit", f"{any_hit:.4f}"),
    ]
