"""Redis (or Valkey) with a server of its own on a Unix socket.

Option ``way``: ``raw`` speaks RESP on a bare socket and receives right into the caller's array, the strongest client
that Python can have; ``redis-py`` is the usual client with its C parser. Pipelines and MSET/MGET move whole batches.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from kvstore.bench.peers.driver import Batch, Blocks, Setup

_TIMEOUT_S = 30
_STOP_S = 10.0
_SOCKET_BYTES = 4 << 20
_IN_FLIGHT = 2
"""GETs on their way: the server prepares one answer while another is being received."""


class _Way(Protocol):
    """How a client moves a batch."""

    version: str

    def put(self, keys: list[str], blocks: Blocks) -> int: ...
    def get(self, keys: list[str], out: Blocks) -> int: ...
    def lookup(self, keys: list[str]) -> int: ...
    def drop(self, keys: list[str]) -> None: ...
    def close(self) -> None: ...


class Redis:
    """A server process and one client of it."""

    def __init__(self, setup: Setup) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise FileNotFoundError("neither redis-server nor valkey-server is on the PATH")
        path = str(Path(setup.folder) / "redis.sock")
        command = [
            program,
            "--port",
            "0",
            "--unixsocket",
            path,
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            setup.folder,
        ]
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)  # noqa: S603
        try:
            connection = _connected(path, self._server)
            self._way: _Way = _Raw(connection) if setup.options["way"] == "raw" else _RedisPy(path)
        except BaseException:
            self._stop()
            raise
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)  # noqa: S603
        name, _, rest = version.stdout.partition(" v=")
        self.version = f"{name.split()[0]} {rest.split()[0]}, {self._way.version}"

    def put(self, batch: Batch, blocks: Blocks) -> int:
        return self._way.put(batch.keys, blocks)

    def get(self, batch: Batch, out: Blocks) -> int:
        return self._way.get(batch.keys, out)

    def lookup(self, batch: Batch) -> int:
        return self._way.lookup(batch.keys)

    def drop(self, batch: Batch) -> None:
        self._way.drop(batch.keys)

    def pids(self) -> list[int]:
        return [self._server.pid]

    def close(self) -> None:
        self._way.close()
        self._stop()

    def _stop(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def _connected(path: str, server: subprocess.Popen[bytes]) -> socket.socket:
    """A connection to a server that is just starting. Raises OSError if it does not come up."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return connection


class _Raw:
    """RESP by hand, on a blocking socket: two system calls for a value, no buffer in between."""

    def __init__(self, connection: socket.socket) -> None:
        self.version = "raw RESP"
        self._socket = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        # Not settimeout, which would make the socket non-blocking, and MSG_WAITALL of no effect.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _TIMEOUT_S, 0))

    def put(self, keys: list[str], blocks: Blocks) -> int:
        for key, block in zip(keys, blocks, strict=True):
            name = key.encode()
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(block))
            self._send([head, memoryview(block), b"\r\n"])
        return sum(self._receive(5) == b"+OK\r\n" for _ in keys)

    def get(self, keys: list[str], out: Blocks) -> int:
        head = b"$%d\r\n" % out.shape[1]
        got, end = bytearray(len(head)), bytearray(2)
        wanted = len(head) + out.shape[1] + len(end)
        for key in keys[:_IN_FLIGHT]:
            self._send([_command(b"GET", key)])
        for i, room in enumerate(out):
            n = self._socket.recvmsg_into([got, room, end], 0, socket.MSG_WAITALL)[0]
            if n != wanted or got != head:
                raise LookupError(f"{keys[i]}: {bytes(got)!r} instead of a value of {out.shape[1]} bytes")
            if i + _IN_FLIGHT < len(keys):
                self._send([_command(b"GET", keys[i + _IN_FLIGHT])])
        return len(keys)

    def lookup(self, keys: list[str]) -> int:
        return self._number(_command(b"EXISTS", *keys))

    def drop(self, keys: list[str]) -> None:
        self._number(_command(b"DEL", *keys))

    def close(self) -> None:
        self._socket.close()

    def _number(self, command: bytes) -> int:
        self._send([command])
        line = b""
        while not line.endswith(b"\r\n"):
            part = self._socket.recv(64)
            if not part:
                raise ConnectionError("the server went away")
            line += part
        return int(line[1:])

    def _send(self, parts: list[Any]) -> None:
        """All of the parts, which are few."""
        rest = [memoryview(part).cast("B") for part in parts]
        while rest:
            n = self._socket.sendmsg(rest)
            while rest and n >= len(rest[0]):
                n -= len(rest.pop(0))
            if n:
                rest[0] = rest[0][n:]

    def _receive(self, n: int) -> bytes:
        return self._socket.recv(n, socket.MSG_WAITALL)


class _RedisPy:
    """The usual client."""

    def __init__(self, path: str) -> None:
        import redis

        self._client: Any = redis.Redis(unix_socket_path=path, socket_timeout=_TIMEOUT_S)
        parser = type(self._client.connection_pool.make_connection()._parser).__name__  # noqa: SLF001 - to be shown
        self.version = f"redis-py {importlib.metadata.version('redis')} ({parser.strip('_')})"

    def put(self, keys: list[str], blocks: Blocks) -> int:
        self._client.mset({key: memoryview(block) for key, block in zip(keys, blocks, strict=True)})
        return len(keys)

    def get(self, keys: list[str], out: Blocks) -> int:
        n = 0
        for room, value in zip(out, self._client.mget(keys), strict=True):
            if value is not None:
                room[:] = np.frombuffer(value, np.uint8)
                n += 1
        return n

    def lookup(self, keys: list[str]) -> int:
        return int(self._client.exists(*keys))

    def drop(self, keys: list[str]) -> None:
        self._client.delete(*keys)

    def close(self) -> None:
        self._client.close()


def _command(*words: bytes | str) -> bytes:
    parts = [word if isinstance(word, bytes) else word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def open_system(setup: Setup) -> Redis:
    return Redis(setup)
