"""What was measured side by side, as a picture. Importing needs nothing; drawing needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.bench.peers.catalog import KEPT, Entry
from kvstore.bench.peers.driver import OPERATIONS
from kvstore.bench.peers.figures import PeersReport
from kvstore.bench.peers.tables import TIER_TITLES, size_name

_OWN_COLOURS = ("#0072B2", "#56B4E9", "#009E73")
_PEER_COLOURS = ("#D55E00", "#E69F00", "#CC79A7", "#8C564B", "#882255", "#B8860B", "#999933", "#AA4499")
_LIMIT_COLOUR = "#222222"
_MARKS = "osD^vPX<>*"


def draw_peers(path: Path, report: PeersReport) -> None:
    """A row for each tier, a column for each operation: lines over the block size, with bounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tiers = [tier for tier in KEPT if report.measured(tier)]
    figure = Figure(figsize=(15, 4.6 * len(tiers)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(tiers), len(OPERATIONS), squeeze=False)
    for row, tier in zip(grid, tiers, strict=True):
        entries = report.measured(tier)
        for axes, operation in zip(row, OPERATIONS, strict=True):
            for entry, style in zip(entries, _styles(entries), strict=True):
                _draw_line(axes, report, entry, operation, style)
            _label(axes, report, f"{TIER_TITLES[tier]}: {operation}", operation)
        row[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, handles=_handles(row[0]))
    figure.savefig(path, dpi=150)


def _styles(entries: list[Entry]) -> list[dict[str, Any]]:
    own, peers = iter(_OWN_COLOURS), iter(_PEER_COLOURS * 2)
    styles: list[dict[str, Any]] = []
    for i, entry in enumerate(entries):
        if entry.role == "limit":
            styles.append({"color": _LIMIT_COLOUR, "linestyle": ":", "linewidth": 1.8})
        else:
            ours = entry.role == "own"
            styles.append({
                "color": next(own if ours else peers), "marker": _MARKS[i % len(_MARKS)], "markersize": 5,
                "linewidth": 2.4 if ours else 1.2, "zorder": 3 if ours else 2,
            })  # fmt: skip
    return styles


def _draw_line(axes: Any, report: PeersReport, entry: Entry, operation: str, style: dict[str, Any]) -> None:
    cells = [cell for size in report.block_sizes if (cell := report.cell(entry.name, operation, size)) is not None]
    figures = [cell.us if operation == "lookup" else cell.gb_per_s for cell in cells]
    if figures:
        medians = [figure.median for figure in figures]
        below = [figure.median - figure.low for figure in figures]
        above = [figure.high - figure.median for figure in figures]
        places = [report.block_sizes.index(cell.block_bytes) for cell in cells]
        axes.errorbar(places, medians, yerr=(below, above), elinewidth=0.8, capsize=2, label=entry.title, **style)


def _label(axes: Any, report: PeersReport, title: str, operation: str) -> None:
    lookup = operation == "lookup"
    axes.set_title(title + (", µs a call: less is better" if lookup else ", GB/s: more is better"), fontsize=10)
    axes.set_xticks(range(len(report.block_sizes)), [size_name(size) for size in report.block_sizes])
    axes.set_xlabel("block")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _handles(axes: Any) -> list[Any]:
    handles: list[Any] = axes.get_legend_handles_labels()[0]
    return handles
