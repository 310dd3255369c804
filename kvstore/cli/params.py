"""Option types and options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvstore.config import default_socket_path, parse_size
from kvstore.config.file import default_places, file_in_force, socket_of
from kvstore.config.paths import SOCKET_VARIABLE
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


def daemon_socket() -> Path:
    """Where to look for the daemon: ``$KVSTORE_SOCKET``, else what its file of settings says, else its default."""
    if SOCKET_VARIABLE in os.environ:
        return default_socket_path()
    return socket_of(file_in_force(None, os.environ, default_places(os.environ))) or default_socket_path()


socket_option = click.option(
    "--socket",
    "socket_path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=daemon_socket,
    show_default="$KVSTORE_SOCKET, the file of settings, or the run-time directory",
    help="Unix socket of the daemon.",
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=2.0,
    show_default=True,
    help="Seconds to wait for the daemon.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
output_option = click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the JSON report and the picture.",
)
