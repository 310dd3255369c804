"""``kvstore status``: the numbers of a running daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvstore.cli.params import json_option, socket_option
from kvstore.client import Client
from kvstore.config import format_size

GROUPS = (
    ("DRAM tier", "dram_"),
    ("NVMe tier", "nvme_"),
    ("DRAM to NVMe", "offload"),
    ("NVMe to DRAM", "onboard"),
)
"""Which numbers stand together, by how their names begin; all others come first."""

Value = float | str


@click.command()
@socket_option
@json_option
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=2.0,
    show_default=True,
    help="Seconds to wait for the daemon.",
)
def status(socket_path: Path, as_json: bool, timeout_s: float) -> None:
    """Show the counters and gauges of a running daemon."""
    with Client(socket_path, timeout_s=timeout_s) as client:
        stats = client.stats()
    stats |= hit_ratios(stats)
    if as_json:
        click.echo(json.dumps(dict(sorted(stats.items())), indent=2))
        return
    table = Table("what", "value", title=f"kvstored at {socket_path}")
    table.columns[1].justify = "right"
    for title, lines in grouped(stats):
        if title:
            table.add_section()
            table.add_row(f"[bold]{title}[/bold]", "")
        for name, value in lines:
            table.add_row(name, shown(name, value))
    Console().print(table)


def hit_ratios(stats: Mapping[str, Value]) -> dict[str, Value]:
    """The share of all blocks looked up that each tier had; nothing before the first lookup."""
    asked, hits, nvme = (float(stats.get(name, 0)) for name in ("lookup_blocks", "hit_blocks", "hit_blocks_nvme"))
    if not asked:
        return {}
    ratios: dict[str, Value] = {"hit_ratio": hits / asked, "dram_hit_ratio": (hits - nvme) / asked}
    if any(name.startswith("nvme_") for name in stats):
        ratios["nvme_hit_ratio"] = nvme / asked
    return ratios


def grouped(stats: Mapping[str, Value]) -> Iterator[tuple[str, list[tuple[str, Value]]]]:
    """The numbers by group, in the order of their names; the first group has no title."""
    rest = dict(sorted(stats.items()))
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
        return value
    if name.endswith("_bytes"):
        return format_size(value)
    if name.endswith("_bytes_per_s"):
        return f"{format_size(value)}/s"
    return f"{value:,.4g}" if value % 1 else f"{value:,.0f}"
