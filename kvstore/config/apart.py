"""What listens must do so in places of its own: two sockets of one daemon on one path or port can't both be had."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

from kvstore.config.addresses import UNIX_PREFIX, share_an_address, split_tcp
from kvstore.config.listeners import GrpcOptions, MetricsOptions
from kvstore.errors import ConfigError


def check_apart(socket_path: Path | None, holder_path: Path | None, grpc: GrpcOptions, metrics: MetricsOptions) -> None:
    """Raises ConfigError, naming both, if two of them are to listen in the same place."""
    paths = [("--socket", "socket_path", socket_path), ("--holder", "holder_path", holder_path)]
    if grpc.listen.startswith(UNIX_PREFIX):
        paths.append(("--grpc-listen", "grpc.listen", Path(grpc.listen.removeprefix(UNIX_PREFIX))))
    for (option, field, path), (other_option, other_field, other) in combinations(paths, 2):
        if path is not None and other is not None and _plain(path) == _plain(other):
            raise ConfigError(
                f"{option} and {other_option} are both {str(path)!r}: give each a Unix socket of its own",
                (field, other_field),
            )
    if not metrics.enabled or not grpc.enabled or grpc.listen.startswith(UNIX_PREFIX):
        return
    host, port = split_tcp(metrics.listen, "--metrics-listen", "metrics.listen")
    grpc_host, grpc_port = split_tcp(grpc.listen, "--grpc-listen", "grpc.listen")
    if port and port == grpc_port and share_an_address(host, grpc_host):
        raise ConfigError(
            f"--metrics-listen {metrics.listen} and --grpc-listen {grpc.listen} are both on port {port}: "
            "give each a port of its own",
            ("metrics.listen", "grpc.listen"),
        )


def _plain(path: Path) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - resolve() would ask this machine
