"""``kvstore bench``: measurements against this machine's own limits."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from kvstore.bench import embedded_latency, grpc_stream, index_speed, metrics_cost
from kvstore.bench.bandwidth import BandwidthOptions, BandwidthReport, report_dict, run_bandwidth
from kvstore.bench.bandwidth_nvme import NvmeOptions, NvmeReport, run_nvme
from kvstore.bench.generate import ConversationOptions
from kvstore.bench.hybrid import MODELS, HybridOptions, run_hybrid
from kvstore.bench.peers.catalog import KEPT, Tier, chosen
from kvstore.bench.peers.environments import default_folder, ready
from kvstore.bench.peers.figures import PeersReport
from kvstore.bench.peers.picture import draw_peers
from kvstore.bench.peers.run import PeersOptions, Tools, run_peers
from kvstore.bench.peers.tables import peers_tables
from kvstore.bench.pictures import draw_bandwidth, draw_grpc, draw_index, draw_metrics
from kvstore.bench.report import (
    bandwidth_tables,
    embedded_table,
    grpc_tables,
    hybrid_table,
    index_table,
    metrics_table,
    prepare,
    print_tables,
    progress_bar,
    save,
)
from kvstore.cli.bench_codecs import codecs
from kvstore.cli.bench_crowd import clients, overlap, tell
from kvstore.cli.bench_gpu import gpu
from kvstore.cli.daemon_process import free_port, own_daemon, own_process
from kvstore.cli.nvme_place import nvme_directory, room_for
from kvstore.cli.params import SIZE, json_option, output_option
from kvstore.cli.showing import show
from kvstore.errors import IntegrityError
from kvstore.tiers.nvme.direct import DEPTH


@click.group(short_help="Measure the store beside this machine's own limits.")
def bench() -> None:
    """Measure this machine's limits and how near the store comes to them."""


