"""A bare echo server for many clients: one thread, epoll, no protocol but the length of what is to come back."""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.bench.measure import leave_interrupts_to_parent
from kvstore.errors import UnavailableError

HEAD = struct.Struct("<II")
"""Before each message: how long it is, and how long the answer is to be (0: none)."""
START_S = 60.0


class CrowdEcho:
    """The server, in a process of its own. A context manager."""

    def __init__(self, socket_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        ready, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(str(socket_path), theirs), daemon=True)
        self._process.start()
        theirs.close()
        with ready:
            try:
                is_ready = ready.poll(START_S) and ready.recv_bytes() == b"ready"
            except EOFError:
                is_ready = False
        if not is_ready:
            self.close()
            raise UnavailableError("the echo server did not start; run the benchmark again")

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid or 0

    def close(self) -> None:
        """End it; blocks until it is gone."""
        self._process.kill()
        self._process.join()
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EchoCaller:
    """One client of it."""

    def __init__(self, socket_path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(socket_path)

    def call(self, n_request: int, n_reply: int) -> None:
        """Send so many bytes and wait for so many (none: don't wait)."""
        self._sock.sendall(HEAD.pack(n_request, n_reply) + bytes(n_request))
        while n_reply:
            got = len(self._sock.recv(n_reply))
            if not got:
                raise UnavailableError("the echo server went away; run the benchmark again")
            n_reply -= got

    def close(self) -> None:
        self._sock.close()


def _serve(socket_path: str, ready: Any) -> None:
    leave_interrupts_to_parent()
    selector = selectors.EpollSelector()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(socket_path)
        listening.listen(1024)
        selector.register(listening, selectors.EVENT_READ, bytearray())
        ready.send_bytes(b"ready")
        ready.close()
        while True:
            for key, _ in selector.select():
                if key.fileobj is listening:
                    selector.register(listening.accept()[0], selectors.EVENT_READ, bytearray())
                elif not _answer(key.fileobj, key.data):
                    selector.unregister(key.fileobj)


def _answer(sock: Any, inbox: bytearray) -> bool:
    """Take what has come and answer what is whole; False if the client is gone."""
    try:
        data = sock.recv(1 << 18)
        inbox += data
        while len(inbox) >= HEAD.size:
            n_request, n_reply = HEAD.unpack_from(inbox)
            if len(inbox) < HEAD.size + n_request:
                break
            if n_reply:
                sock.sendall(bytes(n_reply))
            del inbox[: HEAD.size + n_request]
    except OSError:
        return False
    return bool(data)
