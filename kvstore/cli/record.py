"""``kvstore record``: the requests of a namespace, written down as a trace."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import click

from kvstore.bench.record import TraceLines
from kvstore.cli.params import DaemonPlace, DurationType, json_option, place_options, timeout_option
from kvstore.cli.selecting import Selection, namespace_options, opened, tenant_option, the_namespace
from kvstore.client.recording import RecordedRequest, Recording, RequestsLost
from kvstore.errors import BadInputError, UnavailableError

POLL_S = 0.5


@click.command(short_help="Write the requests of a namespace down as a trace.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--for", "for_s", type=DurationType(), help="End after so long: 5m, 2h.  [default: with Ctrl-C]")
@click.option("--count", type=click.IntRange(1), help="End after so many requests.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@place_options
@tenant_option
@namespace_options
@timeout_option
@json_option
def record(
    file: Path,
    for_s: float | None,
    count: int | None,
    force: bool,
    place: DaemonPlace,
    tenant: str,
    timeout_s: float,
    as_json: bool,
    **selected: Any,
) -> None:
    """Write down the requests that engines look up in a namespace, as a trace for `kvstore plan` and `kvstore replay`.

    FILE gets a JSON object per line: when, how long, and a number for each block, the same for the same beginning of a
    prompt. Nothing tells what is in the prompts. If the daemon knows several namespaces say which. Ctrl-C ends it.
    """
    if file.exists() and not force:
        raise BadInputError(f"{file} exists: give another name, or --force to overwrite it")
    with place.client(tenant, timeout_s, name="kvstore record") as client:
        handle = opened(client, the_namespace(client, Selection(**selected)))
        recording = handle.record()
        lines = TraceLines(handle.namespace.spec.block_tokens)
        deadline_s = None if for_s is None else time.monotonic() + for_s
        with _created(file) as out:
            n_lost = _write(recording, lines, out, deadline_s, count)
    done = {"requests": lines.n_requests, "unique_blocks": lines.n_unique_blocks, "lost_requests": n_lost}
    if as_json:
        click.echo(json.dumps(done))
        return
    lost = f"; {n_lost:,} came too fast or were too long, and are missing" if n_lost else ""
    click.echo(f"{lines.n_requests:,} requests of {lines.n_unique_blocks:,} different blocks are in {file}{lost}")


def _created(file: Path) -> TextIO:
    """The file, empty. Raises BadInputError if it can't be written."""
    try:
        return file.open("w")
    except OSError as error:
        raise BadInputError(f"{file} can't be written: {error.strerror or error}; name another file") from error


def _write(recording: Recording, lines: TraceLines, out: TextIO, deadline_s: float | None, count: int | None) -> int:
    """Until it is time, enough, or Ctrl-C; returns how many requests are missing, as far as they were counted."""
    n_lost, pause = 0, threading.Event()
    try:
        while True:
            is_last = deadline_s is not None and time.monotonic() >= deadline_s
            for each in _came(recording):
                if isinstance(each, RecordedRequest):
                    out.write(lines.line(each))
                elif each.n is None:
                    click.echo("requests may be missing here: the daemon was restarted, or asked too late", err=True)
                else:
                    n_lost += each.n
                if lines.n_requests == count:
                    return n_lost
            out.flush()
            if is_last:
                return n_lost
            left_s = POLL_S if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            pause.wait(min(POLL_S, left_s))
    except KeyboardInterrupt:
        return n_lost


def _came(recording: Recording) -> list[RecordedRequest | RequestsLost]:
    """What has come; nothing while the daemon is away."""
    try:
        return recording.poll()
    except UnavailableError:
        return []  # the first answer after that says that requests may be missing
