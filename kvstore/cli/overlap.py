"""``kvstore overlap``: what a router would be told of prompts."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from kvstore.bench.report import print_tables
from kvstore.cli.asking import Asked, prompt_options
from kvstore.cli.token_files import Tokens, read_prompts
from kvstore.client import Overlap
from kvstore.errors import UnavailableError


@click.command(short_help="Show what a router is told of prompts.")
@click.option("--most", type=click.IntRange(1), default=256, show_default=True, help="Prompts of the file.")
@prompt_options
def overlap(asked: Asked, most: int) -> None:
    """Show how much of prompts is stored in which tier, and how long loading it would take: what a router is told.

    TOKENS is a file: .jsonl (a list of token ids per line), .npy, or raw little-endian uint32.
    """
    prompts = list(itertools.islice(read_prompts(asked.tokens), most))
    with asked.handle() as handle:
        found = handle.overlaps(prompts, root=asked.root)
    for each in found:
        if each.reason:
            raise UnavailableError(each.reason)
    if asked.as_json:
        plain = [_plain(len(prompt), each) for prompt, each in zip(prompts, found, strict=True)]
        click.echo(json.dumps(plain, indent=2))
    else:
        print_tables([_table(prompts, found)])


def _plain(n_prompt_tokens: int, found: Overlap) -> dict[str, Any]:
    """One prompt as JSON has it. ``load_s`` is null while the disk is stuck: JSON has no infinity."""
    numbers = {name: value for name, value in asdict(found).items() if name != "reason"}
    return {"n_prompt_tokens": n_prompt_tokens, **numbers, "load_s": found.load_s if found.load_s < math.inf else None}


def _table(prompts: list[Tokens], found: list[Overlap]) -> Table:
    names = ("prompt", "tokens", "stored", "in DRAM", "on NVMe only", "on their way", "in HBM too", "load", "off by")
    table = Table(*names, title="Tokens by tier; load: expected time until all is copied")
    for column in table.columns:
        column.justify = "right"
    for number, (prompt, each) in enumerate(zip(prompts, found, strict=True)):
        counts = (
            len(prompt), each.n_tokens, each.n_dram_tokens, each.n_nvme_tokens, each.n_loading_tokens,
            each.n_hbm_tokens,
        )  # fmt: skip
        shown = (f"{count:,}" for count in counts)
        table.add_row(str(number), *shown, f"{each.load_s * 1e3:,.2f} ms", f"{each.load_error:.2f} x")
    return table
