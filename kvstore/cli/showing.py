"""What a measurement found, on standard output and in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvstore.bench.report import Plot, print_tables, save


def show(
    plain: dict[str, Any],
    tables: Callable[[], Iterable[Table]],
    output: Path | None,
    plot: Plot | None = None,
    *,
    as_json: bool,
) -> None:
    """Print the tables, or one JSON object; with ``output`` save it there, and the picture. Says what was saved where.

    Raises BadInputError if ``output`` can't be written to.
    """
    if as_json:
        click.echo(json.dumps(plain, indent=2))
    else:
        print_tables(list(tables()))
    if output is not None:
        for line in save(output, plain, plot):
            click.echo(line, err=True)
