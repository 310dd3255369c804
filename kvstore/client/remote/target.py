"""Where a gRPC server is, and what a client shows to be let in."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.config import check_socket_path
from kvstore.config.addresses import is_loopback, split_tcp
from kvstore.errors import BadInputError, ConfigError

TLS, PLAIN, UNIX = "grpcs://", "grpc://", "grpc+unix:"
SCHEMES = (TLS, PLAIN, UNIX)

Pem = str | os.PathLike[str] | bytes
"""A PEM file, or what is in one."""


def is_remote(address: object) -> bool:
    """Whether a client's address names a gRPC server."""
    return isinstance(address, str) and address.startswith(SCHEMES)


@dataclass(frozen=True, slots=True)
class Target:
    """A gRPC server. ``grpcs://host:port`` (TLS), ``grpc+unix:/path``, or ``grpc://host:port`` without TLS, for
    a proxy on this machine that adds it: a token is not sent to another machine in the clear.

    Raises BadInputError for an address that can't be, and for files that can't be read.
    """

    address: str
    token: str = field(default="", repr=False)
    root_certificates: bytes | None = None
    client_certificate: tuple[bytes, bytes] | None = field(default=None, repr=False)
    """Certificate and key."""

    def __post_init__(self) -> None:
        if not self.address.startswith(SCHEMES):
            raise BadInputError(f"{self.address!r:.120} is no gRPC address: it begins with {', '.join(SCHEMES)}")
        try:
            if self.address.startswith(UNIX):
                check_socket_path(Path(self.address.removeprefix(UNIX)), "address")
                return
            host, _ = split_tcp(self.place, "the gRPC address")
        except ConfigError as error:
            raise BadInputError(str(error)) from None
        if self.plain and self.token and not is_loopback(host):
            raise BadInputError(f"{self.address} would send the token in the clear: use {TLS}{self.place}")
        if self.plain and (self.root_certificates or self.client_certificate):
            raise BadInputError(f"{self.address} uses no certificates: use {TLS}{self.place}")
        if self.token and not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise BadInputError("the token has other characters than printable ASCII, or spaces")

    def __str__(self) -> str:
        return self.address

    @property
    def plain(self) -> bool:
        """TCP without TLS."""
        return self.address.startswith(PLAIN)

    @property
    def place(self) -> str:
        """What gRPC calls it."""
        for scheme in (TLS, PLAIN):
            if self.address.startswith(scheme):
                return self.address.removeprefix(scheme)
        return f"unix:{self.address.removeprefix(UNIX)}"

    @property
    def serve_option(self) -> str:
        """How a daemon is told to listen there."""
        if self.address.startswith(UNIX):
            return f"--grpc-listen {self.place}"
        return f"--grpc-listen {self.place} --grpc-tls-cert FILE --grpc-tls-key FILE --grpc-token-file FILE"
