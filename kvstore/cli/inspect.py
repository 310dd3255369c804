"""``kvstore inspect``: what a running daemon holds, and what a directory on NVMe does."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.cli.asking import Asked, number_option, prompt_options
from kvstore.cli.inspect_disk import directory, frame
from kvstore.cli.params import DaemonPlace, json_option, place_options, timeout_option
from kvstore.cli.selecting import (
    Selection,
    all_tenants_option,
    namespace_options,
    nothing_fits,
    tenant_option,
    the_namespace,
    title,
)
from kvstore.cli.tenants import tenants
from kvstore.cli.token_files import read_prompt
from kvstore.client.admin import Claims, Inspection, NamespaceInfo
from kvstore.config import format_size

ROWS_MAX = 40
"""Blocks of a prompt shown as a table; JSON has them all."""
NARROW_COLUMNS = 110
"""A terminal with fewer shows less of each namespace."""


@click.group("inspect", short_help="Show what a daemon or a directory holds.")
def inspect_command() -> None:
    """Show what a running daemon holds, or an NVMe directory that no daemon has open."""


inspect_command.add_command(directory)
inspect_command.add_command(frame)
inspect_command.add_command(tenants)


@inspect_command.command()
@place_options
@tenant_option
@all_tenants_option
@namespace_options
@timeout_option
@json_option
def namespaces(
    place: DaemonPlace, tenant: str, all_tenants: bool, timeout_s: float, as_json: bool, **selected: Any
) -> None:
    """List namespaces: what they are, blocks and bytes in each tier, hits, and since when they are idle."""
    with place.client(tenant, timeout_s) as client:
        found = client.namespaces(**Selection(**selected).as_dict(), all_tenants=all_tenants)
        if not found:
            click.echo(str(nothing_fits(client, all_tenants=all_tenants)), err=True)
    if as_json:
        click.echo(json.dumps([namespace_dict(each) for each in found], indent=2))
        return
    _print_namespaces(found)


@inspect_command.command()
@place_options
@tenant_option
@namespace_options
@timeout_option
@json_option
def namespace(place: DaemonPlace, tenant: str, timeout_s: float, as_json: bool, **selected: Any) -> None:
    """Show the description of one namespace, and what it holds."""
    with place.client(tenant, timeout_s) as client:
        plain = namespace_dict(the_namespace(client, Selection(**selected)))
    if as_json:
        click.echo(json.dumps(plain, indent=2))
        return
    table = Table("what", "value")
    for path, value in _leaves("", plain):
        table.add_row(path, escape(str(value)))
    Console().print(table)


@inspect_command.command()
@number_option
@prompt_options
def prompt(asked: Asked, number: int) -> None:
    """Show what is stored of a prompt, block by block, and why no more of it is.

    TOKENS is a file: .jsonl (a list of token ids per line), .npy, or raw little-endian uint32.
    """
    ids = read_prompt(asked.tokens, number)
    with asked.handle() as handle:
        seen = handle.inspect(ids, root=asked.root)
    if asked.as_json:
        click.echo(json.dumps(inspection_dict(seen), indent=2))
    else:
        _print_inspection(seen, len(ids))


@inspect_command.command()
@place_options
@tenant_option
@all_tenants_option
@timeout_option
@json_option
def claims(place: DaemonPlace, tenant: str, all_tenants: bool, timeout_s: float, as_json: bool) -> None:
    """List who is connected, and their leases, reservations and pins."""
    with place.client(tenant, timeout_s, name="kvstore inspect") as client:
        found = client.claims(all_tenants=all_tenants)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
    else:
        _print_claims(found)


def namespace_dict(info: NamespaceInfo) -> dict[str, Any]:
    """A namespace as JSON has it."""
    plain = {name: getattr(info, name) for name in NamespaceInfo.__slots__}
    return {
        **plain,
        "digest": info.digest.hex(),
        "names": list(info.names),
        "namespace": None if info.namespace is None else info.namespace.to_dict(),
    }


def inspection_dict(seen: Inspection) -> dict[str, Any]:
    """An inspection as JSON has it: one object per block."""
    hits = seen.hits.tolist() or [None] * len(seen.keys)
    columns = (seen.keys, seen.in_hbm, seen.in_dram, seen.on_nvme, seen.size_bytes, seen.idle_s, seen.pins)
    return {
        "n_rows": seen.n_rows,
        "n_blocks": seen.n_blocks,
        "partial_tokens": seen.partial_tokens,
        "ends": seen.ends,
        "differs_at_token": seen.differs_at_token,
        "blocks": [
            {
                "key": key.tobytes().hex(),
                "tiers": [tier for tier, there in (("hbm", hbm), ("dram", dram), ("nvme", nvme)) if there],
                "size_bytes": int(size),
                "hits": n_hits,
                "idle_s": float(idle),
                "pins": int(pins),
                "hints": hints,
            }
            for (key, hbm, dram, nvme, size, idle, pins), n_hits, hints in zip(
                zip(*columns, strict=True), hits, seen.hints or [{}] * len(seen.keys), strict=True
            )
        ],
    }


def _print_inspection(seen: Inspection, n_tokens: int) -> None:
    plain = inspection_dict(seen)
    table = Table("block", "key", "tiers", "bytes", "hits", "idle", "in use", "hints")
    for number, block in enumerate(plain["blocks"][:ROWS_MAX]):
        table.add_row(
            str(number),
            block["key"],
            ", ".join(block["tiers"]),
            f"{block['size_bytes']:,}",
            "-" if block["hits"] is None else str(block["hits"]),
            f"{block['idle_s']:,.1f} s",
            str(block["pins"]),
            ", ".join(f"{name} {value}" for name, value in block["hints"].items()),
        )
    console = Console()
    console.print(table)
    if len(plain["blocks"]) > ROWS_MAX:
        console.print(f"and {len(plain['blocks']) - ROWS_MAX} more (--json has them)")
    partly = f", and {seen.partial_tokens} tokens of one more" if seen.partial_tokens else ""
    console.print(
        f"{seen.n_blocks} of the {seen.n_rows} blocks of {n_tokens} tokens are stored{partly}: {seen.ends}",
        highlight=False,
        soft_wrap=True,
    )


def _print_namespaces(found: list[NamespaceInfo]) -> None:
    """Whatever the width, which namespace a row is about can be read."""
    console = Console()
    narrow = console.width < NARROW_COLUMNS
    table = Table("digest", "model@revision shard (names)", "tenant", "blocks", "DRAM", "NVMe")
    for name in () if narrow else ("in use", "found", "idle"):
        table.add_column(name)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:3]:
        column.no_wrap, column.overflow = False, "fold"
    for each in found:
        use = (
            f"{each.n_pinned_blocks:,}",
            f"{each.n_hit_blocks / each.n_lookup_blocks:.1%}" if each.n_lookup_blocks else "-",
            "-" if each.idle_s is None else f"{each.idle_s:,.0f} s",
        )
        table.add_row(
            each.digest.hex()[:12],
            escape(title(each) + (f" ({', '.join(each.names)})" if each.names else "")),
            escape(each.namespace.tenant if each.namespace else "?"),
            f"{each.n_blocks:,}",
            format_size(each.dram_bytes),
            format_size(each.nvme_bytes),
            *(() if narrow else use),
        )
    console.print(table)
    if narrow:
        console.print(f"what is in use, found and idle: --json, or {NARROW_COLUMNS} columns", highlight=False)


def _print_claims(found: Claims) -> None:
    table = Table("session", "client", "process", "tenant", "state", "silent for", title="clients")
    for session in found.sessions:
        process = str(session.pid) if session.pid > 0 else "remote" if session.pid < 0 else "?"
        state = "live" if session.live else "cut off"
        name, tenant = escape(session.client_name), escape(session.tenant)
        table.add_row(str(session.id), name, process, tenant, state, f"{session.silent_s:,.1f} s")
    held = Table("kind", "id", "sessions", "tenant", "blocks", "time left", title="what they hold")
    for claim in found.claims:
        left = "ended" if claim.ended else f"{claim.left_s:,.1f} s"
        sessions = ", ".join(map(str, claim.session_ids))
        held.add_row(claim.kind, str(claim.id), sessions, escape(claim.tenant), f"{claim.n_blocks:,}", left)
    console = Console()
    console.print(table)
    console.print(held)
    if found.truncated:
        console.print("there are more of them")


def _leaves(path: str, value: Any) -> list[tuple[str, Any]]:
    """Paths and values of a nested object, in order."""
    if isinstance(value, dict):
        return [leaf for name, each in value.items() for leaf in _leaves(f"{path}.{name}" if path else name, each)]
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return [leaf for i, each in enumerate(value) for leaf in _leaves(f"{path}[{i}]", each)]
    return [(path, value)]
