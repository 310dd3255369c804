"""``kvstore watch``: blocks that come to tiers and leave them, a JSON object per line."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from kvstore.cli.params import DaemonPlace, DurationType, place_options, timeout_option
from kvstore.cli.selecting import Selection, all_tenants_option, namespace_options, tenant_option
from kvstore.client.watching import POLL_S, BlockEvent, EventsLost, Watch

KINDS = ("stored", "moved", "removed")


@click.command(short_help="Print blocks as they come and go.")
@click.option("--after", "after_seq", type=click.IntRange(0), help="Go on behind this number.  [default: now]")
@click.option(
    "--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Only these; may be given again.  [default: all]"
)
@click.option("--count", type=click.IntRange(1), help="End after so many lines.")
@click.option("--for", "for_s", type=DurationType(), help="End after so long: 30s, 5m, 2h.")
@place_options
@tenant_option
@all_tenants_option
@namespace_options
@timeout_option
def watch(
    after_seq: int | None,
    kinds: tuple[str, ...],
    count: int | None,
    for_s: float | None,
    place: DaemonPlace,
    tenant: str,
    all_tenants: bool,
    timeout_s: float,
    **selected: Any,
) -> None:
    """Print each block that is stored, moved to a tier or removed from one, as a JSON object per line (NDJSON).

    A line with "kind": "lost" says how many events are missing there (null: nobody counted them).
    """
    with place.client(tenant, timeout_s, name="kvstore watch") as client:
        meant = Selection(**selected).as_dict()
        events = client.watch(after_seq, kinds=kinds, **meant, all_tenants=all_tenants)
        for event in itertools.islice(_until(events, for_s), count):
            click.echo(json.dumps(event_dict(event)))
            sys.stdout.flush()


def event_dict(event: BlockEvent | EventsLost) -> dict[str, Any]:
    """An event as JSON has it."""
    if isinstance(event, EventsLost):
        return {"kind": "lost", "n": event.n}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(event).items()}


def _until(events: Watch, for_s: float | None) -> Iterator[BlockEvent | EventsLost]:
    deadline_s = None if for_s is None else time.monotonic() + for_s
    while True:
        left_s = POLL_S if deadline_s is None else deadline_s - time.monotonic()
        if left_s < 0:
            return
        yield from events.poll(min(left_s, POLL_S))
