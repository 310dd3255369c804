"""The HTTP server: ``/metrics``, ``/health`` and ``/ready``, on threads of its own.

It answers also while the daemon's loop is stuck, and says so. Whoever keeps it busy finds a bound: so many requests
at a time, so many seconds each; nothing of a request is kept, and no body is read. Who connects and asks nothing keeps
nobody out: the next one takes its place.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvstore import __version__
from kvstore.config import MetricsOptions
from kvstore.config.addresses import split_tcp
from kvstore.errors import ConfigError, InUseError
from kvstore.http.exposition import expose
from kvstore.http.health import Verdict, health, readiness
from kvstore.http.source import Snapshot, Source
from kvstore.logs import about

REQUESTS_MAX = 16
DROPPED_MAX = 16
"""Connections that lost their place to a later one, and whose threads have yet to notice."""
REQUEST_S_MAX = 10.0
REQUEST_S_SAFE = 2.0
"""Who has asked something keeps its place for so long at least, whoever else comes."""
SNAPSHOT_S_MAX = 1.0
"""How long the daemon's loop is waited for."""
STOP_S_MAX = 5.0
ACCEPT_PAUSE_S = 0.25
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("kvstore.http")


class HttpServer:
    """Serves ``source`` from ``start`` to ``stop``. Raises ConfigError from the constructor if it can't listen."""

    def __init__(self, options: MetricsOptions, source: Source) -> None:
        host, port = split_tcp(options.listen, "--metrics-listen", "metrics.listen")
        try:
            self._server = _Server(host, port, source)
        except OSError as error:
            raise (InUseError if error.errno == errno.EADDRINUSE else ConfigError)(
                f"metrics can't be served on {options.listen}: {error.strerror or error}; choose another address with "
                "--metrics-listen, or none",
                ("metrics.listen",),
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.25,), name="kvstore-http", daemon=True
        )

    @property
    def port(self) -> int:
        """The port in use, which the kernel chose if it was to be 0."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Answer from now on. Does not block."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering; requests under way are cut off. Idempotent; blocks for a moment."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(STOP_S_MAX)
        self._server.server_close()
        self._server.cut_off(before_s=float("inf"))

    def after_fork(self) -> None:
        """In a forked child: the listening socket is the parent's alone."""
        self._server.socket.close()


class _Server(ThreadingHTTPServer):
    """A thread a request, within bounds."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, source: Source) -> None:
        self.source = source
        self.last = Snapshot()
        self._begun_s: dict[socket.socket, float] = {}
        """In the order in which they came."""
        self._asked: set[socket.socket] = set()
        """Those whose whole request is here."""
        self._dropped: set[socket.socket] = set()
        self._lock = threading.Lock()
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        # Without the look-up of a name that the base class makes for it, which may take seconds.
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in NO_RESOURCES:
                time.sleep(ACCEPT_PAUSE_S)  # on this thread only; without it, it would ask again and again
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the library's interface
        with self._lock:
            now_s = time.monotonic()
            if len(self._begun_s) - len(self._dropped) >= REQUESTS_MAX:
                late = self._worth_least(now_s)
                if late is None or len(self._dropped) >= DROPPED_MAX:
                    return False
                self._dropped.add(late)
                _end(late)
            self._begun_s[request] = now_s
            return True

    def _worth_least(self, now_s: float) -> socket.socket | None:
        """Whose place a later one may have: the first that has asked nothing yet, or else that takes too long."""
        places = [request for request in self._begun_s if request not in self._dropped]
        idle = (request for request in places if request not in self._asked)
        slow = (request for request in places if now_s - self._begun_s[request] > REQUEST_S_SAFE)
        return next(idle, None) or next(slow, None)

    def asked(self, request: socket.socket) -> None:
        """The whole request is here."""
        with self._lock:
            self._asked.add(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._begun_s.pop(request, None)
            self._asked.discard(request)
            self._dropped.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self.cut_off(time.monotonic() - REQUEST_S_MAX)

    def cut_off(self, before_s: float) -> None:
        """End the requests that began before then: their threads find a closed connection."""
        with self._lock:
            late = [request for request, begun_s in self._begun_s.items() if begun_s < before_s]
        for request in late:
            _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the library's interface
        log.debug("an HTTP request ended early", exc_info=True, extra=about("http_request_failed"))


def _end(request: socket.socket) -> None:
    """Its thread finds a closed connection. Does not block."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    timeout = REQUEST_S_MAX
    server_version = f"kvstored/{__version__}"
    sys_version = ""

    def parse_request(self) -> bool:
        whole = super().parse_request()
        if whole:
            self.server.asked(self.connection)
        return whole

    def do_GET(self) -> None:
        try:
            self._route()
        except ConnectionError:
            raise
        except Exception:
            log.exception("an HTTP request failed", extra=about("http_request_failed", path=self.path[:80]))
            self._answer(500, b"the daemon's log has the details\n", "text/plain")

    do_HEAD = do_GET  # noqa: N815 - the library's interface

    def _route(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, *self._metrics())
        elif path == "/health":
            self._verdict(health(self.server.source.pulse()))
        elif path == "/ready":
            snapshot, fresh = self._snapshot()
            self._verdict(readiness(self.server.source.pulse(), snapshot if fresh else None))
        else:
            self._answer(404, b"kvstored: there are /metrics, /health and /ready\n", "text/plain")

    def _metrics(self) -> tuple[bytes, str]:
        snapshot, fresh = self._snapshot()
        return expose(self.headers.get("Accept", ""), self.server.source.pulse(), snapshot, fresh=fresh)

    def _snapshot(self) -> tuple[Snapshot, bool]:
        """The newest numbers there are, and whether they are of now."""
        pulse = self.server.source.pulse()
        now = None if pulse.stuck else self.server.source.snapshot(SNAPSHOT_S_MAX)
        if now is None:
            return self.server.last, False
        self.server.last = now
        return now, True

    def _verdict(self, verdict: Verdict) -> None:
        self._answer(verdict.status, json.dumps(verdict.body).encode() + b"\n", "application/json")

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's interface
        log.debug(format, *args, extra=about("http_request", peer=self.client_address[0]))
