"""``kvstore top``: a running daemon, looked at again and again: rates, how full its tiers are, what waits, whose."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvstore.cli.inspect import namespace_dict
from kvstore.cli.params import DaemonPlace, FiniteRange, place_options, timeout_option
from kvstore.cli.selecting import all_tenants_option, has_nothing, tenant_option, title
from kvstore.cli.status import whole
from kvstore.cli.tenants import tenant_table
from kvstore.client import Client
from kvstore.client.admin import Latency, NamespaceInfo
from kvstore.client.tenants import TenantInfo
from kvstore.config import format_size
from kvstore.errors import UnavailableError

Stats = Mapping[str, float | str]

RATES = {
    "lookups_per_s": "lookups",
    "lookup_blocks_per_s": "lookup_blocks",
    "hit_blocks_per_s": "hit_blocks",
    "hit_nvme_blocks_per_s": "hit_blocks_nvme",
    "hit_hbm_blocks_per_s": "hit_blocks_hbm",
    "hbm_promoted_bytes_per_s": "hbm_promoted_bytes",
    "stored_blocks_per_s": "committed_blocks",
    "stored_bytes_per_s": "committed_bytes",
    "skipped_blocks_per_s": "skipped_blocks",
    "evicted_blocks_per_s": "evicted_blocks",
    "nvme_evicted_blocks_per_s": "nvme_evicted_blocks",
    "offloaded_bytes_per_s": "offloaded_bytes",
    "onboarded_bytes_per_s": "onboarded_bytes",
    "corrupt_blocks_per_s": "onboard_corrupt_blocks",
}
"""What is shown per second, and the counter behind it."""

TIERS = (
    ("hbm", "hbm_used_bytes", "hbm_capacity_bytes"),
    ("dram", "dram_used_bytes", "dram_capacity_bytes"),
    ("nvme", "nvme_used_bytes", "nvme_live_capacity_bytes"),
)
QUEUES = ("offload_pending_bytes", "offload_pending_blocks", "onboard_waiting_blocks", "onboard_queued_bytes")
NAMESPACES_SHOWN_MAX = 12
METHODS_SHOWN_MAX = 8
BAR_CHARS = 40


@dataclass(frozen=True, slots=True)
class Look:
    """A daemon at one moment. ``at_s`` is by a clock that never goes back."""

    at_s: float
    stats: Stats
    namespaces: list[NamespaceInfo]
    latencies: Sequence[Latency] = field(default_factory=list)
    tenants: Sequence[TenantInfo] = ()
    tenant: str = ""
    """Whose namespaces and blocks were looked at; empty: everybody's."""

    @classmethod
    def at(cls, client: Client, *, all_tenants: bool) -> Look:
        """Ask the daemon. Raises UnavailableError."""
        stats = client.stats()
        return cls(
            time.monotonic(),
            stats,
            client.namespaces(all_tenants=all_tenants),
            client.latencies(),
            client.tenants(all_tenants=all_tenants),
            "" if all_tenants else client.tenant,
        )


@click.command(short_help="Watch rates, tiers, queues and namespaces.")
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="End after one interval.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per interval, each on its line.")
@place_options
@tenant_option
@all_tenants_option
@timeout_option
def top(
    interval_s: float, once: bool, as_json: bool, place: DaemonPlace, tenant: str, all_tenants: bool, timeout_s: float
) -> None:
    """Show how busy a running daemon is, until Ctrl-C: rates, how full its tiers are, what waits, its namespaces."""
    with place.client(tenant, timeout_s, name="kvstore top") as client:
        pairs = looks(lambda: Look.at(client, all_tenants=all_tenants), interval_s)
        if as_json or once:
            for before, now in pairs:
                if as_json:
                    click.echo(json.dumps(view_dict(before, now)))
                else:
                    Console().print(view(before, now))
                if once:
                    return
            return
        with Live(auto_refresh=False, screen=True) as live:
            for before, now in pairs:
                live.update(view(before, now), refresh=True)


def looks(
    look: Callable[[], Look], interval_s: float, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[Look, Look]]:
    """Each two looks that follow each other, without end. A daemon that is away is waited for, once it was there."""
    before = look()
    while True:
        sleep(interval_s)
        try:
            now = look()
        except UnavailableError:
            continue
        yield before, now
        before = now