@bench.command()
@click.option(
    "--pairs",
    type=int,
    default=BandwidthOptions().pairs,
    show_default=True,
    help="Pairs of measurements per row.",
)
@click.option(
    "--dram",
    "dram_bytes",
    type=SIZE,
    default="2GiB",
    show_default=True,
    help="DRAM tier of the daemon that is measured.",
)
@click.option(
    "--block-sizes",
    default="64KiB,256KiB,1MiB,4MiB",
    show_default=True,
    help="Sizes of blocks, separated by commas.",
)
@click.option(
    "--tier", type=click.Choice(["all", "dram", "nvme"]), default="all", show_default=True, help="Which to measure."
)
@click.option(
    "--nvme-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to measure NVMe, in a new directory that is removed.  [default: in --output or here]",
)
@click.option(
    "--nvme-pairs",
    type=click.IntRange(1),
    default=NvmeOptions().pairs,
    show_default=True,
    help="Pairs of measurements per NVMe row.",
)
@click.option(
    "--nvme-batch",
    "nvme_batch_bytes",
    type=SIZE,
    default="256MiB",
    show_default=True,
    help="Bytes per measurement on NVMe; its DRAM holds four times as much, the data set ten times.",
)
@click.option(
    "--nvme-file",
    "nvme_file_bytes",
    type=SIZE,
    default="4GiB",
    show_default=True,
    help="Size of the file on which the disk's own limit is measured; less where there is no room.",
)
@output_option
@json_option
def bandwidth(
    pairs: int,
    dram_bytes: int,
    block_sizes: str,
    tier: str,
    nvme_dir: Path | None,
    nvme_pairs: int,
    nvme_batch_bytes: int,
    nvme_file_bytes: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """put, get_into, lease and match, paired with numpy copies and socket echoes in the same run.

    On NVMe durable writes and cold reads, paired with fio (or, without it, a plain loop of direct I/O).
    """
    sizes = tuple(SIZE.convert(size, None, None) for size in block_sizes.split(","))
    if output is not None:
        prepare(output)
    options = BandwidthOptions(pairs=pairs, dram_bytes=dram_bytes, block_sizes=sizes)
    nvme_options = NvmeOptions(
        block_sizes=sizes, pairs=nvme_pairs, batch_bytes=nvme_batch_bytes, file_bytes=nvme_file_bytes, depth=DEPTH
    )
    report: BandwidthReport | None = None
    if tier != "nvme":
        with own_daemon(["--dram", str(dram_bytes)]) as socket_path:
            report = run_bandwidth(options, str(socket_path), step=tell)
    nvme = None if tier == "dram" else measured_nvme(nvme_options, nvme_dir or output)
    plain = report_dict(report, nvme)
    show(
        plain,
        lambda: bandwidth_tables(report, nvme),
        output,
        lambda path: draw_bandwidth(path, report, nvme),
        as_json=as_json,
    )
    if plain["mismatches"]:
        raise IntegrityError(f"{plain['mismatches']} blocks came back with other bytes than were stored")


def measured_nvme(options: NvmeOptions, near: Path | None) -> NvmeReport:
    """Measure NVMe in a directory of its own in ``near`` (or here)."""

    @contextlib.contextmanager
    def start(block_bytes: int) -> Iterator[Path]:
        n_bytes = room_for(options.data_set_blocks(block_bytes), options.namespace(block_bytes))
        with nvme_directory(None, place, n_bytes) as directory:
            arguments = [
                "--dram", str(options.dram_bytes), "--nvme-dir", str(directory), "--nvme", str(n_bytes),
                "--write-behind", str(options.write_behind_bytes), "--drain", "0",
            ]  # fmt: skip
            with own_daemon(arguments) as socket_path:
                yield socket_path

    with nvme_directory(None, near, 0) as place:
        return run_nvme(options, start, place, step=tell)


@bench.command()
@click.option(
    "--pairs", type=click.IntRange(20), default=40, show_default=True, help="Pairs of measurements per ratio."
)
@click.option(
    "--blocks", type=click.IntRange(20_000), default=1_000_000, show_default=True, help="Blocks in the large tree."
)
@output_option
@json_option
def index(pairs: int, blocks: int, output: Path | None, as_json: bool) -> None:
    """Matching in the prefix index, paired with one numpy comparison of the tokens; memory of a block."""
    if output is not None:
        prepare(output)
    figures = index_speed.run(pairs, blocks, step=tell)
    show(
        {"mode": "index", **figures},
        lambda: [index_table(figures)],
        output,
        lambda path: draw_index(path, figures),
        as_json=as_json,
    )


@bench.command()
@click.option(
    "--pairs", type=click.IntRange(20), default=21, show_default=True, help="Pairs of measurements per ratio."
)
@output_option
@json_option
def metrics(pairs: int, output: Path | None, as_json: bool) -> None:
    """Reads and leases of a daemon that serves metrics, paired with one that does not."""
    if output is not None:
        prepare(output)
    options = metrics_cost.MetricsCostOptions(pairs=pairs)
    port = free_port()
    plain = ["--dram", str(options.dram_bytes)]
    with own_daemon([*plain, "--metrics-listen", f"127.0.0.1:{port}"]) as on, own_daemon(plain) as off:
        figures = metrics_cost.run(options, str(on), str(off), port, step=tell)
    show(
        {"mode": "metrics", **figures},
        lambda: [metrics_table(figures)],
        output,
        lambda path: draw_metrics(path, figures),
        as_json=as_json,
    )


@bench.command()
@click.option("--pairs", type=click.IntRange(20), default=40, show_default=True, help="Pairs of bursts per ratio.")
@json_option
def embedded(pairs: int, as_json: bool) -> None:
    """Calls of a store inside the program, paired with those of a daemon behind its Unix socket."""
    options = embedded_latency.EmbeddedBenchOptions(pairs=pairs)
    with own_daemon(["--dram", str(embedded_latency.DRAM_BYTES)]) as socket_path:
        figures = embedded_latency.run(options, socket_path)
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        print_tables([embedded_table(figures)])


@bench.command("grpc")
@click.option(
    "--pairs", type=click.IntRange(20), default=21, show_default=True, help="Pairs of measurements per ratio."
)
@click.option(
    "--batch", "batch_bytes", type=SIZE, default="64MiB", show_default=True, help="Bytes that one measurement moves."
)
@click.option("--clients", type=click.IntRange(1), default=200, show_default=True, help="Clients at the same time.")
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Rounds of calls of each.")
@output_option
@json_option
def grpc_command(pairs: int, batch_bytes: int, clients: int, rounds: int, output: Path | None, as_json: bool) -> None:
    """Blocks over gRPC, paired with bare gRPC streams of the same chunks; many clients at once.

    Exit code 3 if a call of many clients is lost or wrong bytes come back.
    """
    if output is not None:
        prepare(output)
    options = grpc_stream.GrpcBenchOptions(pairs=pairs, batch_bytes=batch_bytes, clients=clients, rounds=rounds)
    with tempfile.TemporaryDirectory(prefix="kvstore-grpc-") as folder:
        listen = f"unix:{Path(folder) / 'grpc.sock'}"
        with own_daemon(["--dram", str(options.dram_bytes), "--grpc-listen", listen]):
            report = grpc_stream.run(options, f"grpc+{listen}", step=tell)
    show(report.to_dict(), lambda: grpc_tables(report), output, lambda path: draw_grpc(path, report), as_json=as_json)
    if report.crowd.n_lost:
        raise IntegrityError(f"{report.crowd.n_lost} of {report.crowd.n_calls} calls were lost")


@bench.command()
@click.option(
    "--model", type=click.Choice(sorted(MODELS)), default="gemma3", show_default=True, help="Whose groups of layers."
)
@click.option("--sessions", type=click.IntRange(1), default=100, show_default=True, help="Conversations to generate.")
@click.option("--block-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens per block.")
@click.option("--dram-percent", type=float, default=5.0, show_default=True, help="Room for so much of all blocks.")
@click.option("--nvme-percent", type=float, help="An NVMe tier below, with room for so much of all blocks.")
@click.option(
    "--checkpoint-blocks",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    help="The engine can also go on behind every so many blocks; 0 = only where a prompt ends.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the requests and of block bytes.")
@click.option("--simulate", is_flag=True, help="Index and policy only: no daemon, no bytes.")
@output_option
@json_option
def hybrid(
    model: str,
    sessions: int,
    block_tokens: int,
    dram_percent: float,
    nvme_percent: float | None,
    checkpoint_blocks: int,
    seed: int,
    simulate: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Conversations with a hybrid model: its groups stored each by itself, beside whole blocks in the same memory.

    Without --simulate a daemon and a client really store and read every group, and compare each byte. Exit code 3 if
    any differs.
    """
    if output is not None:
        prepare(output)
    conversations = ConversationOptions(sessions=sessions, block_tokens=block_tokens, seed=seed)
    options = HybridOptions(model, conversations, dram_percent, nvme_percent, checkpoint_blocks)
    workload = options.load()
    with contextlib.ExitStack() as stack:
        connect = None
        if not simulate:
            arguments = ["--dram", str(options.dram_bytes(workload)), "--policy-clock", "client"]
            if (nvme_blocks := options.nvme_blocks(workload)) is not None:
                n_bytes = room_for(nvme_blocks, options.namespace)
                place = stack.enter_context(nvme_directory(None, output, n_bytes))
                arguments += ["--nvme-dir", str(place), "--nvme", str(n_bytes), "--drain", "0"]
            connect = str(stack.enter_context(own_daemon(arguments)))
        steps = workload.n_requests * (2 if simulate else 3)
        progress = stack.enter_context(progress_bar("simulating" if simulate else "replaying", steps))
        report = run_hybrid(options, workload, progress, connect)
    show(report.to_dict(), lambda: [hybrid_table(report)], output, as_json=as_json)
    if report.mismatches:
        raise IntegrityError(f"{report.mismatches} blocks came back with other bytes than were stored")


@bench.command()
@click.option("--peers", help="Which, separated by commas, such as lmcache,redis.  [default: all]")
@click.option(
    "--block-sizes",
    default="64KiB,256KiB,1MiB,4MiB,16MiB",
    show_default=True,
    help="Sizes of blocks, separated by commas.",
)
@click.option(
    "--tier", type=click.Choice(["all", *KEPT]), default="all", show_default=True, help="Stores in memory, on disk."
)
@click.option(
    "--rounds", type=click.IntRange(3), default=PeersOptions().rounds, show_default=True, help="Turns of each system."
)
@click.option(
    "--batch", "batch_bytes", type=SIZE, default="32MiB", show_default=True, help="Bytes that one operation moves."
)
@click.option(
    "--environments",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the peers' environments are made, once.  [default: kvstore/peers in the user's cache]",
)
@click.option(
    "--disk-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to measure the disk, in a new directory that is removed.  [default: in --output or here]",
)
@output_option
@json_option
def peers(
    peers: str | None,
    block_sizes: str,
    tier: str,
    rounds: int,
    batch_bytes: int,
    environments: Path | None,
    disk_dir: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """This store beside LMCache, Mooncake, Redis and plain files: the same blocks, in turn, in one run.

    Each peer is installed into an environment of its own when it is first needed, from PyPI and Debian's archive. One
    that can't be had is left out, with the reason. Exit code 3 if this store brings wrong bytes; where a peer does, it
    is shown. The report in --output is written after each block size, so that an interrupted run leaves what it has.
    """
    tiers: tuple[Tier, ...] = tuple(each for each in KEPT if tier in ("all", each))
    sizes = tuple(SIZE.convert(size, None, None) for size in block_sizes.split(","))
    options = PeersOptions(sizes, rounds, batch_bytes)
    entries = chosen(peers, tiers)
    if output is not None:
        prepare(output)

    def keep(report: PeersReport) -> None:
        if output is not None:
            save(output, report.to_dict(), None)

    with nvme_directory(None, disk_dir or output, 0) as place:
        folder = environments or default_folder()
        tools = Tools(own_process, room_for, lambda environment: ready(environment, folder), place, tell, keep)
        report = run_peers(options, entries, tools)
    plain = report.to_dict()
    show(plain, lambda: peers_tables(report), output, lambda path: draw_peers(path, report), as_json=as_json)
    if any(entry.role == "own" and report.wrong_blocks.get(entry.name) for entry in entries):
        raise IntegrityError(f"blocks came back with other bytes than were stored: {report.wrong_blocks}")


bench.add_command(clients)
bench.add_command(overlap)
bench.add_command(gpu)
bench.add_command(codecs)
