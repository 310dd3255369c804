"""What a benchmark leaves behind: tables for people, one JSON object, a picture."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from kvstore.bench.bandwidth import BandwidthReport
from kvstore.bench.bandwidth_nvme import NvmeReport
from kvstore.bench.grpc_stream import GrpcReport
from kvstore.bench.hybrid import HybridReport
from kvstore.bench.simulate import Progress
from kvstore.config import format_size
from kvstore.errors import BadInputError

JSON_NAME = "report.json"
PICTURE_NAME = "picture.png"

Plot = Callable[[Path], None]
"""Draws a picture into a file."""


@contextlib.contextmanager
def progress_bar(description: str, total: int, show: bool | None = None) -> Iterator[Progress]:
    """A progress bar on stderr: shown on a terminal, or as ``show`` says. Yields what to call per request."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    terminal = sys.stderr.isatty()
    visible = terminal if show is None else show
    # A file gets the last state once; a terminal is left clean for the tables.
    with RichProgress(*columns, console=console, disable=not visible, transient=terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def prepare(folder: Path) -> None:
    """Make the folder of a report, before the work that it is to hold. Raises BadInputError if that can't be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> BadInputError:
    return BadInputError(f"{folder}: can't be written to ({error.strerror or error}); choose another --output")


def save(folder: Path, report: dict[str, Any], plot: Plot | None) -> list[str]:
    """Write ``report.json`` and ``picture.png`` below ``folder``; returns a line for people about each.

    A missing matplotlib is such a line, not an error. Raises BadInputError if ``folder`` can't be written to.
    """
    try:
        lines = [f"report: {asyncio.run(write_json(folder / JSON_NAME, report))}"]
        if plot is not None:
            lines.append(_draw(folder / PICTURE_NAME, plot))
    except OSError as error:
        raise _unwritable(folder, error) from error
    return lines


async def write_json(path: Path, report: dict[str, Any]) -> Path:
    """Write one JSON object, making folders as needed; a reader sees the old file or the whole new one."""
    await aiofiles.os.makedirs(path.parent, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    async with aiofiles.open(unfinished, "w", encoding="utf-8") as file:
        await file.write(json.dumps(report, indent=2) + "\n")
    await aiofiles.os.replace(unfinished, path)
    return path


def _draw(path: Path, plot: Plot) -> str:
    try:
        plot(path)
    except ImportError:
        return "picture: left out, matplotlib is not installed (pip install '.[bench]' from a checkout)"
    return f"picture: {path}"


def bandwidth_tables(report: BandwidthReport | None, nvme: NvmeReport | None = None) -> list[Table]:
    """Limits, bytes moved, lookups; NVMe."""
    tables = [] if report is None else [_limits_table(report), _copy_table(report), _lookup_table(report)]
    return tables + ([] if nvme is None else [_nvme_table(nvme)])


def index_table(figures: Mapping[str, float]) -> Table:
    """The index's figures, one a row."""
    return facts_table("Prefix index", [(name.replace("_", " "), f"{value:,.2f}") for name, value in figures.items()])


def metrics_table(figures: Mapping[str, float]) -> Table:
    """What metrics cost, one figure a row."""
    rows = [(name.replace("_", " "), f"{value:,.3f}") for name, value in figures.items()]
    return facts_table("Metrics: time off / time on", rows)


def embedded_table(figures: Mapping[str, float]) -> Table:
    """Calls of an embedded store beside a daemon's, one figure a row."""
    rows = [(name.replace("_", " "), f"{value:,.2f}") for name, value in figures.items()]
    return facts_table("Embedded; ratio: time embedded / time over the Unix socket", rows)


def overlap_table(figures: Mapping[str, float]) -> Table:
    """What a routing hint costs, and how true its times are, one figure a row."""
    rows = [(name.replace("_", " "), f"{value:,.3f}") for name, value in figures.items()]
    return facts_table("Overlap; told / took: load time foretold to what it took", rows)


def grpc_tables(report: GrpcReport) -> list[Table]:
    """Streams beside bare ones, single calls, many clients."""
    title = f"gRPC, batches of {format_size(report.batch_bytes)}; ratio: median of {report.pairs} pairs' ratios"
    streams = Table(
        "operation", "block", "GB/s", "bare GB/s", "ratio", "95% low", "bare + copy GB/s", "ratio", title=title
    )
    for row, landed in zip(report.rows, report.landed, strict=True):
        beside_bare = (row.gb_per_s, row.limit_gb_per_s, row.ratio, row.ratio_low)
        shown = [f"{value:.2f}" for value in (*beside_bare, landed.limit_gb_per_s, landed.ratio)]
        streams.add_row(row.name, format_size(row.block_bytes), *shown)
    crowd = report.crowd
    calls = Table("call", "clients", "calls", "p50 µs", "p99 µs", title="Calls")
    timings = [(name, 1, latency) for name, latency in report.calls.items()]
    timings += [(name, crowd.clients, latency) for name, latency in crowd.latency.items()]
    for name, clients, latency in timings:
        calls.add_row(name, f"{clients:,}", f"{latency.n:,}", f"{latency.p50_us:,.0f}", f"{latency.p99_us:,.0f}")
    for table in (streams, calls):
        for column in table.columns[1:]:
            column.justify = "right"
    facts = [
        ("calls", f"{crowd.n_calls:,}"),
        ("calls per second", f"{crowd.calls_per_s:,.0f}"),
        ("lost", alarm(crowd.n_lost)),
        ("mismatches", alarm(crowd.mismatches)),
    ]
    return [streams, calls, facts_table(f"{crowd.clients:,} clients at once", facts)]


def hybrid_table(report: HybridReport) -> Table:
    """Hits of a hybrid model, by the way its blocks are stored."""
    options = report.options
    facts = [
        ("model", options.model),
        ("DRAM", f"{format_size(report.dram_bytes)} ({options.dram_percent:g} % of all blocks in one piece)"),
        ("requests", f"{report.by_group.requests:,}"),
        ("token hit ratio, whole blocks (simulated)", f"{report.whole.token_hit_ratio:.4f}"),
        ("token hit ratio, groups by themselves (simulated)", f"{report.by_group.token_hit_ratio:.4f}"),
    ]
    if report.daemon is not None:
        facts += [
            ("token hit ratio, groups by themselves (daemon)", f"{report.daemon.token_hit_ratio:.4f}"),
            ("blocks of hits read from NVMe", f"{report.daemon.nvme_block_hits:,}"),
            ("bytes compared", format_size(report.bytes_read)),
            ("mismatches", alarm(report.mismatches)),
            ("blocks not stored", f"{report.skipped_blocks:,}"),
        ]
    table = facts_table("Hybrid model", facts)
    if report.skipped_blocks:
        table.caption = (
            "blocks not stored: of all groups, those that found DRAM full of what was in use, and those behind them; "
            f"it holds {report.dram_bytes // options.spec.block_bytes:,} blocks in one piece, the longest prompt has "
            f"{report.longest_blocks:,}. Give more --dram-percent to see what groups are worth."
        )
    return table


class PipeConsole(Console):
    """A console that reports a reader that has gone as BrokenPipeError, instead of ending the program."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_tables(tables: Sequence[Table], console: Console | None = None) -> None:
    """Print to stdout (or ``console``)."""
    # A file or a pipe has no width of its own; the tables need more than the 80 columns assumed for it.
    console = console or PipeConsole(width=None if sys.stdout.isatty() else 140)
    for table in tables:
        console.print(table)


def _limits_table(report: BandwidthReport) -> Table:
    limits = report.limits
    grpc = limits.grpc_aio_echo
    facts = [
        ("numpy copy, 1 thread", f"{limits.copy_1_thread_gb_per_s:.1f} GB/s"),
        ("numpy copy, 2 threads", f"{limits.copy_2_threads_gb_per_s:.1f} GB/s"),
        ("Unix-socket echo of 4 KiB", f"p50 {limits.unix_echo.p50_us:.1f} µs"),
        ("grpc.aio echo of 4 KiB", f"p50 {grpc.p50_us:.1f} µs" if grpc else "not measured"),
        (
            f"numpy compare of {limits.token_compare_tokens:,} tokens",
            f"p50 {limits.token_compare.p50_us:.1f} µs",
        ),
        ("mismatching blocks", alarm(report.mismatches)),
        *(("note", note) for note in limits.notes),
    ]
    return facts_table("Limits of this machine, in this run", facts)


def _copy_table(report: BandwidthReport) -> Table:
    title = f"Bandwidth, batches of {format_size(report.batch_bytes)}; ratio: median of {report.pairs} pairs' ratios"
    table = Table(
        "operation",
        "block",
        "threads",
        "GB/s",
        "numpy GB/s",
        "ratio",
        "95% low",
        "p50 µs",
        "p99 µs",
        title=title,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        ratio = ("-", "-", "-") if row.cold else (row.limit_gb_per_s, row.ratio, row.ratio_low)
        shown = [value if isinstance(value, str) else f"{value:.2f}" for value in (row.gb_per_s, *ratio)]
        table.add_row(
            row.name,
            format_size(row.block_bytes),
            str(row.threads),
            *shown,
            f"{row.p50_us:,.0f}",
            f"{row.p99_us:,.0f}",
        )
    return table


def _nvme_table(report: NvmeReport) -> Table:
    title = f"NVMe, batches of {format_size(report.batch_bytes)}, {report.pairs} pairs; limit: {report.limit}"
    table = Table(
        "operation", "block", "GB/s", "limit GB/s", "ratio", "95% low", "of medians", "p50 ms", "p99 ms", title=title
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        numbers = (row.gb_per_s, row.limit_gb_per_s, row.ratio, row.ratio_low, row.ratio_of_medians)
        shown = [f"{value:.2f}" for value in numbers]
        table.add_row(
            row.name, format_size(row.block_bytes), *shown, f"{row.p50_us / 1e3:,.0f}", f"{row.p99_us / 1e3:,.0f}"
        )
    table.add_row("mismatching blocks", alarm(report.mismatches))
    return table


def _lookup_table(report: BandwidthReport) -> Table:
    table = Table(
        "operation", "rows", "blocks", "block", "p50 µs", "p99 µs", "x echo", "x grpc echo", "copy µs",
        title="Lookups of a resident prefix; lease = match and hold in one call (copy: numpy moving its bytes)",
    )  # fmt: skip
    for column in table.columns[2:]:
        column.justify = "right"
    for row in report.lookups:
        table.add_row(
            row.name,
            row.rows,
            str(row.n_blocks),
            format_size(row.block_bytes),
            f"{row.latency.p50_us:,.0f}",
            f"{row.latency.p99_us:,.0f}",
            f"{row.echo_ratio:.1f}",
            "-" if row.grpc_ratio is None else f"{row.grpc_ratio:.2f}",
            f"{row.copy_us:,.0f}",
        )
    return table


def facts_table(title: str, facts: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in facts:
        table.add_row(name, value)
    return table


def alarm(count: int) -> str:
    return f"[bold red]{count:,}[/]" if count else "0"
