"""``kvstore inspect tenants``: who has how much of the tiers, what is due to whom, and whose blocks went for whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.cli.params import DaemonPlace, json_option, place_options, timeout_option
from kvstore.cli.selecting import all_tenants_option, has_nothing, tenant_option
from kvstore.client.tenants import TenantInfo
from kvstore.config import format_size

SHOWN_MAX = 12


@click.command()
@place_options
@tenant_option
@all_tenants_option
@timeout_option
@json_option
def tenants(place: DaemonPlace, tenant: str, all_tenants: bool, timeout_s: float, as_json: bool) -> None:
    """List tenants: what they have in each tier, their share of it, evictions, and what they have pinned."""
    with place.client(tenant, timeout_s, name="kvstore inspect") as client:
        found = client.tenants(all_tenants=all_tenants)
    if not found:
        click.echo(has_nothing("block", "" if all_tenants else tenant), err=True)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found], indent=2))
    else:
        Console().print(tenant_table(found, len(found)))


def tenant_table(found: Sequence[TenantInfo], most: int = SHOWN_MAX) -> Table:
    """A row for each tenant and tier; of ``most`` tenants."""
    table = Table(
        "tenant", "tier", "has", "share", "quota", "evicted", "for others", "of others", "pinned",
        box=None, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for each in found[:most]:
        for i, tier in enumerate(each.tiers):
            table.add_row(
                escape(each.tenant or "?") if not i else "",
                tier.tier,
                format_size(tier.used_bytes),
                format_size(tier.share_bytes),
                "-" if tier.max_bytes is None else format_size(tier.max_bytes),
                f"{tier.n_evicted:,}",
                f"{tier.n_suffered:,}",
                f"{tier.n_caused:,}",
                f"{format_size(each.pinned_bytes)} of {format_size(each.pin_max_bytes)}" if not i else "",
            )
    if len(found) > most:
        table.add_row(f"and {len(found) - most} more", *[""] * 8)
    return table
