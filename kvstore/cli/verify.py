"""``kvstore verify``: whether every byte on NVMe is what was written, in a directory or in a running daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from kvstore.cli.params import DaemonPlace, json_option, place_options, timeout_option
from kvstore.compression.frame import inspect, verify_frame
from kvstore.config import format_size
from kvstore.errors import BadInputError, IntegrityError, UnavailableError
from kvstore.tiers.nvme.catalog import CatalogError
from kvstore.tiers.nvme.survey import Progress, Survey, survey

FRAMES_SHOWN_MAX = 20


@click.command(short_help="Check every byte on NVMe, and repair a directory.")
@click.argument("directory", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--repair", is_flag=True, help="Have the catalog name intact frames only. Changes no frame.")
@click.option("--connect", is_flag=True, help="Check a running daemon instead: its tables, and its frames on NVMe.")
@place_options
@timeout_option
@json_option
def verify(
    directory: Path | None, repair: bool, connect: bool, place: DaemonPlace, timeout_s: float, as_json: bool
) -> None:
    """Read every frame in DIRECTORY, which no daemon may have open, and compare it with its checksums and its name.

    With --connect have a running daemon do so with what it holds, a little at a time; bad frames are never served
    again. Exit code 3 if bad bytes were found, and not repaired.
    """
    if (directory is None) != connect:
        raise BadInputError("give the DIRECTORY of an NVMe tier, or --connect for a running daemon, and not both")
    if directory is None:
        from kvstore.cli.scrub import verify_daemon

        if repair:
            raise BadInputError("--repair is for a directory; a running daemon drops bad frames by itself")
        verify_daemon(place, timeout_s, as_json=as_json)
        return
    with progress_of_bytes("reading frames") as progress:
        try:
            found = survey(directory, inspect, verify_frame, progress, repair=repair)
        except CatalogError as error:
            raise UnavailableError(f"nothing was changed: {error}") from error
    click.echo(json.dumps(survey_dict(found), indent=2)) if as_json else print_survey(found)
    if not (found.ok or found.repaired):
        raise IntegrityError(f"{directory} is not as it should be: see above, and --repair")


@contextmanager
def progress_of_bytes(description: str) -> Iterator[Progress]:
    """A bar on standard error if that is a terminal. Yields what to call with bytes done and bytes in all."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def survey_dict(found: Survey) -> dict[str, Any]:
    """A survey as JSON has it."""
    return {**asdict(found), "n_bad": found.n_bad, "ok": found.ok}


def print_survey(found: Survey) -> None:
    """Tables for people."""
    table = Table("what", "value")
    table.columns[1].justify = "right"
    heads = [segment for segment in found.segments if segment.head in ("damaged", "foreign")]
    for what, value in (
        ("directory", found.uuid),
        ("catalog", found.catalog),
        ("list of namespaces", found.namespaces),
        ("segments", f"{len(found.segments):,} of {format_size(found.segment_bytes)}"),
        ("heads damaged or foreign", f"{len(heads):,}"),
        ("names", f"{found.n_names:,}"),
        ("frames intact", f"{found.n_intact:,}"),
        ("frames damaged", f"{found.n_corrupt:,}"),
        ("frames unreadable", f"{found.n_unreadable:,}"),
        ("names of no frame", f"{found.n_misplaced:,}"),
        ("names of older frames", f"{found.n_older:,}"),
        ("intact, without the blocks before", f"{found.n_orphans:,}"),
        ("bytes read", format_size(found.n_bytes)),
    ):
        table.add_row(what, value)
    console = Console()
    console.print(table)
    if found.bad:
        bad = Table("segment", "offset", "block", "what is wrong")
        for each in found.bad[:FRAMES_SHOWN_MAX]:
            bad.add_row(str(each.segment), f"{each.offset:,}", each.key, escape(each.what))
        console.print(bad)
        if found.n_bad > FRAMES_SHOWN_MAX:
            console.print(f"and {found.n_bad - FRAMES_SHOWN_MAX:,} more (--json lists up to {len(found.bad):,})")
    if found.repaired:
        console.print(f"repaired: {found.repaired}")
