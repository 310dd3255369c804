"""Clients of other hosts: the same interface over gRPC, with blocks copied instead of mapped.

``RemoteLink`` in ``link.py`` is the face. Only ``remote_link`` and ``target.py`` may be imported without grpcio.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.client.remote.target import Pem, Target
from kvstore.errors import BadInputError
from kvstore.wire.grpc_log import quieten
from kvstore.wire.tls import belong_together

if TYPE_CHECKING:
    from kvstore.client.remote.link import RemoteLink


def remote_link(
    address: str,
    token: str | None,
    root_certificates: Pem | None,
    client_certificate: Sequence[Pem] | None,
) -> RemoteLink:
    """The way to a gRPC server. Reads the files. Raises BadInputError, also where grpcio is not installed."""
    pair = None
    if client_certificate is not None:
        if isinstance(client_certificate, str | bytes) or len(client_certificate) != 2:
            raise BadInputError("client_certificate must be two: the certificate and its key, as PEM files or bytes")
        certificate, key = (_pem("client_certificate", part) for part in client_certificate)
        if not belong_together(certificate, key):
            raise BadInputError("client_certificate: the key belongs to another certificate; give the two of a pair")
        pair = (certificate, key)
    roots = _pem("root_certificates", root_certificates) if root_certificates is not None else None
    target = Target(address, token or "", roots, pair)
    quieten()
    try:
        from kvstore.client.remote.link import RemoteLink
    except ImportError as error:
        raise BadInputError(
            f"{address} needs packages that are not installed ({error}): pip install '.[grpc]' in a checkout"
        ) from error
    return RemoteLink(target)


def _pem(name: str, given: Pem) -> bytes:
    if isinstance(given, bytes):
        return given
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise BadInputError(f"{name} {os.fspath(given)!r:.200} can't be read: {error.strerror}") from error
