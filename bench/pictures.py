"""Pictures of benchmark results. Importing needs nothing; drawing raises ImportError without matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.bench.bandwidth import BandwidthReport
from kvstore.bench.bandwidth_lookup import LookupRow
from kvstore.bench.bandwidth_nvme import NvmeReport
from kvstore.bench.bandwidth_row import Row
from kvstore.bench.generate import TokenTrace
from kvstore.bench.grpc_stream import GrpcReport
from kvstore.bench.replay_result import ReplayResult
from kvstore.bench.simulate import HitCounts, SweepPoint
from kvstore.bench.simulation_report import SimulationReport
from kvstore.bench.workload import Workload
from kvstore.config import format_size

_DPI = 150
# Distinct for people who see colours differently (the Okabe-Ito palette), darker first.
_BLUE, _ORANGE, _GREEN, _VERMILION, _SKY, _GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#666666",
)  # fmt: skip


def draw_hit_ratio(
    path: Path, workload: Workload, report: SimulationReport, measured: ReplayResult | None = None
) -> None:
    """Hit ratio over the capacity of one tier: simulated curves, the ideal, and the real replay as points.

    For a replay with an NVMe tier also where its hits came from.
    """
    if measured is None or measured.nvme_capacity_blocks is None:
        figure, axes = new_figure(8.0, 5.0)
    else:
        figure, (axes, right) = new_figure(12.0, 5.0, columns=2, widths=(5, 2))
        _draw_tiers(right, measured)
    _curve(axes, report.points, "token_hit_ratio", "token hit", _BLUE, "o-")
    if report.whole_block_points:
        _curve(axes, report.whole_block_points, "token_hit_ratio", "token hit, whole blocks only", _SKY, "s--")
    _curve(axes, report.points, "block_hit_ratio", "block hit", _ORANGE, "^-")
    trace = workload.block_view if isinstance(workload, TokenTrace) else workload
    ideal = trace.ideal_block_hit_ratio
    axes.axhline(ideal, color=_GREY, linestyle=":", label=f"block hit, unlimited room ({ideal:.3f})")
    if measured is not None:
        _draw_measured(axes, measured)
    axes.set_xscale("log")
    ticks = sorted({p.capacity_percent for p in report.points})
    axes.set_xticks(ticks, [f"{t:g}%" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"capacity, share of {report.unique_blocks:,} unique blocks (log scale)")
    axes.set_ylabel("hit ratio")
    axes.set_ylim(0, max(_tops(report, ideal)) * 1.12)
    axes.set_title(f"Hit ratio over capacity: {report.name}, policy {report.policy}")
    axes.legend(loc="lower right", framealpha=0.95)
    save_figure(figure, path)


def _draw_measured(axes: Any, measured: ReplayResult) -> None:
    """Stars at the capacities of the tiers: what all of them found stands at the largest one's."""
    clients = f"{measured.clients} client{'s' * (measured.clients > 1)}"
    counts, nvme_blocks = measured.counts, measured.nvme_capacity_blocks
    largest = max(measured.capacity_blocks, nvme_blocks or 0)
    stars = [(largest, value, f"replay, {clients}") for value in (counts.block_hit_ratio, counts.token_hit_ratio)]
    marks = [(*star, _VERMILION) for star in stars]
    if nvme_blocks is not None:
        dram = counts.dram_block_hits / max(1, counts.block_accesses)
        marks.append((measured.capacity_blocks, dram, "block hits in DRAM", _GREEN))
    labelled: set[str] = set()
    for blocks, value, label, color in marks:
        axes.plot(
            [100 * blocks / measured.unique_blocks],
            [value],
            "*",
            color=color,
            markersize=13,
            markeredgecolor="white",
            label="_" if label in labelled else label,
            zorder=5,
        )
        labelled.add(label)


def _draw_tiers(axes: Any, measured: ReplayResult) -> None:
    """Where block hits came from: a stack for the replay, one for the simulation."""
    columns: list[tuple[str, HitCounts]] = [("replay", measured.counts)]
    if measured.simulated is not None:
        columns.append(("simulated", measured.simulated))
    floor = [0.0] * len(columns)
    for name, field, color in (("DRAM", "dram_block_hits", _GREEN), ("NVMe", "nvme_block_hits", _SKY)):
        heights = [getattr(counts, field) / max(1, counts.block_accesses) for _, counts in columns]
        bars = axes.bar([label for label, _ in columns], heights, 0.6, bottom=floor, color=color, label=name)
        axes.bar_label(bars, [f"{height:.4f}" for height in heights], label_type="center", fontsize=9)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    for x, top in enumerate(floor):
        axes.annotate(f"{top:.4f}", (x, top), ha="center", va="bottom", fontsize=9, fontweight="bold")
    axes.set_ylim(0, max([0.05, *floor]) * 1.15)
    axes.set_ylabel("share of block accesses")
    title = f"By tier, write policy {measured.write_policy}"
    if measured.crash is not None:
        title += f"\nSIGKILL after {measured.crash.at_request:,} requests: {measured.crash.lost} blocks lost"
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower center", ncols=2, bbox_to_anchor=(0.5, -0.2), frameon=False)


