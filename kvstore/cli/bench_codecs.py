"""``kvstore bench codecs``: sizes and speed of encoded KV beside a copy."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.table import Table

from kvstore.bench.codecs import CodecBenchOptions, missed, run
from kvstore.bench.report import print_tables
from kvstore.cli.bench_crowd import tell
from kvstore.cli.params import SIZE, json_option
from kvstore.compression.codec import CodecId
from kvstore.compression.quantize import NUMPY, backends

_NAMES = tuple(number.name.lower().replace("_", "-") for number in CodecId if number is not CodecId.RAW)


@click.command()
@click.option(
    "--codec", "names", multiple=True, type=click.Choice(_NAMES), help="Only this; may be given several times."
)
@click.option(
    "--backend",
    "chosen",
    multiple=True,
    type=click.Choice(backends()),
    help="What does the arithmetic; may be given several times.  [default: numpy and the fastest]",
)
@click.option("--pairs", type=click.IntRange(1), default=11, show_default=True, help="Pairs of measurements per ratio.")
@click.option("--batch", "batch_bytes", type=SIZE, default="64MiB", show_default=True, help="Raw bytes at a time.")
@click.option("--heads", type=click.IntRange(1), default=8, show_default=True, help="KV heads.")
@click.option("--head-dim", "dim", type=click.IntRange(16), default=128, show_default=True, help="Elements of a head.")
@click.option("--threads", type=click.IntRange(1, 16), default=1, show_default=True, help="Threads of codec and copy.")
@json_option
def codecs(
    names: tuple[str, ...],
    chosen: tuple[str, ...],
    pairs: int,
    batch_bytes: int,
    heads: int,
    dim: int,
    threads: int,
    as_json: bool,
) -> None:
    """Encode and decode KV, paired with a copy of the same raw bytes: how small it gets, and how fast."""
    numbers = tuple(CodecId[name.upper().replace("-", "_")] for name in names or _NAMES)
    options = CodecBenchOptions(
        pairs=pairs,
        batch_bytes=batch_bytes,
        heads=heads,
        dim=dim,
        threads=threads,
        codecs=numbers,
        backends=chosen or tuple(dict.fromkeys((NUMPY, backends()[-1]))),
    )
    rows = run(options, tell)
    below = missed(rows)
    if as_json:
        click.echo(json.dumps({"codecs": rows, "missed": below}, indent=2))
        return
    print_tables([_table(rows)])
    for line in below:
        click.echo(f"below its limit: {line}", err=True)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "codec",
        "by",
        "ratio",
        "encode",
        "of a copy",
        "decode",
        "of a copy",
        title="GB/s of raw bfloat16, and beside a copy",
    )
    for row in rows:
        speeds = [
            text
            for what in ("encode", "decode")
            for text in (f"{row[f'{what}_gb_per_s']:.2f}", f"{row[f'{what}_of_copy']:.2f} x")
        ]
        table.add_row(row["codec"].lower().replace("_", "-"), row["backend"], f"{row['ratio']:.2f}", *speeds)
    return table
