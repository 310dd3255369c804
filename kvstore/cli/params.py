"""Option types and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.config import RECOVERY_MODES, WRITE_POLICIES, default_socket_path, parse_size
from kvstore.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])


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

_NVME_OPTIONS = (
    click.option(
        "--nvme-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Directory of an NVMe tier of its own; made if missing. What is in it is found again after a restart.",
    ),
    click.option(
        "--nvme",
        "nvme_bytes",
        type=SIZE,
        default="0",
        show_default="none",
        help="Capacity of the NVMe tier, e.g. 500GiB.",
    ),
    click.option(
        "--write-policy",
        type=click.Choice(WRITE_POLICIES),
        default="through",
        show_default=True,
        help="Write blocks to NVMe once they are stored; when DRAM needs their room; or at their n-th access.",
    ),
    click.option(
        "--selective-hits",
        type=int,
        default=2,
        show_default=True,
        help="At which access --write-policy selective writes.",
    ),
    click.option(
        "--recovery",
        type=click.Choice(RECOVERY_MODES),
        default="normal",
        show_default=True,
        help="At the start: begin empty; trust the catalog; or read and verify every block.",
    ),
    click.option(
        "--write-behind",
        "write_behind_bytes",
        type=SIZE,
        default="0",
        show_default="a quarter of --dram, at most 1GiB",
        help="So much may wait in DRAM to be written; beyond it writes are skipped and counted.",
    ),
    click.option(
        "--io-timeout",
        "io_timeout_s",
        type=float,
        default=10.0,
        show_default=True,
        help="A read or write that is not done after so many seconds counts as failed for those who wait.",
    ),
    click.option(
        "--drain",
        "drain_s",
        type=float,
        default=5.0,
        show_default=True,
        help="Seconds to go on writing what waits when the daemon is stopped.",
    ),
)


def nvme_options(command: Command) -> Command:
    """The options of an NVMe tier, under the names of ``DaemonConfig``."""
    for option in reversed(_NVME_OPTIONS):
        command = option(command)
    return command