def draw_bandwidth(path: Path, report: BandwidthReport | None, nvme: NvmeReport | None = None) -> None:
    """Ratio to numpy's copy by operation and block size; lookups as multiples of an echo; NVMe beside the disk."""
    widths = (*((3.0, 2.0) if report is not None else ()), *((2.5,) if nvme is not None else ()))
    figure, axes = new_figure(2.6 * sum(widths), 5.4, columns=len(widths), widths=widths)
    places = [axes] if len(widths) == 1 else list(axes)
    titles = []
    if report is not None:
        _draw_ratios(
            places[0],
            [row for row in report.rows if not row.cold],
            "Bytes moved (GB/s on the bars)",
            "limit: numpy copy, same threads",
        )
        _draw_lookups(places[1], report.lookups)
        titles.append(f"{report.pairs} pairs, batches of {_size(report.batch_bytes)}")
    if nvme is not None:
        _draw_ratios(places[-1], nvme.rows, "NVMe (GB/s on the bars)", f"limit: {nvme.limit}")
        titles.append(f"NVMe {nvme.pairs} pairs, batches of {_size(nvme.batch_bytes)}")
    figure.suptitle(f"kvstore against this machine's limits: {'; '.join(titles)}")
    save_figure(figure, path)


def draw_index(path: Path, figures: Mapping[str, float]) -> None:
    """Matching time as multiples of its yardstick, and memory by shape of the tree."""
    figure, (left, right) = new_figure(13.0, 5.0, columns=2, widths=(3, 2))
    times = {name.removesuffix("_ratio"): value for name, value in figures.items() if name.endswith("_ratio")}
    bars = left.barh([name.replace("_", " ") for name in times], list(times.values()), color=_BLUE)
    left.bar_label(bars, fmt="%.2f", padding=3)
    left.axvline(1, color=_GREY, linestyle=":")
    left.invert_yaxis()
    left.set_xlabel("edges: times one numpy comparison of the prompt; others: times the small tree")
    memory = {name: value for name, value in figures.items() if name.startswith("bytes_per_block")}
    names = [name.removeprefix("bytes_per_block_").replace("_", " ") for name in memory]
    bars = right.barh(names, list(memory.values()), color=_ORANGE)
    right.bar_label(bars, fmt="%.0f", padding=3)
    right.invert_yaxis()
    right.set_xlabel("bytes a block, beside its row")
    figure.suptitle("Prefix index: time of a match and memory of a block")
    save_figure(figure, path)


def draw_metrics(path: Path, figures: Mapping[str, float]) -> None:
    """Speed with metrics as a share of the speed without."""
    figure, axes = new_figure(8.0, 3.0)
    names = ["read", "lease"]
    values = [figures[f"{name}_ratio"] for name in names]
    low = [figures[f"{name}_ratio"] - figures[f"{name}_ratio_low"] for name in names]
    bars = axes.barh(names, values, xerr=[low, [0.0] * len(names)], color=_BLUE)
    axes.bar_label(bars, fmt="%.3f", padding=3)
    axes.axvline(1, color=_GREY, linestyle=":")
    axes.invert_yaxis()
    axes.set_xlabel("time without metrics / time with them and a scrape (95% bound)")
    figure.suptitle("Cost of metrics")
    save_figure(figure, path)


def draw_grpc(path: Path, report: GrpcReport) -> None:
    """Streams as a share of bare ones; how long calls take with one client and with many."""
    figure, (left, right) = new_figure(13.0, 5.0, columns=2, widths=(3, 2))
    _draw_ratios(left, report.rows, "Blocks (GB/s on the bars)", "bare gRPC stream of the same chunks")
    crowd = report.crowd
    latencies = {f"{name}, 1 client": latency for name, latency in report.calls.items()}
    latencies |= {f"{name}, {crowd.clients} clients": latency for name, latency in crowd.latency.items()}
    names = list(latencies)
    p50, p99 = ([getattr(latency, what) / 1e3 for latency in latencies.values()] for what in ("p50_us", "p99_us"))
    bars = right.barh(names, p99, color=_SKY, label="p99")
    right.barh(names, p50, color=_BLUE, label="p50")
    labels = [f"{low:,.{_decimals(low)}f} / {high:,.{_decimals(high)}f}" for low, high in zip(p50, p99, strict=True)]
    right.bar_label(bars, labels, padding=3, fontsize=7)
    right.set_xscale("log")
    right.set_xlim(right=max(p99) * 8)
    right.invert_yaxis()
    right.set_xlabel("ms, p50 / p99 on the bars")
    right.set_title(f"Calls; {crowd.n_lost} of {crowd.n_calls:,} lost", fontsize=10)
    right.legend(fontsize=7.5, frameon=False, loc="upper right")
    figure.suptitle(f"gRPC: {report.pairs} pairs, batches of {_size(report.batch_bytes)}")
    save_figure(figure, path)


