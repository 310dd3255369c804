"""``kvstore replay``: a trace through the index alone, or through a daemon and clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvstore.bench.generate import ConversationOptions
from kvstore.bench.pictures import draw_hit_ratio
from kvstore.bench.replay import ReplayOptions, ReplayResult, replay
from kvstore.bench.report import prepare, print_tables, progress_bar, replay_tables, save, simulation_tables
from kvstore.bench.simulation_report import SimulationReport, run_simulation, simulation_steps
from kvstore.bench.workload import Workload
from kvstore.cli.daemon_process import own_daemon
from kvstore.cli.params import SIZE, json_option, output_option
from kvstore.client import Client
from kvstore.errors import BadInputError, IntegrityError
from kvstore.prefix_index.policy import POLICIES


@click.command("replay")
@click.argument("trace", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--simulate", is_flag=True, help="Index and policy only: no daemon, no bytes.")
@click.option(
    "--policy", type=click.Choice(sorted(POLICIES)), default="lru", show_default=True, help="Eviction policy."
)
@click.option("--capacity-percent", type=float, help="Capacity in % of the trace's unique blocks.  [default: 5]")
@click.option("--capacity-blocks", type=int, help="Capacity in blocks.")
@click.option("--block-bytes", type=SIZE, default="64KiB", show_default=True, help="Bytes of KV per block.")
@click.option("--block-tokens", type=click.IntRange(1), help="Tokens per block.  [default: the trace's, else 512]")
@click.option("--clients", type=int, default=1, show_default=True, help="Concurrent client processes.")
@click.option("--limit", type=int, help="Only the first N requests.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of generated requests and of block bytes.")
@click.option(
    "--connect",
    type=click.Path(path_type=Path),
    help="Use the daemon at this socket instead of starting one.",
)
@click.option("--no-picture", is_flag=True, help="Draw no picture (its curve is simulated at seven capacities).")
@output_option
@json_option
def replay_command(
    trace: Path | None,
    simulate: bool,
    connect: Path | None,
    output: Path | None,
    as_json: bool,
    no_picture: bool,
    seed: int,
    block_tokens: int | None,
    **rest: Any,
) -> None:
    """Replay TRACE (Mooncake or Alibaba JSON lines), or generated conversations if none is named.

    Without --simulate a daemon and clients really store and read every block, and each byte read is compared
    with what it must be. Exit code 3 if any differs.
    """
    conversations = ConversationOptions(seed=seed, **({"block_tokens": block_tokens} if block_tokens else {}))
    if connect is not None and (simulate or rest["capacity_percent"] or rest["capacity_blocks"]):
        raise BadInputError("--connect uses a daemon as it is: leave out --simulate and the capacity, or --connect")
    if simulate and rest["clients"] != 1:
        raise BadInputError("--simulate has no clients: leave out --clients")
    if output is not None:
        prepare(output)
    options = ReplayOptions(trace=trace, conversations=conversations, seed=seed, block_tokens=block_tokens, **rest)
    workload = options.load()
    if simulate:
        report = simulated(workload, options)
        show_simulation(workload, report, output, as_json, picture=not no_picture)
    else:
        result = replayed(workload, options, connect)
        show_replay(workload, options, result, output, as_json, picture=not no_picture)


def simulated(workload: Workload, options: ReplayOptions) -> SimulationReport:
    """Simulate with a progress bar."""
    with progress_bar("simulating", simulation_steps(workload)) as progress:
        return run_simulation(workload, options, progress=progress)


def replayed(workload: Workload, options: ReplayOptions, connect: Path | None) -> ReplayResult:
    """Replay through the daemon at ``connect``, or one started for it with just the capacity asked for."""

    def through(socket_path: Path) -> ReplayResult:
        with progress_bar("replaying", workload.n_requests) as progress:
            return replay(workload, options, str(socket_path), progress)

    if connect is not None:
        with Client(connect, timeout_s=options.timeout_s) as client:
            held = int(client.stats()["blocks"])
        if held:
            click.echo(f"the daemon holds {held:,} blocks already: hits may be older than this replay", err=True)
        return through(connect)
    dram_bytes = options.dram_bytes(workload)
    arguments = ["--dram", str(dram_bytes), "--policy", options.policy, "--policy-clock", "client"]
    with own_daemon(arguments) as socket_path:
        return through(socket_path)


def show_simulation(
    workload: Workload, report: SimulationReport, output: Path | None, as_json: bool, *, picture: bool
) -> None:
    """Tables or JSON on standard output; files if asked for."""
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        print_tables(simulation_tables(report))
    if output is not None:
        plot = (lambda path: draw_hit_ratio(path, workload, report)) if picture else None
        for line in save(output, report.to_dict(), plot):
            click.echo(line, err=True)


def show_replay(
    workload: Workload,
    options: ReplayOptions,
    result: ReplayResult,
    output: Path | None,
    as_json: bool,
    *,
    picture: bool,
) -> None:
    """As ``show_simulation``; the picture puts the measured point on the simulated curve. Raises for mismatches."""
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        print_tables(replay_tables(result))
    if output is not None:
        plot = None
        if picture:
            report = simulated(workload, options)
            plot = lambda path: draw_hit_ratio(path, workload, report, result)  # noqa: E731 - as above
        for line in save(output, result.to_dict(), plot):
            click.echo(line, err=True)
    if result.mismatches:
        raise IntegrityError(f"{result.mismatches} blocks came back with other bytes than were stored")
