"""Malformed frames and messages in numbers, against a daemon that is a process of its own.

Whatever is sent, one of three things must follow: a reply to it, the end of the connection, or, for a request
that asks to wait, the wait it asked for. The daemon must be alive at the end, and no larger than it was.
"""

from __future__ import annotations

import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
from google.protobuf.message import DecodeError, Message

from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import FLAG_ERROR, FLAG_NO_REPLY, HEADER, HEADER_BYTES, REQUESTS, Method
from tests.server.odd_messages import NAMESPACE, OddMessages

ANSWER_S = 10.0
NOISY = {Method.GOODBYE: 0.02, Method.HELLO: 0.1, Method.VERIFY: 0.1}
"""Requests that end a session or work for long are sent less often than the others."""


class WireFuzz:
    """Sends, and counts what came of it in ``outcomes``."""

    def __init__(self, socket_path: Path, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._path = socket_path
        self._dice = random.Random(seed)
        self._odd = OddMessages(self._dice)
        self._sock: socket.socket | None = None
        self._shapes: list[tuple[float, Callable[[], bytes]]] = [
            (5.0, self._odd_fields), (3.0, self._odd_bytes), (1.0, self._odd_header), (1.0, self._cut_short),
            (0.5, self._noise),
        ]  # fmt: skip

    def run(self, n_frames: int, pid: int) -> tuple[int, int]:
        """Send so many; the resident bytes of process ``pid`` when a tenth was sent, and at the end."""
        process = psutil.Process(pid)
        early_bytes = 0
        weights, shapes = zip(*self._shapes, strict=True)
        try:
            for number in range(n_frames):
                if number == n_frames // 10:
                    early_bytes = process.memory_info().rss
                (shape,) = self._dice.choices(shapes, weights)
                self._send(shape())
        finally:
            self._close()
        return early_bytes, process.memory_info().rss

    # What is sent ----------------------------------------------------------------------------------

    def _method(self) -> int:
        while True:
            method = self._dice.choice(sorted(REQUESTS))
            if self._dice.random() < NOISY.get(Method(method), 1.0):
                return method

    def _odd_fields(self) -> bytes:
        """A message whose fields are of the right type and hardly ever make sense."""
        method = self._method()
        return self._framed(method, self._odd.filled(REQUESTS[method]()).SerializeToString())

    def _odd_bytes(self) -> bytes:
        """Such a message with bytes changed, put in, or left out."""
        method = self._method()
        payload = self._odd.filled(REQUESTS[method]()).SerializeToString()
        return self._framed(method, self._odd.spoiled(payload))

    def _odd_header(self) -> bytes:
        length = self._dice.choice([0, 1, 15, 1 << 20, (1 << 20) + 1, 1 << 26, (1 << 26) + 1, (1 << 32) - 1])
        method = self._dice.choice([0, 19, 20, 77, 999, 65535, self._method()])
        return struct.pack(
            "<IHHQ", length, method, self._dice.choice([0, 1, 2, 4, 8, 0xFFFF]), self._dice.getrandbits(64)
        )

    def _cut_short(self) -> bytes:
        whole = self._odd_fields()
        return whole[: self._dice.randint(1, len(whole) - 1)]

    def _noise(self) -> bytes:
        return self._dice.randbytes(self._dice.randint(1, 4096))

    def _framed(self, method: int, payload: bytes) -> bytes:
        flags = FLAG_NO_REPLY if self._dice.random() < 0.05 else 0
        return HEADER.pack(len(payload), method, flags, self._dice.getrandbits(63)) + payload

    # What comes back -------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        sock = self._sock or self._connect()
        try:
            sock.sendall(data)
            if not _is_whole(data):
                sock.shutdown(socket.SHUT_WR)
                self._until_closed()
            elif HEADER.unpack_from(data)[2] & FLAG_NO_REPLY:
                self._probe()
            else:
                self._until_answered(data)
        except (BrokenPipeError, ConnectionResetError):
            self._note("closed")

    def _until_closed(self) -> None:
        while self._receive() is not None:
            pass
        self._note("closed")

    def _probe(self) -> None:
        """Nothing comes back for such a frame; the next one must still be heard."""
        assert self._sock is not None
        self._sock.sendall(HEADER.pack(0, Method.HEARTBEAT, 0, 0))
        self._until_id(0, "heard")

    def _until_answered(self, data: bytes) -> None:
        _, method, _, request_id = HEADER.unpack_from(data)
        try:
            self._until_id(request_id, "answered")
        except TimeoutError:
            if not _asks_to_wait(method, data[HEADER_BYTES:]):
                raise AssertionError(f"{Method(method).name}: no answer to {data.hex()}") from None
            self._note("waiting")
            self._close()

    def _until_id(self, request_id: int, outcome: str) -> None:
        while (frame := self._receive()) is not None:
            method, flags, frame_id, payload = frame
            if frame_id == request_id:
                if flags & FLAG_ERROR:
                    error = pb.Error.FromString(payload)
                    assert error.code != pb.INTERNAL, f"{Method(method).name}: a fault of the daemon: {error.message}"
                self._note(outcome)
                return
        self._note("closed")

    def _note(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        if outcome == "closed":
            self._close()

    def _receive(self) -> tuple[int, int, int, bytes] | None:
        """Method, flags, request id and payload of the next frame; None at the end."""
        head = self._exactly(HEADER_BYTES)
        if head is None:
            return None
        length, method, flags, request_id = HEADER.unpack(head)
        payload = self._exactly(length)
        return None if payload is None else (method, flags, request_id, payload)

    def _exactly(self, n_bytes: int) -> bytes | None:
        assert self._sock is not None
        data = b""
        while len(data) < n_bytes:
            part = self._sock.recv(n_bytes - len(data))
            if not part:
                return None
            data += part
        return data

    def _connect(self) -> socket.socket:
        sock = self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(ANSWER_S)
        sock.connect(str(self._path))
        if self._dice.random() < 0.9:
            self._say(Method.HELLO, pb.HelloRequest(version_min=1, version_max=1, tenant="default"))
            self._say(Method.OPEN_NAMESPACE, pb.OpenNamespaceRequest(description_json=json.dumps(NAMESPACE.to_dict())))
        return sock

    def _say(self, method: Method, message: Message) -> None:
        assert self._sock is not None
        payload = message.SerializeToString()
        self._sock.sendall(HEADER.pack(len(payload), method, 0, 1) + payload)
        assert self._receive() is not None, f"{method.name} was not answered"

    def _close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _is_whole(data: bytes) -> bool:
    """Whether it is exactly one frame that a daemon can take: if not, it will wait for the rest or hang up."""
    return len(data) >= HEADER_BYTES and len(data) == HEADER_BYTES + HEADER.unpack_from(data)[0]


def _asks_to_wait(method: int, payload: bytes) -> bool:
    try:
        request = REQUESTS[method].FromString(payload)
    except DecodeError:
        return False
    return bool(getattr(request, "wait_s", 0.0) >= ANSWER_S)
