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
from kvstore.bench.replay_crash import CrashReport
from kvstore.bench.replay_result import ReplayResult
from kvstore.bench.simulate import HitCounts, Progress
from kvstore.bench.simulation_report import SimulationReport
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
        ("mismatching blocks", _alarm(result.mismatches)),
        ("time", f"{result.wall_s:.1f} s"),
        ("eviction policy", f"{result.policy_us_per_block:.1f} µs a block accessed"),
    ]
    oddities = (
        ("requests not answered", result.unanswered),
        ("leases ended", result.ended_leases),
        ("blocks not read from NVMe in time", result.late_blocks),
    )
    facts += [(name, _alarm(count)) for name, count in oddities if count]
    latency = Table("operation", "calls", "p50", "p99", title="Latency in µs")
    for column in latency.columns[1:]:
        column.justify = "right"
    for name, values in result.latencies.items():
        latency.add_row(name, f"{values.n:,}", f"{values.p50_us:,.0f}", f"{values.p99_us:,.0f}")
    tables = [_facts_table(f"Replay of {result.name}", facts), latency]
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
        ("lost", _alarm(crash.lost)),
        ("with other bytes", _alarm(crash.mismatches)),
    ]
    return _facts_table("SIGKILL and restart of the daemon", facts)


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
    return [_facts_table(f"Simulation of {report.name}", facts), table]


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


def bandwidth_tables(report: BandwidthReport | None, nvme: NvmeReport | None = None) -> list[Table]:
    """Limits, bytes moved, lookups; NVMe."""
    tables = [] if report is None else [_limits_table(report), _copy_table(report), _lookup_table(report)]
    return tables + ([] if nvme is None else [_nvme_table(nvme)])


def index_table(figures: Mapping[str, float]) -> Table:
    """The index's figures, one a row."""
    return _facts_table("Prefix index", [(name.replace("_", " "), f"{value:,.2f}") for name, value in figures.items()])


def metrics_table(figures: Mapping[str, float]) -> Table:
    """What metrics cost, one figure a row."""
    rows = [(name.replace("_", " "), f"{value:,.3f}") for name, value in figures.items()]
    return _facts_table("Metrics: time off / time on", rows)


def embedded_table(figures: Mapping[str, float]) -> Table:
    """Calls of an embedded store beside a daemon's, one figure a row."""
    rows = [(name.replace("_", " "), f"{value:,.2f}") for name, value in figures.items()]
    return _facts_table("Embedded; ratio: time embedded / time over the Unix socket", rows)


def overlap_table(figures: Mapping[str, float]) -> Table:
    """What a routing hint costs, and how true its times are, one figure a row."""
    rows = [(name.replace("_", " "), f"{value:,.3f}") for name, value in figures.items()]
    return _facts_table("Overlap; told / took: load time foretold to what it took", rows)


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
        ("lost", _alarm(crowd.n_lost)),
        ("mismatches", _alarm(crowd.mismatches)),
    ]
    return [streams, calls, _facts_table(f"{crowd.clients:,} clients at once", facts)]


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
            ("mismatches", _alarm(report.mismatches)),
            ("blocks not stored", f"{report.skipped_blocks:,}"),
        ]
    table = _facts_table("Hybrid model", facts)
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
        ("mismatching blocks", _alarm(report.mismatches)),
        *(("note", note) for note in limits.notes),
    ]
    return _facts_table("Limits of this machine, in this run", facts)


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
    table.add_row("mismatching blocks", _alarm(report.mismatches))
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


def _ratio_facts(block: float, token: float, any_hit: float) -> list[tuple[str, str]]:
    return [
        ("block hit ratio", f"{block:.4f}"),
        ("token hit ratio", f"{token:.4f}"),
        ("requests with any hit", f"{any_hit:.4f}"),
    ]


def _facts_table(title: str, facts: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in facts:
        table.add_row(name, value)
    return table


def _alarm(count: int) -> str:
    return f"[bold red]{count:,}[/]" if count else "0"
