"""``kvstore bench``: measurements against this machine's own limits."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvstore.bench import index_speed
from kvstore.bench.bandwidth import BandwidthOptions, run_bandwidth
from kvstore.bench.pictures import draw_bandwidth, draw_index
from kvstore.bench.report import bandwidth_tables, index_table, prepare, print_tables, save
from kvstore.cli.daemon_process import own_daemon
from kvstore.cli.params import SIZE, json_option, output_option
from kvstore.errors import IntegrityError


@click.group()
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
@output_option
@json_option
def bandwidth(pairs: int, dram_bytes: int, block_sizes: str, output: Path | None, as_json: bool) -> None:
    """put, get_into, lease and match, paired with numpy copies and socket echoes in the same run."""
    sizes = tuple(SIZE.convert(size, None, None) for size in block_sizes.split(","))
    if output is not None:
        prepare(output)
    options = BandwidthOptions(pairs=pairs, dram_bytes=dram_bytes, block_sizes=sizes)
    with own_daemon(["--dram", str(dram_bytes)]) as socket_path:
        report = run_bandwidth(options, str(socket_path), step=_tell)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        print_tables(bandwidth_tables(report))
    if output is not None:
        for line in save(output, report.to_dict(), lambda path: draw_bandwidth(path, report)):
            click.echo(line, err=True)
    if report.mismatches:
        raise IntegrityError(f"{report.mismatches} blocks came back with other bytes than were stored")


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
    figures = index_speed.run(pairs, blocks, step=_tell)
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        print_tables([index_table(figures)])
    if output is not None:
        for line in save(output, {"mode": "index", **figures}, lambda path: draw_index(path, figures)):
            click.echo(line, err=True)


def _tell(what: str) -> None:
    click.echo(f"measuring {what}", err=True)
