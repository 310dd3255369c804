"""What else the daemon may listen on beside its own socket: gRPC, and HTTP for metrics and health."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore.config.addresses import UNIX_PREFIX, is_loopback, split_tcp
from kvstore.config.checked import check_types
from kvstore.config.paths import check_socket_path
from kvstore.config.units import MIB, format_size
from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """The gRPC server. Raises ConfigError for what can't work or would be open to others.

    ``listen`` is ``unix:/path`` or ``host:port``; empty = there is none. Over TCP, loopback included, clients need
    TLS (``tls_cert``, ``tls_key``) and a token of ``token_file``; with ``client_ca`` also a certificate of it.
    A message has at most ``message_bytes_max``, a call lasts at most ``deadline_s_max``, and ``calls_max`` run at a
    time, ``calls_per_token`` of them with one token (0: half of ``calls_max``).
    """

    listen: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    token_file: Path | None = None
    message_bytes_max: int = 16 * MIB
    deadline_s_max: float = 60.0
    calls_max: int = 1024
    calls_per_token: int = 0

    def __post_init__(self) -> None:
        check_types(self, "grpc.")
        if self.listen.startswith(UNIX_PREFIX):
            check_socket_path(Path(self.listen.removeprefix(UNIX_PREFIX)), "grpc.listen")
            self._check_unix()
        elif self.listen:
            split_tcp(self.listen, "--grpc-listen", "grpc.listen")
            self._check_tcp()
        if (self.tls_cert is None) != (self.tls_key is None):
            given, lacking = ("certificate", "key") if self.tls_key is None else ("key", "certificate")
            raise ConfigError(
                f"gRPC has a TLS {given} and no {lacking}: give both --grpc-tls-cert and --grpc-tls-key",
                ("grpc.tls_cert", "grpc.tls_key"),
            )
        if self.client_ca is not None and self.tls_cert is None:
            raise ConfigError(
                "--grpc-client-ca checks the certificates of clients, which needs TLS: give --grpc-tls-cert and "
                "--grpc-tls-key too",
                ("grpc.client_ca",),
            )
        if not 64 << 10 <= self.message_bytes_max <= 1024 * MIB:
            raise ConfigError(
                f"--grpc-message-max is {format_size(self.message_bytes_max)}; it must be from 64KiB to 1GiB",
                ("grpc.message_bytes_max",),
            )
        if not 0.01 <= self.deadline_s_max <= 86400:
            raise ConfigError(
                f"--grpc-deadline-max is {self.deadline_s_max!r}; it must be from 0.01 to 86400 seconds",
                ("grpc.deadline_s_max",),
            )
        if not 1 <= self.calls_max <= 65536:
            raise ConfigError(f"--grpc-calls-max is {self.calls_max}; it must be from 1 to 65536", ("grpc.calls_max",))
        if not 0 <= self.calls_per_token <= self.calls_max:
            raise ConfigError(
                f"--grpc-calls-per-token is {self.calls_per_token}; it must be from 1 to --grpc-calls-max, "
                f"{self.calls_max}, or 0 for half of that",
                ("grpc.calls_per_token", "grpc.calls_max"),
            )
        if not self.listen:
            self._check_off()

    def _check_unix(self) -> None:
        unused = [
            (option, field)
            for option, field, value in (
                ("--grpc-tls-cert", "tls_cert", self.tls_cert),
                ("--grpc-tls-key", "tls_key", self.tls_key),
                ("--grpc-client-ca", "client_ca", self.client_ca),
            )
            if value is not None
        ]
        if unused:
            options, fields = zip(*unused, strict=True)
            raise ConfigError(
                f"gRPC on {self.listen} has no TLS, as no network is involved: leave out {', '.join(options)}, "
                "or listen on host:port",
                ("grpc.listen", *(f"grpc.{field}" for field in fields)),
            )

    def _check_off(self) -> None:
        idle = next((name for name in ("token_file", "tls_cert", "tls_key", "client_ca") if getattr(self, name)), None)
        if idle is not None:
            raise ConfigError(
                f"--grpc-{idle.replace('_', '-')} needs --grpc-listen: without a gRPC server it has no effect",
                (f"grpc.{idle}", "grpc.listen"),
            )

    def _check_tcp(self) -> None:
        lacking = [
            option
            for option, value in (
                ("--grpc-tls-cert", self.tls_cert),
                ("--grpc-tls-key", self.tls_key),
                ("--grpc-token-file", self.token_file),
            )
            if value is None
        ]
        if lacking:
            raise ConfigError(
                f"gRPC on {self.listen} would be open to every user of the network or this machine: give also "
                f"{', '.join(lacking)}; or listen on a Unix socket, --grpc-listen unix:/path/of/socket",
                ("grpc.listen",),
            )

    @property
    def enabled(self) -> bool:
        return bool(self.listen)

    @property
    def calls_per_token_max(self) -> int:
        """The bound in force."""
        return self.calls_per_token or (self.calls_max + 1) // 2


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """The HTTP server for ``/metrics``, ``/health`` and ``/ready``. Raises ConfigError.

    ``listen`` is ``host:port``; empty = there is none. It must be a loopback address, as there is neither TLS nor a
    token, unless ``allow_remote`` says that the network is trusted. A loop that was not seen for ``stall_s`` counts
    as stuck.
    """

    listen: str = ""
    allow_remote: bool = False
    stall_s: float = 5.0

    def __post_init__(self) -> None:
        check_types(self, "metrics.")
        if self.listen:
            host, _ = split_tcp(self.listen, "--metrics-listen", "metrics.listen")
            if not (self.allow_remote or is_loopback(host)):
                raise ConfigError(
                    f"metrics on {self.listen} could be read from other machines, without TLS or a token: listen on "
                    "127.0.0.1 or [::1] behind a proxy, or say that the network is trusted with --metrics-allow-remote",
                    ("metrics.listen", "metrics.allow_remote"),
                )
        if not 0.1 <= self.stall_s <= 3600:
            raise ConfigError(
                f"--metrics-stall is {self.stall_s!r}; it must be from 0.1 to 3600 seconds", ("metrics.stall_s",)
            )

    @property
    def enabled(self) -> bool:
        return bool(self.listen)
