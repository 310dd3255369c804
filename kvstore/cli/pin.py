"""``kvstore pin`` and ``kvstore unpin``: prompts whose blocks stay, whatever the policy says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict

import click

from kvstore.cli.asking import Asked, prompt_options
from kvstore.cli.params import DaemonPlace, FiniteRange, json_option, place_options, timeout_option
from kvstore.cli.selecting import opened, tenant_option, the_namespace
from kvstore.cli.token_files import read_prompts
from kvstore.client import Client, Pinned
from kvstore.config import format_size
from kvstore.errors import BadInputError

LONGEST_S = 1e9
"""More than any daemon grants: it gives the longest life it has."""


@click.command(short_help="Keep what is stored of prompts from being evicted.")
@click.option("--ttl", "ttl_s", type=FiniteRange(0, min_open=True), help="For so many seconds.  [default: the most]")
@click.option("--most", type=click.IntRange(1), default=256, show_default=True, help="Prompts of the file.")
@prompt_options
def pin(asked: Asked, ttl_s: float | None, most: int) -> None:
    """Keep what is stored of prompts from being evicted, until `kvstore unpin`, or as long as the daemon allows.

    TOKENS is a file: .jsonl (a list of token ids per line), .npy, or raw little-endian uint32. Each prompt of which
    anything is stored gets an id. How much and how long is bounded: --pin-tenant, --pin-dram, --pin-max.
    """
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
            _show(client, pinned, as_json=asked.as_json)


@click.command(short_help="Let go of pins.")
@click.argument("ids", type=click.IntRange(1), nargs=-1)
@click.option("--all", "every", is_flag=True, help="All of the tenant's that `kvstore pin` made.")
@place_options
@tenant_option
@timeout_option
@json_option
def unpin(ids: tuple[int, ...], every: bool, place: DaemonPlace, tenant: str, timeout_s: float, as_json: bool) -> None:
    """Let go of pins by their IDs, as `kvstore pin` and `kvstore inspect claims` show them. Those of clients stay."""
    if bool(ids) == every:
        raise BadInputError("give the ids of pins, or --all")
    with place.client(tenant, timeout_s, name="kvstore unpin") as client:
        if every:
            held = client.claims().claims
            ids = tuple(each.id for each in held if each.kind == "pin" and not each.session_ids)
        found = [each for each in ids if client.unpin(each)]
        if as_json:
            click.echo(json.dumps({"unpinned": found, "not_found": sorted(set(ids) - set(found)), **_quota(client)}))
            return
        click.echo(f"{len(found)} of {len(ids)} pins let go of; {_in_words(client)}")


def _show(client: Client, pinned: Sequence[Pinned], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"pins": [asdict(each) for each in pinned], **_quota(client)}))
        return
    for number, each in enumerate(pinned):
        what = f"pin {each.id}: {each.n_blocks:,} blocks for {each.ttl_s:,.0f} s" if each.id else "nothing is stored"
        click.echo(f"prompt {number}: {what}")
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