def _decimals(value: float) -> int:
    return 1 if value < 100 else 0


def _curve(axes: Any, points: Sequence[SweepPoint], name: str, label: str, color: str, style: str) -> None:
    x = [p.capacity_percent for p in points]
    axes.plot(x, [getattr(p.counts, name) for p in points], style, color=color, label=label, markersize=5)


def _tops(report: SimulationReport, ideal: float) -> list[float]:
    return [ideal, 0.05, *(p.counts.token_hit_ratio for p in report.points)]


def _draw_ratios(axes: Any, rows: Sequence[Row], title: str, limit: str) -> None:
    sizes = sorted({row.block_bytes for row in rows})
    kinds = sorted({(row.name, row.threads) for row in rows}, key=lambda kind: (_order(kind[0]), kind[1]))
    shades = dict(zip(kinds, _shades(len(kinds)), strict=True))
    width = 0.84 / max(1, len(kinds))
    for at, kind in enumerate(kinds):
        chosen = {row.block_bytes: row for row in rows if (row.name, row.threads) == kind}
        x = [i + (at - (len(kinds) - 1) / 2) * width for i, size in enumerate(sizes) if size in chosen]
        picked = [chosen[size] for size in sizes if size in chosen]
        label = f"{kind[0]}, {kind[1]} thread{'s' * (kind[1] > 1)}"
        bars = axes.bar(x, [row.ratio for row in picked], width * 0.94, color=shades[kind], label=label)
        axes.bar_label(
            bars,
            [f"{row.gb_per_s:.{1 if row.gb_per_s >= 1 else 2}f}" for row in picked],
            fontsize=6.5,
            padding=1,
            rotation=90,
        )
    axes.axhline(1, color=_VERMILION, linewidth=1.5, label=limit)
    axes.set_xticks(range(len(sizes)), [_size(size) for size in sizes])
    axes.set_xlabel("block size")
    axes.set_ylabel("bandwidth as a multiple of the limit")
    axes.set_ylim(0, max([1.0, *(row.ratio for row in rows)]) * 1.15)
    axes.set_title(title, fontsize=10)
    axes.legend(
        fontsize=7.5, ncols=3 if len(kinds) > 2 else 1, loc="upper center", bbox_to_anchor=(0.5, -0.11), frameon=False
    )


def _draw_lookups(axes: Any, rows: Sequence[LookupRow]) -> None:
    names = [f"{row.name}, {row.rows}\n{row.n_blocks} x {_size(row.block_bytes)}" for row in rows]
    y = list(range(len(rows)))[::-1]
    bars = axes.barh(y, [row.echo_ratio for row in rows], 0.7, color=_GREEN)
    labels = [f" {row.latency.p50_us:.0f} µs" for row in rows]
    for text in axes.bar_label(bars, labels, fontsize=7.5):
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5})
    axes.axvline(1, color=_VERMILION, linewidth=1.5, label="Unix-socket echo of 4 KiB")
    grpc = [row.echo_ratio / row.grpc_ratio for row in rows if row.grpc_ratio]
    if grpc:
        axes.axvline(grpc[0], color=_GREY, linestyle=":", linewidth=1.5, label="grpc.aio echo of 4 KiB")
    axes.set_yticks(y, names, fontsize=7.5)
    axes.set_xlabel("p50 as a multiple of the echo")
    axes.set_xlim(0, max([1.0, *grpc, *(row.echo_ratio for row in rows)]) * 1.2)
    axes.grid(axis="x", alpha=0.3)
    axes.grid(axis="y", visible=False)
    axes.set_title("Lookups: no KV bytes move (p50 on the bars)", fontsize=10)
    axes.legend(fontsize=7.5, ncols=2, loc="upper center", bbox_to_anchor=(0.35, -0.11), frameon=False)


def _size(n_bytes: int) -> str:
    return format_size(n_bytes).replace(".0 ", " ")


def _order(name: str) -> int:
    known = ("put", "get_into")
    return known.index(name) if name in known else len(known)


def _shades(n: int) -> list[str]:
    paired = [_BLUE, _SKY, _ORANGE, "#F3D28A", _GREEN, "#7FD1B9"]
    return [paired[i % len(paired)] for i in range(n)]


def new_figure(width: float, height: float, columns: int = 1, widths: Sequence[float] = (1,)) -> tuple[Any, Any]:
    """A figure and its axes, one or ``columns`` of them, ``widths`` to each other."""
    # Figure objects instead of pyplot: no global state, no display, nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, width_ratios=widths)
    for one in [axes] if columns == 1 else axes:
        one.grid(axis="y", alpha=0.3)
        one.set_axisbelow(True)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
