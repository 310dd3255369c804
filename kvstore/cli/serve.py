"""``kvstore serve``: the daemon as a process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from pathlib import Path

import click

from kvstore import __version__
from kvstore.cli.daemon_process import READY
from kvstore.cli.nvme_place import check_reachable, kept_in_memory
from kvstore.cli.params import SIZE, nvme_options, socket_option
from kvstore.config import DaemonConfig, format_size
from kvstore.prefix_index.policy import POLICIES
from kvstore.server.daemon import Daemon
from kvstore.server.polling import new_loop


@click.command()
@socket_option
@click.option("--dram", "dram_bytes", type=SIZE, default="1GiB", show_default=True, help="Capacity of the DRAM tier.")
@click.option(
    "--region-bytes",
    type=SIZE,
    default="0",
    show_default="fits the tier",
    help="Size of a shared memory region.",
)
@click.option("--prefault/--no-prefault", default=True, show_default=True, help="Fill the tier's pages ahead of use.")
@click.option(
    "--policy", type=click.Choice(sorted(POLICIES)), default="lru", show_default=True, help="Eviction policy."
)
@click.option(
    "--policy-clock",
    type=click.Choice(["system", "client"]),
    default="system",
    show_default=True,
    help="Where policies take the time from; client = the times that requests carry (trace replays).",
)
@click.option(
    "--lease-default",
    "lease_s_default",
    type=float,
    default=30.0,
    show_default=True,
    help="Life of a lease in seconds, if the client asks for none.",
)
@click.option(
    "--lease-max",
    "lease_s_max",
    type=float,
    default=600.0,
    show_default=True,
    help="Longest life of a lease in seconds.",
)
@click.option(
    "--heartbeat",
    "heartbeat_s",
    type=float,
    default=10.0,
    show_default=True,
    help="Clients must be heard of this often, in seconds; three in a row may be missed.",
)
@click.option("--max-clients", type=int, default=1024, show_default=True, help="Most clients at a time.")
@click.option(
    "--poll-us",
    type=float,
    default=200.0,
    show_default=True,
    help="Stay awake so many microseconds between the requests of a burst; 0 = sleep at once.",
)
@nvme_options
@click.option(
    "--holder",
    "holder_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Unix socket of a small process, started if there is none, that keeps DRAM for a daemon started again.",
)
@click.option(
    "--holder-grace",
    "holder_grace_s",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds it keeps that, and lives, without a daemon.",
)
@click.option("--ready-fd", type=int, hidden=True, help="Write a line to this descriptor when clients are accepted.")
@click.option("--until-stdin-closes", is_flag=True, hidden=True, help="Stop when standard input is closed.")
def serve(ready_fd: int | None, until_stdin_closes: bool, **settings: object) -> None:
    """Run the daemon until Ctrl-C or SIGTERM."""
    config = DaemonConfig(**settings)  # type: ignore[arg-type]
    if config.nvme_dir is not None:
        check_reachable(config.nvme_dir)
    # A region, and three for each client.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    with asyncio.Runner(loop_factory=lambda: new_loop(config)) as runner:
        in_order = runner.run(_serve(config, ready_fd, until_stdin_closes))
    if not in_order:
        # The interpreter would wait for threads that are stuck in the disk.
        logging.shutdown()
        os._exit(0)


async def _serve(config: DaemonConfig, ready_fd: int | None, until_stdin_closes: bool) -> bool:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if until_stdin_closes:
        loop.add_reader(sys.stdin, stop.set)
    daemon = Daemon(config)
    daemon.start()
    _calm_the_collector()
    click.echo(
        f"kvstored {__version__}: {format_size(config.dram_bytes)} DRAM, {_nvme_words(daemon, config)}"
        f"policy {config.policy}, serving {config.socket_path}",
        err=True,
    )
    if config.nvme_dir is not None and (kind := kept_in_memory(config.nvme_dir)):
        click.echo(f"warning: {config.nvme_dir} is {kind}, memory: nothing there survives a reboot", err=True)
    if ready_fd is not None:
        os.write(ready_fd, READY)
        os.close(ready_fd)
    try:
        await stop.wait()
    finally:
        in_order = await daemon.stop()
    return in_order


def _calm_the_collector() -> None:
    """Keep the cycle collector from walking the whole index in the middle of a request.

    The index's nodes form cycles by the million, but eviction unlinks them, so reference counts free them:
    a full collection would find nothing, and takes most of a second at a million blocks. Young objects
    are collected as ever.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 1 << 30)


def _nvme_words(daemon: Daemon, config: DaemonConfig) -> str:
    if config.nvme_dir is None:
        return ""
    n_found = int(daemon.store.stats()[0]["recovered_blocks"])
    return f"{format_size(config.nvme_bytes)} NVMe in {config.nvme_dir} ({n_found:,} blocks found), "
