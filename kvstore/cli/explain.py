"""``kvstore explain``: why a prompt is no hit, or not as far as it could be."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from kvstore.cli.asking import Asked, number_option, prompt_options
from kvstore.cli.token_files import read_prompt
from kvstore.client.explaining import Explanation


@click.command(short_help="Say why a prompt misses, and what to do.")
@number_option
@click.option("--other-salts", is_flag=True, help="Look below other salts, too; on the daemon's host only.")
@prompt_options
def explain(asked: Asked, number: int, other_salts: bool) -> None:
    """Say how much of a prompt can be used now, and why no more: what became of the first block that is missing.

    TOKENS is a file: .jsonl (a list of token ids per line), .npy, or raw little-endian uint32. Asking changes nothing.
    The exit code is 0 whether the prompt is a hit or not: --json says which, as "reason".
    """
    ids = read_prompt(asked.tokens, number)
    with asked.handle("kvstore explain") as handle:
        told = handle.explain(ids, root=asked.root, other_salts=other_salts)
    if asked.as_json:
        click.echo(json.dumps(explanation_dict(told), indent=2))
        return
    for line in told.lines:
        click.echo(line)
    for line in told.advice:
        click.echo(f"what to do: {line}")


def explanation_dict(told: Explanation) -> dict[str, Any]:
    """An explanation as JSON has it."""
    plain = asdict(told)
    for space in plain["namespaces"]:
        space["digest"] = space["digest"].hex()
    return plain
