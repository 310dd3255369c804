"""The gRPC server: clients of other hosts and in other languages, by the same handlers as on the Unix socket.

``GrpcServer`` in ``server.py`` is the face. Only ``open_server`` may be imported without grpcio.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.config import GrpcOptions
from kvstore.errors import ConfigError
from kvstore.server.remote import Host, RemoteSessions
from kvstore.wire.grpc_log import quieten

if TYPE_CHECKING:
    from kvstore.server.grpc.server import GrpcServer


def open_server(
    options: GrpcOptions, loop: asyncio.AbstractEventLoop, host: Host, remotes: RemoteSessions, max_clients: int
) -> GrpcServer | None:
    """The server that these options ask for, bound; None if they ask for none. Raises as it does.

    Raises ConfigError with the way out where grpcio is not installed.
    """
    if not options.enabled:
        return None
    quieten()
    try:
        from kvstore.server.grpc.server import GrpcServer
    except ImportError as error:
        raise ConfigError(
            f"--grpc-listen needs packages that are not installed ({error}): pip install '.[grpc]' in a checkout, "
            "or leave it out",
            ("grpc.listen",),
        ) from error
    return GrpcServer(options, loop, host, remotes, max_clients)
