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
from typing import Any

import click

from kvstore import __version__
from kvstore.cli.daemon_process import READY
from kvstore.cli.nvme_place import check_reachable, kept_in_memory
from kvstore.cli.settings import load_settings, setting_options
from kvstore.config import DaemonConfig, format_size
from kvstore.errors import KVStoreError
from kvstore.logs import about, set_up
from kvstore.server.daemon import Daemon
from kvstore.server.polling import new_loop

log = logging.getLogger("kvstore.server")


@click.command()
@setting_options
@click.option("--ready-fd", type=int, hidden=True, help="Write a line to this descriptor when clients are accepted.")
@click.option("--until-stdin-closes", is_flag=True, hidden=True, help="Stop when standard input is closed.")
def serve(file: Path | None, ready_fd: int | None, until_stdin_closes: bool, **options: Any) -> None:
    """Run the daemon until Ctrl-C or SIGTERM.

    Each option can also stand in a TOML file (`kvstore config --example` prints one) or in an environment variable;
    an option beats a variable, a variable beats the file.
    """
    settings = load_settings(file, options)
    set_up(settings.config.log)
    try:
        with settings.blamed():
            _run(settings.config, ready_fd, until_stdin_closes)
    except KVStoreError as error:
        if settings.config.log.format == "json":
            log.error("%s", error, extra=about("failed", error=type(error).__name__))
            error.logged = True
        raise


def _run(config: DaemonConfig, ready_fd: int | None, until_stdin_closes: bool) -> None:
    if config.nvme_dir is not None:
        check_reachable(config.nvme_dir)
    # A region, and three for each client.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
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
    _announce(daemon, config)
    if ready_fd is not None:
        os.write(ready_fd, READY)
        os.close(ready_fd)
    try:
        await stop.wait()
    finally:
        log.info("stopping: what waits to be written goes to NVMe", extra=about("stopping", drain_s=config.drain_s))
        in_order = await daemon.stop()
        log.info("stopped", extra=about("stopped", in_order=in_order))
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


def _announce(daemon: Daemon, config: DaemonConfig) -> None:
    """Say what is served: to people in a line of its own, whatever the level of the log; to machines in the log."""
    words = (
        f"kvstored {__version__}: {_dram_words(daemon, config)}, {_nvme_words(daemon, config)}"
        f"policy {config.policy}, serving {config.socket_path}"
    )
    kind = kept_in_memory(config.nvme_dir) if config.nvme_dir is not None else ""
    warning = f"{config.nvme_dir} is {kind}, memory: nothing there survives a reboot"
    if daemon.monitor.http is not None:
        words += f", metrics on port {daemon.monitor.http.port}"
    if config.log.format == "text":
        click.echo(words, err=True)
        if kind:
            click.echo(f"warning: {warning}", err=True)
        return
    log.info(
        "%s", words,
        extra=about(
            "serving", version=__version__, socket=str(config.socket_path), dram_bytes=config.dram_bytes,
            nvme_dir=str(config.nvme_dir or ""), nvme_bytes=config.nvme_bytes, policy=config.policy,
            taken_over_blocks=int(daemon.store.stats()[0]["taken_over_blocks"]),
            metrics=config.metrics.listen,
            metrics_port=daemon.monitor.http.port if daemon.monitor.http is not None else 0, grpc=config.grpc.listen,
        ),
    )  # fmt: skip
    if kind:
        log.warning("%s", warning, extra=about("nvme_in_memory", directory=str(config.nvme_dir), file_system=kind))


def _dram_words(daemon: Daemon, config: DaemonConfig) -> str:
    n_taken_over = int(daemon.store.stats()[0]["taken_over_blocks"])
    taken_over = f" ({n_taken_over:,} blocks taken over)" if config.holder_path is not None else ""
    hbm = f"{format_size(config.hbm.capacity_bytes)} HBM on {config.hbm.device}, " if config.hbm.device else ""
    return f"{hbm}{format_size(config.dram_bytes)} DRAM{taken_over}"


def _nvme_words(daemon: Daemon, config: DaemonConfig) -> str:
    if config.nvme_dir is None:
        return ""
    n_found = int(daemon.store.stats()[0]["recovered_blocks"])
    return f"{format_size(config.nvme_bytes)} NVMe in {config.nvme_dir} ({n_found:,} blocks found), "
