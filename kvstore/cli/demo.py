"""``kvstore demo``: what ``make run`` does. A daemon, a short replay through it, then it serves."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from kvstore.bench.generate import ConversationOptions
from kvstore.bench.replay import ReplayOptions, replay
from kvstore.bench.replay_tables import replay_tables
from kvstore.bench.report import print_tables, progress_bar
from kvstore.cli.daemon_process import own_daemon
from kvstore.cli.params import SIZE, socket_option
from kvstore.errors import IntegrityError

REQUESTS = 200


@click.command(short_help="Start a daemon, replay conversations through it, serve on.")
@socket_option
@click.option("--dram", "dram_bytes", type=SIZE, default="1GiB", show_default=True, help="Capacity of the DRAM tier.")
@click.option(
    "--nvme-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="With an NVMe tier there (--nvme): what the demo stores is found again by the next one.",
)
@click.option("--nvme", "nvme_bytes", type=SIZE, default="0", show_default="none", help="Capacity of the NVMe tier.")
@click.option("--once", is_flag=True, help="Stop after the replay instead of serving on.")
def demo(socket_path: Path, dram_bytes: int, nvme_dir: Path | None, nvme_bytes: int, once: bool) -> None:
    """Start a daemon, replay generated conversations through it, then serve until Ctrl-C."""
    options = ReplayOptions(conversations=ConversationOptions(), limit=REQUESTS, capacity_blocks=dram_bytes >> 16)
    workload = options.load()
    arguments = ["--dram", str(dram_bytes), "--nvme", str(nvme_bytes)]
    if nvme_dir is not None:
        arguments += ["--nvme-dir", str(nvme_dir)]
    with own_daemon(arguments, socket_path):
        with progress_bar("replaying conversations", workload.n_requests) as progress:
            result = replay(workload, options, str(socket_path), progress)
        print_tables(replay_tables(result))
        click.echo(
            "Times and rates are of this replay: they include making and comparing every byte, one request at a time.\n"
            "How fast the store itself is, `kvstore bench bandwidth` says."
        )
        if result.mismatches:
            raise IntegrityError(f"{result.mismatches} blocks came back with other bytes than were stored")
        if once:
            return
        click.echo(
            f"\nThe daemon serves on {socket_path}. In another terminal:\n"
            f"  {own_script()} status --socket {socket_path}\n"
            f"or from Python:\n"
            f"  from kvstore import Client\n"
            f"  client = Client({str(socket_path)!r})\n"
            f"Ctrl-C stops it."
        )
        try:
            signal.pause()
        except KeyboardInterrupt:
            click.echo("\nstopping", err=True)


def own_script() -> Path:
    """How to call this very ``kvstore`` from a shell that may not have it on its PATH."""
    script = Path(sys.executable).with_name("kvstore")
    if not script.exists():
        return Path("kvstore")
    return script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
