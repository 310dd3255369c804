"""``kvstore status``: the numbers of a running daemon."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.cli.params import DaemonPlace, json_option, place_options, timeout_option
from kvstore.config import format_size

GROUPS = (
    ("HBM tier", "hbm_"),
    ("DRAM tier", "dram_"),
    ("NVMe tier", "nvme_"),
    ("DRAM to NVMe", "offload"),
    ("NVMe to DRAM", "onboard"),
)
"""Which numbers stand together, by how their names begin; all others come first."""

FRACTIONS = ("_s", "_s_max", "_ratio", "_seconds")
"""How the names of numbers end that are no counts."""

MISSED = "missed_lookups_"
"""How counters of lookups by what ended the hit begin."""
REASONS_SHOWN = 3

Value = float | str
Group = tuple[str, list[tuple[str, str]]]
"""A title, and lines of what and how much."""


@click.command(short_help="Show how a running daemon is doing.")
@place_options
@click.option("--all", "show_all", is_flag=True, help="All counters and gauges, by the names they have in JSON.")
@json_option
@timeout_option
def status(place: DaemonPlace, show_all: bool, as_json: bool, timeout_s: float) -> None:
    """Show how a running daemon is doing: a summary, or with --all or --json everything it counts."""
    with place.client(timeout_s=timeout_s) as client:
        stats = client.stats()
    stats |= hit_ratios(stats)
    if as_json:
        click.echo(json.dumps(whole(dict(sorted(stats.items()))), indent=2))
        return
    table = Table("what", "value", title=f"kvstored at {place}")
    for column, justify in zip(table.columns, ("left", "right"), strict=True):
        column.justify, column.overflow = justify, "fold"  # type: ignore[assignment]
    for title, lines in grouped(stats) if show_all else summary(stats):
        if title:
            table.add_section()
            table.add_row(f"[bold]{title}[/bold]", "")
        for name, value in lines:
            table.add_row(name, escape(value))
    Console().print(table)


def whole(stats: Mapping[str, Value]) -> dict[str, int | Value]:
    """The same for JSON: counts and bytes as integers, which the wire has as floating point; times and ratios stay."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() and not name.endswith(FRACTIONS) else value
        for name, value in stats.items()
    }


def hit_ratios(stats: Mapping[str, Value]) -> dict[str, Value]:
    """The share of all blocks looked up that each tier had; nothing before the first lookup."""
    asked, hits, nvme, hbm = (
        float(stats.get(name, 0)) for name in ("lookup_blocks", "hit_blocks", "hit_blocks_nvme", "hit_blocks_hbm")
    )
    if not asked:
        return {}
    ratios: dict[str, Value] = {"hit_ratio": hits / asked, "dram_hit_ratio": (hits - nvme - hbm) / asked}
    for tier, found in (("nvme", nvme), ("hbm", hbm)):
        if any(name.startswith(f"{tier}_") for name in stats):
            ratios[f"{tier}_hit_ratio"] = found / asked
    return ratios


def miss_reasons(stats: Mapping[str, Value]) -> str:
    """What became of the first missing block of lookups that were not full: the most frequent reasons."""
    counts = Counter(
        {
            name.removeprefix(MISSED).replace("_", " "): float(n)
            for name, n in stats.items()
            if name.startswith(MISSED) and isinstance(n, float)
        }
    )
    if not (total := counts.total()):
        return "none"
    return ", ".join(f"{n / total:.0%} {reason}" for reason, n in counts.most_common(REASONS_SHOWN) if n)


