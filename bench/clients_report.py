"""Tables and the picture of many clients at once. Drawing raises ImportError without matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from kvstore.bench.clients import ClientsReport, Served
from kvstore.bench.pictures import new_figure, save_figure
from kvstore.config import format_size

_BLUE, _ORANGE, _SKY = "#0072B2", "#E69F00", "#56B4E9"


def clients_tables(report: ClientsReport) -> list[Table]:
    """What all clients got of the daemon and of bare echoes; their calls; matches beside children of the daemon."""
    options = report.options
    sides = (report.daemon, report.echo)
    whole = Table(
        f"{options.clients} clients, {options.blocks:,} blocks, {options.seconds:g} s", "daemon", "bare echo",
        title="Many clients; a round is a match, a lease and its release",
    )  # fmt: skip
    rows: list[tuple[str, list[str]]] = [
        ("rounds per second", [f"{side.rounds_per_s:,.0f}" for side in sides]),
        ("ratio to the bare echo", [f"{report.ratio:.3f}", ""]),
        ("fairness: fewest rounds / most rounds of a client", [f"{side.fairness:.2f}" for side in sides]),
        ("longest time a client finished no round", [f"{side.gap_s_max * 1e3:,.0f} ms" for side in sides]),
        ("calls not answered as they should have been", [f"{report.daemon.n_lost:,}", ""]),
        ("processor of the server, of one core", [f"{side.server_share:.0%}" for side in sides]),
        ("processor of all clients, of one core", [f"{side.clients_share:.0%}" for side in sides]),
        ("eviction policy, a block looked up", [f"{report.policy_us_per_block:.1f} µs", ""]),
        ("daemon's own memory, before -> after", [_grown(report.before.own_bytes, report.after.own_bytes), ""]),
        ("shared with clients, before -> after", [_grown(report.before.shared_bytes, report.after.shared_bytes), ""]),
    ]
    for name, values in rows:
        whole.add_row(name, *values)
    calls = Table("call", "calls", "p50 µs", "p99 µs", "max µs", title="How long calls took")
    for server, side in (("", report.daemon), ("echo as long as a ", report.echo)):
        for name, times in side.by_call.items():
            latency = times.latency
            numbers = (latency.p50_us, latency.p99_us, times.max_us)
            calls.add_row(f"{server}{name}", f"{latency.n:,}", *(f"{value:,.0f}" for value in numbers))
    tables = [whole, calls]
    if report.children.n_spans:
        tables.append(_children_table(report))
    for table in tables:
        for column in table.columns[1:]:
            column.justify = "right"
    return tables


def _children_table(report: ClientsReport) -> Table:
    children = report.children
    table = Table("a child of the daemon (a refit)", "matches", "p50 µs", "p99 µs", title="Matches beside refits")
    for name, times in (("works", children.busy), ("does not", children.idle)):
        latency = times.latency
        table.add_row(name, f"{latency.n:,}", f"{latency.p50_us:,.0f}", f"{latency.p99_us:,.0f}")
    ratio = children.p99_ratio
    shown = "-" if ratio is None else f"{ratio:.2f}"
    table.caption = f"p99 {shown} x; {children.n_spans} times, {children.busy_s:.1f} s in all"
    return table


def draw_clients(path: Path, report: ClientsReport) -> None:
    """Rounds a second and p99 of a match over time; on the right what each client got, and calls beside echoes."""
    figure, (left, middle, right) = new_figure(15.0, 4.8, columns=3, widths=(5, 3, 4))
    n, options = len(report.timeline), report.options
    at_s = [(i + 0.5) * options.seconds / n for i in range(n)]
    left.plot(at_s, [rate for rate, _ in report.timeline], "-", color=_BLUE, label="rounds a second")
    left.set_ylim(bottom=0)
    left.set_xlabel("seconds")
    left.set_ylabel("rounds a second", color=_BLUE)
    beside = left.twinx()
    beside.plot(at_s, [p99_us / 1e3 for _, p99_us in report.timeline], "-", color=_ORANGE)
    beside.set_ylim(bottom=0)
    beside.set_ylabel("p99 of a match, ms", color=_ORANGE)
    left.set_title(f"{report.daemon.rounds_per_s:,.0f} rounds/s, {report.ratio:.3f} of bare echoes", fontsize=10)
    counts = sorted(report.rounds_by_client)
    middle.bar(range(len(counts)), counts, width=1.0, color=_SKY)
    middle.set_xlabel("clients, by what they got")
    middle.set_title(
        f"rounds of each client\nfairness {report.daemon.fairness:.2f}, longest gap {report.daemon.gap_s_max:.2f} s",
        fontsize=10,
    )
    _draw_calls(right, {"daemon": report.daemon, "echo": report.echo})
    figure.suptitle(f"{options.clients} clients on {options.blocks:,} blocks for {options.seconds:g} s")
    save_figure(figure, path)


def _draw_calls(axes: Any, sides: dict[str, Served]) -> None:
    named = {f"{call}, {name}": times for name, side in sides.items() for call, times in side.by_call.items()}
    p50, p99 = ([getattr(times.latency, what) for times in named.values()] for what in ("p50_us", "p99_us"))
    bars = axes.barh(list(named), p99, color=_SKY, label="p99")
    axes.barh(list(named), p50, color=_BLUE, label="p50")
    labels = [f"{low:,.0f} / {high:,.0f}" for low, high in zip(p50, p99, strict=True)]
    axes.bar_label(bars, labels, padding=3, fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(right=max([1.0, *p99]) * 30)
    axes.invert_yaxis()
    axes.set_title("µs, p50 / p99", fontsize=10)


def _grown(before_bytes: int, after_bytes: int) -> str:
    return f"{format_size(before_bytes)} -> {format_size(after_bytes)}"
