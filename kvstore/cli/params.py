"""Option types and options that several commands share."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.client import Client
from kvstore.client.remote.shown import CERTIFICATE_VARIABLE, KEY_VARIABLE, ROOTS_VARIABLE, TOKEN_FILE_VARIABLE, Shown
from kvstore.client.remote.target import is_remote
from kvstore.config import default_address, parse_size
from kvstore.config.file import default_places, file_in_force, socket_of
from kvstore.config.paths import SOCKET_VARIABLE
from kvstore.config.units import parse_duration
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


class FiniteRange(click.FloatRange):
    """Numbers of a range, of which inf and nan are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r:.80} is no finite number", param, ctx)
        return number


class DurationType(click.ParamType[float]):
    """A duration such as 30s, 5m or 2h, or a number of seconds; gives seconds. ``above_0``: 0 is refused."""

    name = "duration"

    def __init__(self, *, above_0: bool = False) -> None:
        self._above_0 = above_0

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            duration_s = parse_duration(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        if self._above_0 and not duration_s:
            self.fail(f"{value!r:.80} is no time at all; it must be above 0", param, ctx)
        return duration_s


class TiersType(click.ParamType[tuple[str, ...]]):
    """Tiers such as hbm,dram,nvme, each once; DRAM is one in any case."""

    name = "tiers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        tiers = tuple(part.strip() for part in str(value).split(","))
        if not set(tiers) <= {"hbm", "dram", "nvme"} or len(set(tiers)) < len(tiers) or "dram" not in tiers:
            self.fail(f"{value!r:.80} names no tiers; give dram, hbm,dram, dram,nvme or hbm,dram,nvme", param, ctx)
        return tiers


TIERS = TiersType()


@dataclass(frozen=True, slots=True)
class DaemonPlace:
    """Where a command finds its daemon, as it was told. ``str`` of it is the address."""

    address: str
    token_file: str | None = None
    root_certificates: str | None = None
    certificate: str | None = None
    key: str | None = None

    def __str__(self) -> str:
        return self.address

    def client(self, tenant: str = "default", timeout_s: float = 2.0, *, name: str = "") -> Client:
        """A client of the daemon there. Raises what ``Client`` does, and BadInputError for files that can't be used.

        Variables say what to show a daemon over gRPC, if options don't.
        """
        environment = os.environ if is_remote(self.address) else {}
        shown = Shown.of(environment, self.token_file, self.root_certificates, self.certificate, self.key)
        return Client(
            self.address, tenant, timeout_s, name=name, token=shown.token,
            root_certificates=shown.root_certificates, client_certificate=shown.client_certificate,
        )  # fmt: skip


def daemon_address() -> str:
    """Where to look for the daemon: ``$KVSTORE_SOCKET``, else what its file of settings says, else its default."""
    if SOCKET_VARIABLE in os.environ:
        return default_address()
    return str(socket_of(file_in_force(None, os.environ, default_places(os.environ))) or default_address())


_SOCKET_DEFAULT: dict[str, Any] = {
    "default": daemon_address,
    "show_default": "$KVSTORE_SOCKET, the file of settings, or the run-time directory",
}
_FILE = click.Path(dir_okay=False)
_PLACE_OPTIONS = (
    click.option(
        "--socket", "address", type=_FILE, **_SOCKET_DEFAULT,
        help="Unix socket of the daemon, or its gRPC address: grpcs://host:port, grpc+unix:/path.",
    ),
    click.option("--token-file", type=_FILE, help=f"For gRPC: file with the token.  [default: ${TOKEN_FILE_VARIABLE}]"),
    click.option(
        "--root-certificates", type=_FILE,
        help=f"For gRPC: whom to trust, PEM.  [default: ${ROOTS_VARIABLE}, or gRPC's]",
    ),
    click.option(
        "--client-certificate", "certificate", type=_FILE,
        help=f"For gRPC: certificate to show, PEM.  [default: ${CERTIFICATE_VARIABLE}]",
    ),
    click.option("--client-key", "key", type=_FILE, help=f"For gRPC: its key, PEM.  [default: ${KEY_VARIABLE}]"),
)  # fmt: skip


def place_options(command: Command) -> Command:
    """Options that say where the daemon is; the command gets them as ``place``, a ``DaemonPlace``."""

    @functools.wraps(command)
    def placed(**arguments: Any) -> Any:
        own = {name: arguments.pop(name) for name in DaemonPlace.__dataclass_fields__}
        return command(place=DaemonPlace(**own), **arguments)

    decorated: Any = placed
    for option in reversed(_PLACE_OPTIONS):
        decorated = option(decorated)
    result: Command = decorated
    return result


socket_option = click.option(
    "--socket", "socket_path", type=click.Path(path_type=Path, dir_okay=False), **_SOCKET_DEFAULT,
    help="Unix socket of the daemon.",
)  # fmt: skip
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
