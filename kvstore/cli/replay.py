"""``kvstore replay``: a trace through the index alone, or through a daemon and clients."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvstore.bench import workload as work
from kvstore.bench.generate import ConversationOptions
from kvstore.bench.pictures import draw_hit_ratio
from kvstore.bench.replay import ReplayOptions, ReplayResult, replay
from kvstore.bench.replay_tables import replay_tables, simulation_tables
from kvstore.bench.report import prepare, print_tables, progress_bar, save
from kvstore.bench.simulate import HitCounts
from kvstore.bench.simulate import simulate as simulate_hits
from kvstore.bench.simulation_report import SimulationReport, run_simulation, simulation_steps
from kvstore.bench.workload import Workload
from kvstore.cli.daemon_process import DaemonProcess, own_process
from kvstore.cli.nvme_place import nvme_directory, room_for
from kvstore.cli.params import SIZE, TIERS, json_option, output_option
from kvstore.cli.tenant_sharing import sharing_arguments, tenant_sharing_options
from kvstore.client import Client
from kvstore.config import DEFAULT_POLICY, WRITE_POLICIES
from kvstore.errors import BadInputError, IntegrityError
from kvstore.prefix_index.policies import POLICIES

DEFAULT_NVME_PERCENT = 25.0
TIER_OPTIONS = ("nvme_percent", "nvme_blocks", "hbm_percent", "hbm_blocks")


@click.command("replay", short_help="Replay a trace, or generated conversations; compare every byte.")
@click.argument("trace", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--simulate", is_flag=True, help="Index and policy only: no daemon, no bytes.")
@click.option(
    "--policy",
    type=click.Choice(sorted(POLICIES)),
    help=f"Eviction policy.  [default: {DEFAULT_POLICY}; lru with --kill-at]",
)
@click.option(
    "--dram-percent",
    "--capacity-percent",
    "capacity_percent",
    type=float,
    help="Capacity of DRAM in % of the trace's unique blocks.  [default: 5]",
)
@click.option("--dram-blocks", "--capacity-blocks", "capacity_blocks", type=int, help="Capacity of DRAM in blocks.")
@click.option("--nvme-percent", type=float, help="An NVMe tier below DRAM; its capacity in % of the unique blocks.")
@click.option("--nvme-blocks", type=int, help="The same in blocks.")
@click.option("--hbm-percent", type=float, help="Copies in HBM above DRAM; their room in % of the unique blocks.")
@click.option("--hbm-blocks", type=int, help="The same in blocks.")
@click.option(
    "--hbm-device", default="simulated", show_default=True, help="Device of that tier: cuda:0, or simulated in memory."
)
@click.option(
    "--tiers",
    type=TIERS,
    help="Which tiers there are, as in hbm,dram,nvme; of those not given otherwise HBM has room for 1 % of the unique "
    "blocks (1 MiB at least), NVMe for 25.",
)
@click.option(
    "--nvme-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the NVMe tier, kept.  [default: a new one in --output or here, removed at the end]",
)
@click.option(
    "--write-policy",
    type=click.Choice(WRITE_POLICIES),
    default="through",
    show_default=True,
    help="When blocks are written to NVMe.",
)
@click.option(
    "--durable-every",
    type=int,
    help="A client waits for durability after so many requests; 0 = never.  [default: 16 with NVMe]",
)
@click.option(
    "--kill-at",
    type=float,
    help="SIGKILL the daemon at this share of the requests, start it again, and look for what must be durable.",
)
@click.option("--compare", is_flag=True, help="Simulate the same tiers, too, and show both.")
@click.option("--block-bytes", type=SIZE, default="64KiB", show_default=True, help="Bytes of KV per block.")
@click.option("--block-tokens", type=click.IntRange(1), help="Tokens per block.  [default: the trace's, else 512]")
@click.option(
    "--attention-doubling-tokens",
    type=float,
    default=0.0,
    help="Position at which attention costs the model as much as all the rest of a token; 0 = not told.",
)
@click.option("--clients", type=int, default=1, show_default=True, help="Concurrent client processes.")
@click.option(
    "--tenants",
    type=int,
    default=1,
    show_default=True,
    help="Tenants t1, t2, ... that share the daemon; conversations are dealt to them.",
)
@tenant_sharing_options
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
    nvme_dir: Path | None,
    compare: bool,
    seed: int,
    block_tokens: int | None,
    policy: str | None,
    tiers: tuple[str, ...] | None,
    **rest: Any,
) -> None:
    """Replay TRACE (Mooncake or Alibaba JSON lines), or generated conversations if none is named.

    Without --simulate a daemon and clients really store and read every block, and each byte read is compared
    with what it must be. Exit code 3 if any differs, or if a block is lost that was durable. For models with
    sliding-window or state layers see `kvstore bench hybrid`.
    """
    conversations = ConversationOptions(seed=seed, **({"block_tokens": block_tokens} if block_tokens else {}))
    sharing = sharing_arguments(rest, rest["tenants"])
    own = ("capacity_percent", "capacity_blocks", *TIER_OPTIONS, "hbm", "kill_at")
    if tiers is not None:
        rest = with_tiers(rest, tiers)
    if connect is not None and (simulate or nvme_dir or any(rest.get(name) for name in own)):
        raise BadInputError(
            "--connect uses a daemon as it is: leave out --simulate, --kill-at and the tiers, or --connect"
        )
    if simulate and (rest["clients"] != 1 or rest["tenants"] != 1 or rest["kill_at"]):
        raise BadInputError("--simulate has no clients and no daemon: leave out --clients, --tenants and --kill-at")
    if rest["tenants"] != 1 and compare:
        raise BadInputError("--compare simulates one tenant: leave out --tenants, or --compare")
    if sharing and connect is not None:
        raise BadInputError(f"--connect uses a daemon as it is: leave out {sharing[0]}")
    if output is not None:
        prepare(output)
    options = ReplayOptions(
        trace=trace, conversations=conversations, seed=seed, block_tokens=block_tokens, policy=policy or "", **rest
    )
    if nvme_dir is not None and not options.has_nvme:
        raise BadInputError("--nvme-dir is for an NVMe tier: give its --nvme-percent or --nvme-blocks, too")
    workload = options.load()
    if options.limit is not None and workload.n_requests < options.limit:
        click.echo(
            f"{workload.name} has {workload.n_requests:,} requests, fewer than --limit {options.limit:,}", err=True
        )
    if simulate:
        report = simulated(workload, options)
        show_simulation(workload, report, output, as_json, picture=not no_picture)
    else:
        result = replayed(workload, options, connect, nvme_dir, output, sharing)
        if compare:
            result = replace(result, simulated=compared(workload, options, result))
        # The curve of the picture is of one tenant.
        show_replay(workload, options, result, output, as_json, picture=not no_picture and options.tenants == 1)


def with_tiers(given: dict[str, Any], tiers: tuple[str, ...]) -> dict[str, Any]:
    """Options with room for each of these tiers. Raises BadInputError for room in another one."""
    defaults = {"hbm": ("hbm", True), "nvme": ("nvme_percent", DEFAULT_NVME_PERCENT)}
    options = dict(given)
    for tier, (name, value) in defaults.items():
        has_room = any(given[f"{tier}_{unit}"] is not None for unit in ("percent", "blocks"))
        if has_room and tier not in tiers:
            raise BadInputError(f"--tiers leaves {tier} out, and --{tier}-percent or --{tier}-blocks give it room")
        if tier in tiers and not has_room:
            options[name] = value
    return options


def simulated(workload: Workload, options: ReplayOptions) -> SimulationReport:
    """Simulate with a progress bar."""
    with progress_bar("simulating", simulation_steps(workload)) as progress:
        return run_simulation(workload, options, progress=progress)


def compared(workload: Workload, options: ReplayOptions, result: ReplayResult) -> HitCounts:
    """Tiers of the same capacities on the index alone."""
    with progress_bar("simulating", workload.n_requests) as progress:
        return simulate_hits(
            workload,
            options.policy,
            result.capacity_blocks,
            nvme_blocks=result.nvme_capacity_blocks,
            hbm_blocks=result.hbm_capacity_blocks,
            write_policy=options.write_policy,
            attention_doubling_tokens=options.attention_doubling_tokens,
            progress=progress,
        )


def replayed(
    workload: Workload,
    options: ReplayOptions,
    connect: Path | None,
    nvme_dir: Path | None = None,
    near: Path | None = None,
    sharing: Sequence[str] = (),
) -> ReplayResult:
    """Replay through the daemon at ``connect``, or one started for it with just the capacities asked for.

    Its NVMe tier lies in ``nvme_dir``, or in a temporary directory in ``near``.
    """

    def through(socket_path: Path, daemon: DaemonProcess | None = None) -> ReplayResult:
        with progress_bar("replaying", workload.n_requests) as progress:
            return replay(workload, options, str(socket_path), progress, daemon)

    if connect is not None:
        _warn_of_older_blocks(connect, options.timeout_s)
        return through(connect)
    arguments = ["--dram", str(options.dram_bytes(workload)), "--policy", options.policy, "--policy-clock", "client"]
    with contextlib.ExitStack() as stack:
        nvme_blocks = options.nvme_capacity(workload)
        if nvme_blocks is not None:
            n_bytes = room_for(nvme_blocks, work.namespace(workload, options.block_bytes, "replay"))
            place = stack.enter_context(nvme_directory(nvme_dir, near, n_bytes))
            arguments += ["--nvme-dir", str(place), "--nvme", str(n_bytes), "--write-policy", options.write_policy]
            if nvme_dir is None:
                arguments += ["--drain", "0"]
        if options.has_hbm:
            arguments += ["--hbm-device", options.hbm_device, "--hbm", str(options.hbm_bytes(workload))]
        daemon = stack.enter_context(own_process([*arguments, *sharing]))
        if nvme_dir is not None:
            _warn_of_older_blocks(daemon.socket_path, options.timeout_s)
        return through(daemon.socket_path, daemon)


def _warn_of_older_blocks(connect: Path, timeout_s: float) -> None:
    with Client(connect, timeout_s=timeout_s) as client:
        held = int(client.stats()["blocks"])
    if held:
        click.echo(f"the daemon holds {held:,} blocks already: hits may be older than this replay", err=True)


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
    if result.crash is not None and result.crash.lost:
        raise IntegrityError(
            f"{result.crash.lost} blocks were acknowledged durable and lost when the daemon was killed"
        )
