"""``kvstore pin`` and ``kvstore unpin``: prompts whose blocks stay, whatever the policy says."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import click

from kvstore.cli.asking import Asked, prompt_options
from kvstore.cli.params import DaemonPlace, DurationType, json_option, place_options, timeout_option
from kvstore.cli.selecting import opened, tenant_option, the_namespace
from kvstore.cli.token_files import read_prompt, read_prompts
from kvstore.client import Client, Pinned
from kvstore.config import format_size
from kvstore.errors import BadInputError

LONGEST_S = 1e9
"""More than any daemon grants: it gives the longest life it has."""
ANSWER_S = 1.0
"""So much of what was granted may be over when the answer is here."""


@click.command(short_help="Keep what is stored of prompts from being evicted.")
@click.option("--ttl", "ttl_s", type=DurationType(above_0=True), help="For so long: 30s, 5m, 2h.  [default: the most]")
@click.option("--most", type=click.IntRange(1), default=256, show_default=True, help="Prompts of the file.")
@click.option("--number", type=click.IntRange(0), help="Only this prompt of the file, counted from 0.")
@prompt_options
def pin(asked: Asked, ttl_s: float | None, most: int, number: int | None) -> None:
    """Keep what is stored of prompts from being evicted, until `kvstore unpin`, or as long as the daemon allows.

    TOKENS is a file: .jsonl (a list of token ids per line), .npy, or raw little-endian uint32. Each prompt of which
    anything is stored gets an id. How much and how long is bounded by the daemon's --pin-tenant, --pin-dram, --pin-max.

    Exit code 1 if nothing is stored of any of them.
    """
    if number is not None:
        prompts = [read_prompt(asked.tokens, number)]
    else:
        prompts = list(itertools.islice(read_prompts(asked.tokens), most))
    pinned: list[Pinned] = []
    with asked.place.client(asked.tenant, asked.timeout_s, name="kvstore pin") as client:
        handle = opened(client, the_namespace(client, asked.selection))
        try:
            pinned.extend(
                handle.pin(tokens, root=asked.root, ttl_s=ttl_s or LONGEST_S, keep=True) for tokens in prompts
            )
        except BadInputError as error:
            others = "; those before it are pinned" if pinned else ""
            raise BadInputError(f"prompt {len(pinned)}: {error}{others}") from None
        finally:
            _show(client, pinned, number or 0, ttl_s, as_json=asked.as_json)
    if not any(each.id for each in pinned):
        sys.exit(1)


@click.command(short_help="Let go of pins.")
@click.argument("ids", type=click.IntRange(1), nargs=-1)
@click.option("--all", "every", is_flag=True, help="All of the tenant's that `kvstore pin` made.")
@place_options
@tenant_option
@timeout_option
@json_option
def unpin(ids: tuple[int, ...], every: bool, place: DaemonPlace, tenant: str, timeout_s: float, as_json: bool) -> None:
    """Let go of pins by their IDs, as `kvstore pin` and `kvstore inspect claims` show them. Those of clients stay.

    Exit code 1 if there is none of those that were named.
    """
    if bool(ids) == every:
        raise BadInputError("give the ids of pins, or --all")
    with place.client(tenant, timeout_s, name="kvstore unpin") as client:
        if every:
            held = client.claims().claims
            ids = tuple(each.id for each in held if each.kind == "pin" and not each.session_ids)
        found = [each for each in ids if client.unpin(each)]
        if as_json:
            click.echo(json.dumps({"unpinned": found, "not_found": sorted(set(ids) - set(found)), **_quota(client)}))
        else:
            click.echo(f"{len(found)} of {len(ids)} pins let go of; {_in_words(client)}")
    if ids and not found:
        sys.exit(1)


def _show(client: Client, pinned: Sequence[Pinned], first: int, ttl_s: float | None, *, as_json: bool) -> None:
    """What came of prompts from number ``first`` on, for which ``ttl_s`` was asked."""
    if as_json:
        click.echo(json.dumps({"pins": [asdict(each) for each in pinned], **_quota(client)}))
        return
    for number, each in enumerate(pinned, first):
        what = f"pin {each.id}: {each.n_blocks:,} blocks for {each.ttl_s:,.0f} s" if each.id else "nothing is stored"
        click.echo(f"prompt {number}: {what}")
    if ttl_s is not None and any(each.id and each.ttl_s < ttl_s - ANSWER_S for each in pinned):
        click.echo(f"not for the {ttl_s:,.0f} s asked for: the daemon's pins.max (--pin-max) allows no more")
    click.echo(_in_words(client))


def _quota(client: Client) -> dict[str, int]:
    """What the tenant has pinned, and may."""
    for each in client.tenants():
        return {"n_pins": each.n_pins, "pinned_bytes": each.pinned_bytes, "pin_max_bytes": each.pin_max_bytes}
    return {"n_pins": 0, "pinned_bytes": 0, "pin_max_bytes": 0}


def _in_words(client: Client) -> str:
    quota = _quota(client)
    return (
        f"tenant {client.tenant} has {format_size(quota['pinned_bytes'])} pinned of the "
        f"{format_size(quota['pin_max_bytes'])} that it may, by {quota['n_pins']} pins"
    )
