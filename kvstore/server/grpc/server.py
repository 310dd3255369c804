"""``GrpcServer``: binds, secures and serves; health and reflection beside the service itself."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.config import GrpcOptions
from kvstore.config.addresses import UNIX_PREFIX, split_tcp
from kvstore.errors import ConfigError, DeniedError, InUseError
from kvstore.logs import about
from kvstore.native.heap import keep_freed_messages
from kvstore.server.grpc.access import Everybody, TokenFile
from kvstore.server.grpc.gateway import Gateway
from kvstore.server.grpc.service import Service, deny
from kvstore.server.grpc.streams import Streams
from kvstore.server.listen import SocketPlace
from kvstore.server.remote import Host, RemoteSessions
from kvstore.wire.rpc import SERVICE
from kvstore.wire.tls import belong_together

STOP_S = 5.0
"""How long calls that end may take to do so."""
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 20, 10
"""A peer that is gone without a word is noticed after the sum."""

log = logging.getLogger("kvstore.server.grpc")


class GrpcServer:
    """Serves gRPC for a daemon. Made, started and stopped on the loop's thread.

    Raises ConfigError if it can't listen (InUseError if another process does), or a certificate or a token file can't
    be used.
    """

    def __init__(
        self,
        options: GrpcOptions,
        loop: asyncio.AbstractEventLoop,
        host: Host,
        remotes: RemoteSessions,
        max_clients: int,
    ) -> None:
        self._remotes = remotes
        self._place: SocketPlace | None = None
        access = TokenFile(options.token_file) if options.token_file is not None else Everybody()
        self._pool = ThreadPoolExecutor(options.calls_max + max_clients + 1, "kvstore-grpc")
        keep_freed_messages()
        self._server = grpc.server(
            self._pool,
            interceptors=(_Gate(access),),
            options=_channel_options(options),
            maximum_concurrent_rpcs=options.calls_max + max_clients,
        )
        service = Service(Gateway(loop, host.after_request), host, remotes, access, options)
        handlers = {**service.handlers(), **Streams(service).handlers()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._health = health.HealthServicer(experimental_non_blocking=True)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.port = self._bind(options)
        """The port, which the kernel may have chosen; 0 for a Unix socket."""

    def start(self) -> None:
        """Take calls from now on."""
        self._server.start()
        for name in ("", SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Take no further calls, end those that run, and all sessions. Takes some seconds at most."""
        self._health.enter_graceful_shutdown()
        stopped = self._server.stop(grace=0)
        await self._remotes.end_all()
        if not await asyncio.to_thread(stopped.wait, STOP_S):
            log.warning(
                "some gRPC calls did not end within %.0f s", STOP_S, extra=about("grpc_calls_cut", waited_s=STOP_S)
            )
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._place is not None:
            self._place.close()

    def _bind(self, options: GrpcOptions) -> int:
        if not options.listen.startswith(UNIX_PREFIX):
            credentials = _credentials(options)
            return self._listen(options, lambda: self._server.add_secure_port(options.listen, credentials))
        self._place = SocketPlace(Path(options.listen.removeprefix(UNIX_PREFIX)), "--grpc-listen")
        try:
            with self._place.binding():
                self._listen(options, lambda: self._server.add_insecure_port(options.listen))
        except BaseException:
            self._place.close()
            raise
        return 0

    def _listen(self, options: GrpcOptions, add: Callable[[], int]) -> int:
        try:
            port = add()
        except (RuntimeError, ValueError) as error:
            raise _why_not(options, str(error)) from error
        log.info("gRPC on %s", options.listen, extra=about("grpc_serving", listen=options.listen))
        return port


class _Gate(grpc.ServerInterceptor):  # type: ignore[misc]
    """Turns away every call, health and reflection included, of somebody without a valid token."""

    def __init__(self, access: TokenFile | Everybody) -> None:
        self._access = access

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """See grpc.ServerInterceptor."""
        try:
            self._access.identify(handler_call_details.invocation_metadata)
        except DeniedError as error:
            return deny(error)
        return continuation(handler_call_details)


def _channel_options(options: GrpcOptions) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", options.message_bytes_max),
        ("grpc.max_send_message_length", -1),  # what the handlers answer has bounds of its own
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
        ("grpc.keepalive_permit_without_calls", 1),
    )


def _why_not(options: GrpcOptions, told: str) -> ConfigError:
    """Why gRPC does not listen, of which it says itself only that it could not: found by trying to bind there."""
    if options.listen.startswith(UNIX_PREFIX):
        return ConfigError(f"gRPC can't listen on {options.listen} ({told}): choose another", ("grpc.listen",))
    host, port = split_tcp(options.listen, "--grpc-listen", "grpc.listen")
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
    except OSError as error:
        kind_of_error = InUseError if error.errno == errno.EADDRINUSE else ConfigError
        return kind_of_error(
            f"gRPC can't listen on {options.listen}: {error.strerror or error}; choose another --grpc-listen",
            ("grpc.listen",),
        )
    return ConfigError(
        f"gRPC can't listen on {options.listen} ({told}): look whether --grpc-tls-cert, --grpc-tls-key and "
        "--grpc-client-ca hold what they should",
        ("grpc.listen", "grpc.tls_cert", "grpc.tls_key", "grpc.client_ca"),
    )


def _credentials(options: GrpcOptions) -> grpc.ServerCredentials:
    if options.tls_cert is None or options.tls_key is None:
        raise ConfigError("gRPC over TCP needs --grpc-tls-cert and --grpc-tls-key", ("grpc.listen",))
    client_ca = _read(options.client_ca, "--grpc-client-ca") if options.client_ca is not None else None
    key, certificate = _read(options.tls_key, "--grpc-tls-key"), _read(options.tls_cert, "--grpc-tls-cert")
    if not belong_together(certificate, key):
        raise ConfigError(
            f"--grpc-tls-key {options.tls_key} and --grpc-tls-cert {options.tls_cert} do not belong together: give the "
            "key for which this certificate was made",
            ("grpc.tls_cert", "grpc.tls_key"),
        )
    return grpc.ssl_server_credentials(
        [(key, certificate)],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


def _read(path: Path, option: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option} {path} can't be read: {error.strerror}; name another") from error
    if b"-----BEGIN" not in content:
        raise ConfigError(f"{option} {path} is no PEM file: convert it, or name another")
    return content
