"""``kvstore verify --connect``: a running daemon checks what it holds, a slice at a time."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from kvstore.cli.params import DaemonPlace
from kvstore.client.admin import Verified
from kvstore.config import format_size
from kvstore.errors import IntegrityError, UnavailableError


def verify_daemon(place: DaemonPlace, timeout_s: float, *, as_json: bool) -> None:
    """Have everything checked, and print what was found. Raises IntegrityError if anything was."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        place.client(timeout_s=timeout_s, name="kvstore verify") as client,
        RichProgress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar,
    ):
        task = bar.add_task("checking blocks", total=None)
        found = client.verify(progress=lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        click.echo(json.dumps({**asdict(found), "ok": found.ok}, indent=2))
    else:
        _print(found)
    if found.n_corrupt or found.n_unreadable or found.problems:
        raise IntegrityError("the daemon is not as it should be, see above; bad frames are not served any more")
    if found.n_unread:
        raise UnavailableError(f"{found.n_unread:,} frames were not read in time: the disk is slow or stuck")


def _print(found: Verified) -> None:
    table = Table("what", "value")
    table.columns[1].justify = "right"
    for what, value in (
        ("blocks checked", f"{found.n_blocks:,}"),
        ("contradictions", f"{len(found.problems):,}"),
        ("frames read", f"{found.n_frames:,} ({format_size(found.n_bytes)})"),
        ("frames damaged", f"{found.n_corrupt:,}"),
        ("frames unreadable", f"{found.n_unreadable:,}"),
        ("frames not read in time", f"{found.n_unread:,}"),
    ):
        table.add_row(what, value)
    console = Console()
    console.print(table)
    for problem in found.problems:
        console.print(escape(problem), style="red", highlight=False)
