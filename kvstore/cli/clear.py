"""``kvstore clear``: blocks that must not be found any more, as the weights behind them have changed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvstore.cli.params import json_option, socket_option, timeout_option
from kvstore.cli.selecting import Selection, all_tenants_option, namespace_options, tenant_option
from kvstore.client import Client
from kvstore.client.admin import Cleared
from kvstore.errors import BadInputError, UnavailableError


@click.command(short_help="Have blocks of namespaces go from every tier.")
@socket_option
@tenant_option
@all_tenants_option
@namespace_options
@click.option("--everything", is_flag=True, help="All namespaces of the tenant.")
@click.option("--dry-run", is_flag=True, help="Only count what would go.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 86400),
    default=60.0,
    show_default=True,
    help="Seconds to wait until no crash can bring them back.",
)
@timeout_option
@json_option
def clear(
    socket_path: Path,
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
        raise BadInputError("say what is to go: --name, --digest or --model, or --everything, and not both")
    arguments = {**selection.as_dict(), "everything": everything, "all_tenants": all_tenants}
    with Client(socket_path, tenant, timeout_s) as client:
        if not (dry_run or yes):
            planned = client.clear(**arguments, dry_run=True)
            whose = "all tenants" if all_tenants else f"tenant {tenant!r}"
            click.confirm(
                f"{planned.n_blocks:,} blocks of {len(planned.namespaces)} namespaces of {whose} will go. Sure?",
                abort=True,
                err=True,
            )
        done = client.clear(**arguments, dry_run=dry_run, wait_s=wait_s)
    if as_json:
        click.echo(json.dumps(cleared_dict(done, dry_run=dry_run), indent=2))
    else:
        _print(done, dry_run=dry_run)
    if not (dry_run or done.durable):
        raise UnavailableError(
            f"{done.n_left_names:,} names were still on NVMe after {wait_s:g} s: the daemon goes on, see its log and "
            "`kvstore status` (nvme_health) if it does not end"
        )


def cleared_dict(done: Cleared, *, dry_run: bool) -> dict[str, Any]:
    """A clearing as JSON has it."""
    plain = asdict(done)
    for each in plain["namespaces"]:
        each["digest"] = each["digest"].hex()
    return {**plain, "n_blocks": done.n_blocks, "durable": done.durable and not dry_run, "dry_run": dry_run}


def _print(done: Cleared, *, dry_run: bool) -> None:
    table = Table("namespace", "blocks", "in DRAM", "on NVMe", title="would go" if dry_run else "cleared")
    for each in done.namespaces:
        table.add_row(
            each.digest.hex()[:12], f"{each.n_blocks:,}", f"{each.n_dram_blocks:,}", f"{each.n_nvme_blocks:,}"
        )
    console = Console()
    console.print(table)
    if done.n_left_blocks:
        console.print(f"{done.n_left_blocks:,} blocks are in use and go when they are released")
    if done.n_ended_reservations:
        console.print(f"{done.n_ended_reservations:,} reservations ended")
