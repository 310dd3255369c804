"""Option types and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore.config import default_socket_path, parse_size
from kvstore.errors import ConfigError


class SizeType(click.ParamType[int]):
    """A size such as 64KiB; gives bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


SIZE = SizeType()

socket_option = click.option(
    "--socket",
    "socket_path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=default_socket_path,
    show_default="$KVSTORE_SOCKET, or the run-time directory",
    help="Unix socket of the daemon.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
output_option = click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the JSON report and the picture.",
)