def rates(before: Look, now: Look) -> dict[str, float]:
    """What happened per second between two looks. After a restart what the new daemon has counted, counts."""
    elapsed_s = max(now.at_s - before.at_s, 1e-9)
    restarted = before.stats.get("epoch") != now.stats.get("epoch")

    def grown(counter: str) -> float:
        was = 0.0 if restarted else float(before.stats.get(counter, 0))
        return max(float(now.stats.get(counter, 0)) - was, 0.0)

    return {name: grown(counter) / elapsed_s for name, counter in RATES.items()}


def hit_ratio(before: Look, now: Look) -> float | None:
    """The share of the blocks looked up between two looks that were found; None if none was looked up."""
    per_s = rates(before, now)
    asked = per_s["lookup_blocks_per_s"]
    return per_s["hit_blocks_per_s"] / asked if asked else None


def latencies(before: Look, now: Look) -> list[Latency]:
    """How long the requests between two looks took; the most frequent first, and none of which there was none."""
    restarted = before.stats.get("epoch") != now.stats.get("epoch")
    was = {} if restarted else {(each.method, each.waited): each.distribution for each in before.latencies}
    grown = [
        Latency(each.method, each.waited, each.distribution.since(was.get((each.method, each.waited))))
        for each in now.latencies
    ]
    return sorted((each for each in grown if each.distribution.n), key=lambda each: -each.distribution.n)


def view_dict(before: Look, now: Look) -> dict[str, Any]:
    """One line of JSON."""
    stats = whole(now.stats)
    return {
        "time_s": time.time(),
        "interval_s": now.at_s - before.at_s,
        "hit_ratio": hit_ratio(before, now),
        "rates": rates(before, now),
        "tiers": {
            tier: {"used_bytes": stats[used], "capacity_bytes": stats[capacity]}
            for tier, used, capacity in TIERS
            if capacity in stats
        },
        "queues": {name: stats[name] for name in QUEUES if name in stats},
        "sessions": stats["sessions"],
        "leases": stats["leases"],
        "blocks": stats["blocks"],
        "nvme_health": stats.get("nvme_health"),
        "loop_lag_s_max": stats["loop_lag_s_max"],
        "latencies": [latency_dict(each) for each in latencies(before, now)],
        "tenants": [asdict(each) for each in now.tenants],
        "namespaces": [namespace_dict(each) for each in now.namespaces],
    }


def latency_dict(latency: Latency) -> dict[str, Any]:
    """A latency as JSON has it; null stands for longer than the last bound."""
    distribution = latency.distribution
    quantiles = {f"p{share:.0f}_s": distribution.quantile(share / 100) for share in (50.0, 99.0)}
    return {
        "method": latency.method,
        "waited": latency.waited,
        "n": distribution.n,
        "mean_s": distribution.total / max(distribution.n, 1),
        **{name: value if math.isfinite(value) else None for name, value in quantiles.items()},
    }


def view(before: Look, now: Look) -> RenderableType:
    """The screen."""
    return Group(
        _head(before, now),
        _tiers(now),
        _flows(before, now),
        _latencies(before, now),
        tenant_table(now.tenants),
        _namespaces(before, now),
    )


def _head(before: Look, now: Look) -> RenderableType:
    ratio, stats = hit_ratio(before, now), now.stats
    found = "nothing looked up" if ratio is None else f"{ratio:.1%} found"
    health = f", NVMe {stats['nvme_health']}" if "nvme_health" in stats else ""
    return (
        f"kvstored {stats['server_version']}: {found}, {float(stats['sessions']):,.0f} clients, "
        f"{float(stats['leases']):,.0f} leases, {float(stats['blocks']):,.0f} blocks, "
        f"loop late by at most {float(stats['loop_lag_s_max']) * 1e3:.1f} ms{health}"
    )


def _tiers(now: Look) -> Table:
    table = Table.grid(padding=(0, 1))
    for tier, used, capacity in TIERS:
        if capacity in now.stats:
            used_bytes, capacity_bytes = float(now.stats[used]), float(now.stats[capacity])
            share = min(used_bytes / max(capacity_bytes, 1.0), 1.0)
            how_much = f"{format_size(used_bytes)} of {format_size(capacity_bytes)}, {share:.0%}"
            table.add_row(tier.upper(), bar(share), how_much)
    return table


def bar(share: float, width: int = BAR_CHARS) -> str:
    """How full something is, as so many characters; anything at all shows."""
    n_full = min(math.ceil(share * width), width)
    return "█" * n_full + "░" * (width - n_full)


