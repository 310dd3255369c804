"""``kvstore explain``: why a prompt is no hit, or not as far as it could be."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvstore.cli.params import DaemonPlace, json_option, place_options, timeout_option
from kvstore.cli.selecting import Selection, namespace_options, opened, tenant_option, the_namespace
from kvstore.cli.token_files import read_prompt
from kvstore.client.explaining import Explanation
from kvstore.types import Root


@click.command(short_help="Say why a prompt misses, and what to do.")
@click.argument("tokens", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--number", type=click.IntRange(0), default=0, show_default=True, help="Which prompt of the file.")
@click.option("--salt", default="", help="The prompt's cache salt.")
@click.option("--lora", default="", help="The prompt's LoRA identity.")
@place_options
@tenant_option
@namespace_options
@timeout_option
@json_option
def explain(
    tokens: Path,
    number: int,
    salt: str,
    lora: str,
    place: DaemonPlace,
    tenant: str,
    timeout_s: float,
    as_json: bool,
    **selected: Any,
) -> None:
    """Say how much of a prompt can be used now, and why no more: what became of the first block that is missing.

    TOKENS is a file: .jsonl (a list of token ids per line), .npy, or raw little-endian uint32. Asking changes nothing.
    The exit code is 0 whether the prompt is a hit or not: --json says which, as "reason".
    """
    ids = read_prompt(tokens, number)
    with place.client(tenant, timeout_s, name="kvstore explain") as client:
        handle = opened(client, the_namespace(client, Selection(**selected)))
        told = handle.explain(ids, root=Root(salt, lora))
    if as_json:
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
