"""Where a daemon is, and how a connection to it is made."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvstore.config import check_socket_path
from kvstore.errors import BadInputError, UnavailableError

_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[^/]+:[0-9]+/?$")
"""How URLs begin, and ``host:port``."""


class Address(Protocol):
    """A place that connections lead to. ``str`` of it is what messages call it."""

    @property
    def spins(self) -> bool:
        """Whether looking for a reply before sleeping pays: not where the answer needs this process's own lock."""
        ...

    def connect(self, timeout_s: float) -> socket.socket:
        """A new connection: a stream socket that passes descriptors. Blocks ``timeout_s`` at most.

        Raises UnavailableError with the way out if nobody answers there.
        """
        ...


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """The Unix socket of a daemon of this machine. Raises ConfigError for a path that no socket can have."""

    path: Path

    @classmethod
    def of(cls, address: str | os.PathLike[str]) -> UnixAddress:
        """At the path ``address``. Raises BadInputError for a text that looks like the address of another host."""
        if isinstance(address, str) and _ELSEWHERE.match(address) and not Path(address).exists():
            raise BadInputError(
                f"{address!r:.120} is no path of a Unix socket; over the network it is Client('grpcs://host:port', "
                "token=..., root_certificates='ca.pem'), from a daemon with --grpc-listen, --grpc-tls-cert, "
                "--grpc-tls-key and --grpc-token-file"
            )
        return cls(Path(address))

    def __post_init__(self) -> None:
        check_socket_path(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def spins(self) -> bool:
        return True

    def connect(self, timeout_s: float) -> socket.socket:
        """See ``Address``."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.settimeout(timeout_s)
        try:
            sock.connect(os.fspath(self.path))
        except OSError as error:
            sock.close()
            raise UnavailableError(
                f"no kvstore daemon answers at {self.path} ({error.strerror or error}): "
                f"start one with `kvstore serve --socket {self.path}`"
            ) from error
        return sock
