"""Where a daemon is, and how a connection to it is made."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvstore.config import check_socket_path
from kvstore.errors import UnavailableError


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
