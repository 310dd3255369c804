"""``kvstore config``: what settings there are, which are in force, and whether a file is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.cli.params import json_option
from kvstore.cli.settings import check_for_serving, load_settings, setting_options
from kvstore.config import DaemonConfig
from kvstore.config.example import example_toml, in_force, reference_markdown
from kvstore.config.file import read_document
from kvstore.config.here import check_here
from kvstore.config.layers import Layered, layered
from kvstore.errors import BadInputError
from kvstore.server.hbm_device import check_hbm_device


@click.command("config", short_help="Show the daemon's settings and where they come from.")
@click.option("--show", is_flag=True, help="Print every setting as `kvstore serve` would have it, and its origin.")
@click.option(
    "--check",
    "checked",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Say whether this file alone, over the defaults, is a configuration for this machine.",
)
@click.option("--example", is_flag=True, help="Print a file with every setting, its meaning and its default.")
@click.option("--reference", is_flag=True, hidden=True, help="Print the table of docs/OPERATIONS.md.")
@json_option
@setting_options
def config_command(
    show: bool, checked: Path | None, example: bool, reference: bool, as_json: bool, file: Path | None, **options: Any
) -> None:
    """Show the settings of the daemon, check a file of them, or print an example.

    Later layers win: defaults, one TOML file, KVSTORE_... variables, options. Options of `kvstore serve` may be
    given here, too, to see what they would do.
    """
    if [show, checked is not None, example, reference].count(True) != 1:
        raise BadInputError("say one of --show, --check FILE and --example")
    if example or reference:
        click.echo(example_toml() if example else reference_markdown())
    elif checked is not None:
        found = layered(read_document(checked), {}, {}, _check_for_this_machine)
        n_set = sum(origin.layer == "file" for origin in found.origins)
        if as_json:
            click.echo(json.dumps({"file": str(checked), "ok": True, "settings": n_set}))
        else:
            click.echo(f"{checked} is right: {n_set} settings")
    else:
        _show(load_settings(file, options), as_json)


def _check_for_this_machine(config: DaemonConfig) -> None:
    check_for_serving(config)
    check_here(config)
    check_hbm_device(config.hbm)


def _show(found: Layered, as_json: bool) -> None:
    rows = in_force(found)
    if as_json:
        click.echo(json.dumps({"file": str(found.file) if found.file else None, "settings": rows}, indent=2))
        return
    table = Table("setting", "value", "from", title=f"settings; file: {found.file or 'none'}")
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*(escape(str(row[name])) for name in ("name", "effective", "from")))
    Console().print(table)
