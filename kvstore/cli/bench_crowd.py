"""``kvstore bench clients`` and ``kvstore bench overlap``: many engines at once, and what routers ask."""

from __future__ import annotations

from pathlib import Path

import click

from kvstore.bench import clients as many
from kvstore.bench import overlap as hints
from kvstore.bench.clients_report import clients_tables, draw_clients
from kvstore.bench.report import overlap_table, prepare
from kvstore.cli.daemon_process import own_daemon, own_process
from kvstore.cli.nvme_place import nvme_directory, room_for
from kvstore.cli.params import json_option, output_option
from kvstore.cli.showing import show
from kvstore.errors import IntegrityError

_DEFAULTS = many.ClientsOptions()


@click.command()
@click.option(
    "--clients", type=click.IntRange(1, 1000), default=_DEFAULTS.clients, show_default=True, help="Client processes."
)
@click.option("--blocks", type=click.IntRange(1), default=_DEFAULTS.blocks, show_default=True, help="In the index.")
@click.option("--seconds", type=float, default=_DEFAULTS.seconds, show_default=True, help="How long.")
@click.option(
    "--prompt-blocks",
    type=click.IntRange(1),
    default=_DEFAULTS.prompt_blocks,
    show_default=True,
    help="Blocks of a prompt; one has 16 tokens.",
)
@click.option("--policy", help="The daemon's eviction policy; hazard refits a model in a child process meanwhile.")
@output_option
@json_option
def clients(
    clients: int,
    blocks: int,
    seconds: float,
    prompt_blocks: int,
    policy: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Match, lease and release by many client processes on a warm index, beside a bare echo server.

    With a policy that learns, matches while it does are shown beside the others. Exit code 3 if a call is not answered
    as it should have been.
    """
    if output is not None:
        prepare(output)
    options = many.ClientsOptions(clients=clients, blocks=blocks, seconds=seconds, prompt_blocks=prompt_blocks)
    arguments = ["--dram", str(options.dram_bytes), *(["--policy", policy] if policy else [])]
    with own_process(arguments) as daemon:
        report = many.run(options, str(daemon.socket_path), daemon.pid, step=tell)
    plain = report.to_dict()
    show(plain, lambda: clients_tables(report), output, lambda path: draw_clients(path, report), as_json=as_json)
    if report.daemon.n_lost:
        raise IntegrityError(f"{report.daemon.n_lost} calls found something else than what is stored")


@click.command()
@click.option(
    "--pairs", type=click.IntRange(20), default=40, show_default=True, help="Pairs of bursts of calls per ratio."
)
@click.option("--loads", type=click.IntRange(40), default=150, show_default=True, help="Loads that are foretold.")
@click.option(
    "--nvme-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to keep blocks, in a new directory that is removed.  [default: in --output or here]",
)
@output_option
@json_option
def overlap(pairs: int, loads: int, nvme_dir: Path | None, output: Path | None, as_json: bool) -> None:
    """What routers ask: its cost beside a match, and how true the load times are that it tells."""
    if output is not None:
        prepare(output)
    options = hints.OverlapOptions(pairs=pairs, loads=loads)
    n_bytes = room_for(options.n_blocks, options.namespace)
    with nvme_directory(None, nvme_dir or output, n_bytes) as place:
        dram = ["--dram", str(options.dram_bytes)]
        arguments = [*dram, "--nvme-dir", str(place), "--nvme", str(n_bytes), "--drain", "0"]
        with own_daemon(arguments) as socket_path:
            figures = hints.run(options, socket_path, step=tell)
    show({"mode": "overlap", **figures}, lambda: [overlap_table(figures)], output, as_json=as_json)


def tell(what: str) -> None:
    """Say on standard error what is measured now."""
    click.echo(f"measuring {what}", err=True)
