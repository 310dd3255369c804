"""``kvstore clear``: blocks that must not be found any more, as the weights behind them have changed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.cli.params import DaemonPlace, FiniteRange, json_option, place_options, timeout_option
from kvstore.cli.selecting import (
    Selection,
    all_tenants_option,
    listed,
    namespace_options,
    nothing_fits,
    tenant_option,
    title,
)
from kvstore.client import Client
from kvstore.client.admin import Cleared, NamespaceInfo
from kvstore.errors import BadInputError, DeniedError, UnavailableError


@click.command(short_help="Have blocks of namespaces go from every tier.")
@place_options
@tenant_option
@all_tenants_option
@namespace_options
@click.option("--everything", is_flag=True, help="All namespaces of the tenant.")
@click.option("--dry-run", is_flag=True, help="Only count what would go.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(0, 86400),
    default=60.0,
    show_default=True,
    help="Seconds to wait until no crash can bring them back.",
)
@timeout_option
@json_option
def clear(
    place: DaemonPlace,
    tenant: str,
    all_tenants: bool,
    everything: bool,
    dry_run: bool,
    yes: bool,
    wait_s: float,
    timeout_s: float,
    as_json: bool,
    **selected: Any,
) -> None:
    """Have the blocks of namespaces go from every tier: say which, by name, digest or model.

    From that moment nobody finds them. Those in use stay until they are released, and are found by nobody else.
    Exit code 1 if their names on NVMe were not gone in time: the daemon goes on, but a crash could bring some back.
    """
    selection = Selection(**selected)
    if selection.is_empty != everything:
        raise BadInputError("say what is to go: --name, --digest, --model or --shard, or --everything, and not both")
    arguments = {**selection.as_dict(), "everything": everything, "all_tenants": all_tenants}
    with place.client(tenant, timeout_s) as client:
        known = client.namespaces(**selection.as_dict(), all_tenants=all_tenants)
        if not (known or everything):
            raise nothing_fits(client, all_tenants=all_tenants)
        if not (dry_run or yes):
            planned = client.clear(**arguments, dry_run=True)
            whose = "all tenants" if all_tenants else f"tenant {tenant!r}"
            what = f"{planned.n_blocks:,} blocks of {len(planned.namespaces)} namespaces of {whose}"
            _ask(f"{what} will go{f': {listed(known)}' if known else ''}. Sure?")
        done = client.clear(**arguments, dry_run=dry_run, wait_s=wait_s)
        unknown = _not_described(client, done)
    by_digest = {each.digest: each for each in known}
    if as_json:
        click.echo(json.dumps(cleared_dict(done, by_digest, dry_run=dry_run), indent=2))
    else:
        _print(done, by_digest, dry_run=dry_run)
    if unknown:
        click.echo(
            f"warning: {sum(each.n_blocks for each in unknown):,} more blocks are of namespaces that nobody has "
            f"described, {listed(unknown)}: if they are meant too, clear them with --all-tenants --digest",
            err=True,
        )
    if not (dry_run or done.durable):
        raise UnavailableError(
            f"{done.n_left_names:,} names were still on NVMe after {wait_s:g} s: the daemon goes on, see its log and "
            "`kvstore status` (nvme_health) if it does not end"
        )


def _ask(question: str) -> None:
    """Raises BadInputError where nobody is there to answer, and Abort if the answer is no."""
    try:
        sure = click.confirm(question, err=True)
    except click.Abort as error:
        if sys.stdin.isatty() or isinstance(error.__context__, KeyboardInterrupt):
            raise
        click.echo(err=True)
        raise BadInputError("nothing was cleared, as nobody is there to answer: give --yes, or --dry-run") from None
    if not sure:
        raise click.Abort


def _not_described(client: Client, done: Cleared) -> list[NamespaceInfo]:
    """Namespaces with blocks of which nobody can say whether they were meant, and that were left out.

    A client of another host may not see them, and so could not clear them either.
    """
    taken = {each.digest for each in done.namespaces}
    try:
        known = client.namespaces(all_tenants=True)
    except DeniedError:
        return []
    return [each for each in known if each.namespace is None and each.n_blocks and each.digest not in taken]


def cleared_dict(done: Cleared, known: dict[bytes, NamespaceInfo], *, dry_run: bool) -> dict[str, Any]:
    """A clearing as JSON has it. ``known``: what the namespaces are, by digest."""
    plain = asdict(done)
    for each in plain["namespaces"]:
        info = known.get(each["digest"])
        each["namespace"] = info.namespace.to_dict() if info is not None and info.namespace is not None else None
        each["digest"] = each["digest"].hex()
    return {**plain, "n_blocks": done.n_blocks, "durable": done.durable and not dry_run, "dry_run": dry_run}


def _print(done: Cleared, known: dict[bytes, NamespaceInfo], *, dry_run: bool) -> None:
    table = Table("digest", "model@revision shard", title="would go" if dry_run else "cleared")
    for name in ("blocks", "in DRAM", "on NVMe"):
        table.add_column(name, no_wrap=True)
    table.columns[0].no_wrap, table.columns[1].overflow = True, "fold"
    for each in done.namespaces:
        table.add_row(
            each.digest.hex()[:12],
            escape(title(known[each.digest])) if each.digest in known else "?",
            f"{each.n_blocks:,}",
            f"{each.n_dram_blocks:,}",
            f"{each.n_nvme_blocks:,}",
        )
    console = Console()
    console.print(table)
    if done.n_left_blocks:
        console.print(f"{done.n_left_blocks:,} blocks are in use and go when they are released")
    if done.n_ended_reservations:
        console.print(f"{done.n_ended_reservations:,} reservations ended")