def _flows(before: Look, now: Look) -> Table:
    per_s = rates(before, now)
    table = Table("per second", "", "waiting", "", box=None, padding=(0, 2, 0, 0))
    left = [
        ("prompts looked up", f"{per_s['lookups_per_s']:,.0f}"),
        ("blocks found, of them on NVMe", f"{per_s['hit_blocks_per_s']:,.0f}, {per_s['hit_nvme_blocks_per_s']:,.0f}"),
        ("stored", _flow(per_s["stored_bytes_per_s"], per_s["stored_blocks_per_s"])),
        ("blocks skipped for want of room", f"{per_s['skipped_blocks_per_s']:,.0f}"),
        ("blocks evicted from DRAM", f"{per_s['evicted_blocks_per_s']:,.0f}"),
        ("blocks evicted from NVMe", f"{per_s['nvme_evicted_blocks_per_s']:,.0f}"),
        ("written to NVMe", f"{format_size(per_s['offloaded_bytes_per_s'])}/s"),
        ("read from NVMe", f"{format_size(per_s['onboarded_bytes_per_s'])}/s"),
        ("found in HBM, copied there",
         f"{per_s['hit_hbm_blocks_per_s']:,.0f} blocks, {format_size(per_s['hbm_promoted_bytes_per_s'])}/s"),
    ]  # fmt: skip
    stats = now.stats
    right = [
        ("to be written", _queue(stats, "offload_pending_bytes", "offload_pending_blocks")),
        ("to be read", _queue(stats, "onboard_queued_bytes", "onboard_waiting_blocks")),
    ]
    for i, (what, value) in enumerate(left):
        table.add_row(what, value, *(right[i] if i < len(right) else ("", "")))
    return table


def _flow(bytes_per_s: float, blocks_per_s: float) -> str:
    return f"{format_size(bytes_per_s)}/s, {blocks_per_s:,.0f} blocks"


def _queue(stats: Stats, n_bytes: str, n_blocks: str) -> str:
    if n_blocks not in stats:
        return "-"
    return f"{float(stats[n_blocks]):,.0f} blocks ({format_size(float(stats[n_bytes]))})"


def _latencies(before: Look, now: Look) -> Table:
    """The most frequent requests."""
    table = Table("requests", "per second", "p50", "p99", box=None, padding=(0, 2, 0, 0))
    elapsed_s, found = max(now.at_s - before.at_s, 1e-9), latencies(before, now)
    for each in found[:METHODS_SHOWN_MAX]:
        name = f"{each.method}, having waited" if each.waited else each.method
        n, p50_s, p99_s = each.distribution.n, each.distribution.quantile(0.5), each.distribution.quantile(0.99)
        most_s = each.distribution.bounds[-1]
        table.add_row(name, f"{n / elapsed_s:,.0f}", *(_time(value, most_s) for value in (p50_s, p99_s)))
    if len(found) > METHODS_SHOWN_MAX:
        table.add_row(f"and {len(found) - METHODS_SHOWN_MAX} other methods", *[""] * 3)
    return table


def _time(value_s: float, most_s: float) -> str:
    """For people; within the width of a bucket."""
    if math.isinf(value_s):
        return f"> {most_s:g} s"
    return (
        f"{value_s * 1e6:,.0f} us"
        if value_s < 1e-3
        else f"{value_s * 1e3:,.3g} ms"
        if value_s < 1
        else f"{value_s:.3g} s"
    )


def _namespaces(before: Look, now: Look) -> RenderableType:
    """Those with the most lookups since the look before, then the largest."""
    if not now.namespaces:
        return escape(has_nothing("namespace", now.tenant))
    was = {each.digest: each.n_lookups for each in before.namespaces}
    busy = sorted(now.namespaces, key=lambda each: (was.get(each.digest, 0) - each.n_lookups, -each.n_blocks))
    table = Table(
        "namespace", "tenant", "blocks", "in DRAM", "on NVMe", "lookups", "found", box=None, padding=(0, 2, 0, 0)
    )
    for each in busy[:NAMESPACES_SHOWN_MAX]:
        table.add_row(
            escape(f"{each.digest.hex()[:8]} {title(each)}"),
            escape(each.namespace.tenant if each.namespace else "?"),
            f"{each.n_blocks:,}",
            format_size(each.dram_bytes),
            format_size(each.nvme_bytes),
            f"{each.n_lookups:,}",
            f"{each.n_hit_blocks / each.n_lookup_blocks:.1%}" if each.n_lookup_blocks else "-",
        )
    if len(busy) > NAMESPACES_SHOWN_MAX:
        table.add_row(f"and {len(busy) - NAMESPACES_SHOWN_MAX} more", *[""] * 6)
    return table
