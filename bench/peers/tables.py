"""What was measured side by side, as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from kvstore.bench.peers.catalog import KEPT, Entry, Tier
from kvstore.bench.peers.driver import OPERATIONS
from kvstore.bench.peers.figures import Cell, Comparison, PeersReport
from kvstore.config import format_size

TIER_TITLES: dict[Tier, str] = {"dram": "DRAM", "disk": "disk"}


def peers_tables(report: PeersReport) -> list[Table]:
    """For each tier and operation the figures and what they are to this store's; what was left out."""
    comparisons = report.comparisons()
    tables = [
        table
        for tier in KEPT
        if report.measured(tier)
        for operation in OPERATIONS
        for table in (_figures(report, tier, operation), _ratios(report, tier, operation, comparisons))
    ]
    tables.append(_systems(report))
    return tables


def size_name(n_bytes: int) -> str:
    """As short as it can be."""
    return format_size(n_bytes).replace(".0 ", " ")


def _figures(report: PeersReport, tier: Tier, operation: str) -> Table:
    unit = "µs a call" if operation == "lookup" else "GB/s"
    title = f"{TIER_TITLES[tier]}, {operation}: {unit}, median of {report.rounds}; in brackets processor time"
    shown: Callable[[Cell], str] = _time if operation == "lookup" else _rate
    return _by_size(report, title, report.measured(tier), operation, shown)


def _rate(cell: Cell) -> str:
    """GB/s, and processor milliseconds for a gigabyte."""
    cpu_ms = cell.cpu_us / 1e3 / (cell.block_bytes * cell.n_blocks / 1e9)
    return f"{cell.gb_per_s.median:.2f} ({cpu_ms:,.0f} ms/GB)"


def _time(cell: Cell) -> str:
    return f"{cell.us.median:,.0f} ({cell.cpu_us:,.0f} µs)"


def _by_size(
    report: PeersReport, title: str, entries: Sequence[Entry], operation: str, shown: Callable[[Cell], str]
) -> Table:
    table = _sized(report, "system", title)
    for entry in entries:
        if operation not in entry.operations:
            continue
        cells = [report.cell(entry.name, operation, size) for size in report.block_sizes]
        table.add_row(entry.title, *("-" if cell is None else shown(cell) for cell in cells))
    return table


def _ratios(report: PeersReport, tier: Tier, operation: str, comparisons: Sequence[Comparison]) -> Table:
    measured = report.measured(tier)
    own = next((entry.name for entry in measured if entry.reference), "")
    title = (
        f"{TIER_TITLES[tier]}, {operation}: time of the other / time of {own}, 95% bounds; in brackets processor time"
    )
    table = _sized(report, "other", title)
    found = {
        (each.other, each.block_bytes): each for each in comparisons if (each.own, each.operation) == (own, operation)
    }
    for entry in measured:
        row = [found.get((entry.name, size)) for size in report.block_sizes]
        if any(row):
            table.add_row(entry.title, *("-" if each is None else _ratio(each) for each in row))
    return table


def _ratio(each: Comparison) -> str:
    colour = {"ahead": "green", "behind": "red", "level": "yellow"}[each.verdict]
    bounds = f"{each.ratio.low:.2f}-{each.ratio.high:.2f}"
    return f"[{colour}]{each.ratio.median:.2f}[/] {bounds} ({each.cpu_ratio.median:.2f})"


def _sized(report: PeersReport, first: str, title: str) -> Table:
    table = Table(first, *(size_name(size) for size in report.block_sizes), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _systems(report: PeersReport) -> Table:
    """Versions, wrong bytes, and why something is missing."""
    table = Table("system", "version", "wrong blocks", "not measured", title="Systems")
    for entry in report.entries:
        reasons = [
            f"{'' if each.block_bytes is None else size_name(each.block_bytes) + ': '}{each.reason}"
            for each in report.skipped
            if each.name == entry.name
        ]
        wrong = report.wrong_blocks.get(entry.name, 0)
        table.add_row(
            entry.title,
            report.versions.get(entry.name, "-"),
            f"[bold red]{wrong:,}[/]" if wrong else "0" if entry.name in report.versions else "-",
            "\n".join(reasons),
        )
    return table
