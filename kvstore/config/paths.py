"""Where the daemon's socket is."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import ConfigError

SOCKET_VARIABLE = "KVSTORE_SOCKET"

_SCHEMES = ("grpcs:/", "grpc:/", "grpc+unix:")
"""How gRPC addresses begin, made a path or not."""

UNIX_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket on Linux, without its final zero byte."""


def default_socket_path() -> Path:
    """``$KVSTORE_SOCKET``, else a path in the user's own run-time directory."""
    named = os.environ.get(SOCKET_VARIABLE)
    return Path(named) if named else runtime_socket_path()


def default_address() -> str:
    """Where a client looks for the daemon: a path as ``default_socket_path``, or the gRPC address in the variable."""
    return os.environ.get(SOCKET_VARIABLE) or str(runtime_socket_path())


def runtime_socket_path() -> Path:
    """The socket's path in the user's own run-time directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "kvstore" if runtime else Path(f"/tmp/kvstore-{os.getuid()}")  # noqa: S108 - made 0700, owner checked
    return base / "kvstored.sock"


def check_socket_path(path: Path, *settings: str) -> None:
    """Raises ConfigError for a path that no Unix socket can have; ``settings`` are the fields it came from."""
    if path == Path() or "\0" in str(path):
        raise ConfigError(f"the socket path {str(path)!r} names no file: give --socket a path", settings)
    if str(path).startswith(_SCHEMES):
        raise ConfigError(
            f"{str(path)!r} is the path of no socket but an address for clients, which give it as text; a daemon is "
            "told with --grpc-listen where to serve gRPC",
            settings,
        )
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise ConfigError(
            f"the socket path {str(path)!r} is longer than the {UNIX_PATH_BYTES_MAX} bytes Linux allows: "
            "choose a shorter one (--socket, TMPDIR or $KVSTORE_SOCKET)",
            settings,
        )
