"""``kvstore version``: what runs here, down to the libraries, and what the daemon runs."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any

import click

from kvstore import __version__
from kvstore.cli.params import DaemonPlace, json_option, place_options, timeout_option
from kvstore.device.cuda import gpus
from kvstore.errors import DeviceError, KVStoreError
from kvstore.native import backend
from kvstore.wire.framing import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN

LIBRARIES = ("numpy", "protobuf", "lmdb", "xxhash", "click", "rich", "grpcio", "torch", "cuda-bindings")
"""Distributions whose version may matter; the last three are optional."""


@click.command(short_help="Show versions: of this program, the daemon, libraries.")
@place_options
@timeout_option
@json_option
def version(place: DaemonPlace, timeout_s: float, as_json: bool) -> None:
    """Show the versions of this program, of the daemon if one answers, and of the libraries in use."""
    found = versions(place, timeout_s)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"kvstore {found['client']}, protocol {found['protocol_min']} to {found['protocol_max']}")
    daemon = found["daemon"]
    click.echo(f"daemon  {daemon['version'] or 'none: ' + daemon['error']}")
    hint = ": slow; install a C compiler (gcc), then this package once more" if found["copy_backend"] == "numpy" else ""
    click.echo(f"copies  {found['copy_backend']}{hint}")
    click.echo(f"gpus    {', '.join(found['gpus']) or 'none: ' + found['gpus_error']}")
    click.echo(f"python  {found['python']} on {found['system']}")
    for name, number in found["libraries"].items():
        click.echo(f"        {name} {number or 'not installed'}")


def versions(place: DaemonPlace, timeout_s: float) -> dict[str, Any]:
    """Everything the command shows. Asks the daemon, for ``timeout_s`` at most; that there is none is no error."""
    daemon = {"version": "", "error": ""}
    try:
        with place.client(timeout_s=timeout_s) as client:
            daemon["version"] = client.server_version
    except KVStoreError as error:
        daemon["error"] = str(error)
    names: list[str] = []
    missing = ""
    try:
        names = [gpu.name for gpu in gpus()]
    except DeviceError as error:
        missing = str(error)
    return {
        "client": __version__,
        "protocol_min": PROTOCOL_VERSION_MIN,
        "protocol_max": PROTOCOL_VERSION_MAX,
        "daemon": daemon,
        "copy_backend": backend(),
        "gpus": names,
        "gpus_error": missing,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libraries": {name: _installed(name) for name in LIBRARIES},
    }


def _installed(name: str) -> str:
    """The version of a distribution, or an empty text."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
