"""A bare socket that speaks frames, for what no proper client would say."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import FLAG_ERROR, FLAG_REPLY, HEADER, HEADER_BYTES, Method, decode, encode


class Raw:
    """A bare socket that speaks frames."""

    def __init__(self, path: Any) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(str(path))

    def send(self, method: int, message: Any, request_id: int = 1) -> None:
        self.sock.sendall(encode(method, 0, request_id, message))

    def receive(self) -> tuple[int, int, int, bytes] | None:
        """The next frame, None at the end of the stream."""
        head = self._exactly(HEADER_BYTES)
        if head is None:
            return None
        length, method, flags, request_id = HEADER.unpack(head)
        payload = self._exactly(length)
        assert payload is not None
        return method, flags, request_id, payload

    def _exactly(self, n: int) -> bytes | None:
        data = b""
        while len(data) < n:
            try:
                part = self.sock.recv(n - len(data))
            except ConnectionResetError:
                return None
            if not part:
                return None
            data += part
        return data

    def error(self) -> pb.Error:
        frame = self.receive()
        assert frame is not None
        assert frame[1] == FLAG_REPLY | FLAG_ERROR
        return decode(pb.Error, frame[3])

    def hello(self, **fields: Any) -> None:
        self.send(Method.HELLO, pb.HelloRequest(**{"version_min": 1, "version_max": 1, **fields}))

    def greeted(self, **fields: Any) -> pb.HelloReply:
        """Say hello and take the answer."""
        self.hello(**fields)
        frame = self.receive()
        assert frame is not None
        return decode(pb.HelloReply, frame[3])


@pytest.fixture
def dial() -> Iterator[Callable[[Path], Raw]]:
    """``dial(socket_path)``: a connection; all are closed at the end."""
    opened: list[Raw] = []

    def connect(path: Path) -> Raw:
        opened.append(Raw(path))
        return opened[-1]

    yield connect
    for raw in opened:
        raw.sock.close()