def summary(stats: Mapping[str, Value]) -> Iterator[Group]:
    """What an operator looks at first, in words. A counter that was never raised is 0."""

    def n(*names: str) -> str:
        return ", ".join(f"{float(stats.get(name, 0)):,.0f}" for name in names)

    def size(name: str) -> str:
        return format_size(float(stats.get(name, 0)))

    def share(name: str) -> str:
        return f"{float(stats[name]):.1%}" if name in stats else "nothing looked up yet"

    yield (
        "",
        [
            ("version, policy", f"{stats['server_version']}, {stats['policy']}"),
            ("up for", str(timedelta(seconds=int(float(stats["uptime_s"]))))),
            ("clients", n("sessions")),
            ("leases, reservations, pins", n("leases", "reservations", "pins")),
            ("pins hold", f"{size('pinned_bytes')} of {size('pin_room_bytes')}"),
            ("tenants with blocks", n("tenants")),
            ("blocks stored", n("blocks")),
            ("prompts, blocks looked up", n("lookups", "lookup_blocks")),
            ("blocks found", share("hit_ratio")),
            ("first block missing of the others", miss_reasons(stats)),
        ],
    )
    if "hbm_capacity_bytes" in stats:
        hbm = [
            ("device", str(stats["hbm_device"])),
            ("used", f"{size('hbm_used_bytes')} of {size('hbm_capacity_bytes')}"),
            ("found there", share("hbm_hit_ratio")),
            ("blocks copied there", n("hbm_promoted_blocks") + (", none for now" if stats["hbm_suspended"] else "")),
            ("skipped, without room, failed", n("hbm_skipped_blocks", "hbm_no_room_blocks", "hbm_failed_blocks")),
            ("blocks evicted", n("hbm_evicted_blocks")),
        ]
        if stats["hbm_memory_failure"]:
            hbm.append(("memory failure", str(stats["hbm_memory_failure"])))
        yield "HBM tier", hbm
    dram = [
        ("used", f"{size('dram_used_bytes')} of {size('dram_capacity_bytes')}"),
        ("found there", share("dram_hit_ratio")),
        ("blocks evicted", n("evicted_blocks")),
        ("blocks not stored for want of room", n("skipped_blocks")),
        ("huge pages", str(stats["dram_huge_pages_note"]) or "yes"),
        ("clients can't write blocks of", f"other {stats.get('dram_isolation', 'client')}s"),
    ]
    if stats["dram_memory_failure"]:
        dram.append(("memory failure", str(stats["dram_memory_failure"])))
    yield "DRAM tier", dram
    if "nvme_health" not in stats:
        return
    health = str(stats["nvme_health"])
    if stats.get("offload_suspended"):
        health += ", writes pause"
    if stats.get("onboard_stuck"):
        health += ", a read is stuck"
    yield (
        "NVMe tier",
        [
            ("health", health),
            ("used", f"{size('nvme_used_bytes')} of {size('nvme_live_capacity_bytes')} for blocks"),
            ("found there", share("nvme_hit_ratio")),
            ("blocks written, read", n("offloaded_blocks", "onboarded_blocks")),
            ("blocks waiting to be written", f"{n('offload_pending_blocks')} ({size('offload_pending_bytes')})"),
            ("writes skipped, failed", n("offload_skipped_blocks", "offload_failed_blocks")),
            ("blocks unreadable, corrupt", n("onboard_unreadable_blocks", "onboard_corrupt_blocks")),
            ("blocks evicted", n("nvme_evicted_blocks")),
        ],
    )


def grouped(stats: Mapping[str, Value]) -> Iterator[Group]:
    """All numbers by group, in the order of their names; the first group has no title."""
    rest = {name: shown(name, value) for name, value in sorted(stats.items())}
    groups = []
    for title, prefix in GROUPS:
        lines = [(name, rest.pop(name)) for name in list(rest) if name.startswith(prefix)]
        if lines:
            groups.append((title, lines))
    yield "", list(rest.items())
    yield from groups


def shown(name: str, value: Value) -> str:
    """A value for people."""
    if isinstance(value, str):
        return value or "none"
    if name.endswith("_bytes"):
        return format_size(value)
    if name.endswith("_bytes_per_s"):
        return f"{format_size(value)}/s"
    return f"{value:,.4g}" if value % 1 else f"{value:,.0f}"
