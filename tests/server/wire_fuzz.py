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
from typing import Any

import psutil
from google.protobuf.message import DecodeError, Message

from kvstore.types import KVSpec, Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import FLAG_ERROR, FLAG_NO_REPLY, HEADER, HEADER_BYTES, REQUESTS, Method

NAMESPACE = Namespace("fuzz", KVSpec.opaque(4, 4096))
ANSWER_S = 10.0
SHORT_WAIT_S = 0.01
NOISY = {Method.GOODBYE: 0.02, Method.HELLO: 0.1, Method.VERIFY: 0.1}
"""Requests that end a session or work for long are sent less often than the others."""


class WireFuzz:
    """Sends, and counts what came of it in ``outcomes``."""

    def __init__(self, socket_path: Path, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._path = socket_path
        self._dice = random.Random(seed)
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
        return self._framed(method, self._filled(REQUESTS[method]()).SerializeToString())

    def _odd_bytes(self) -> bytes:
        """Such a message with bytes changed, put in, or left out."""
        method = self._method()
        payload = bytearray(self._filled(REQUESTS[method]()).SerializeToString())
        for _ in range(self._dice.randint(1, 4)):
            at = self._dice.randint(0, len(payload))
            change = self._dice.randint(0, 2)
            if change == 0:
                payload[at:at] = self._dice.randbytes(self._dice.randint(1, 9))
            elif change == 1:
                del payload[at : at + self._dice.randint(1, 9)]
            elif at < len(payload):
                payload[at] ^= 1 << self._dice.randint(0, 7)
        return self._framed(method, bytes(payload))

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

    def _filled(self, message: Any, depth: int = 0) -> Message:
        for field in message.DESCRIPTOR.fields:
            if self._dice.random() < 0.25:
                continue
            if field.message_type is not None:
                if field.message_type.GetOptions().map_entry or depth > 2:
                    continue
                if field.is_repeated:
                    for _ in range(self._dice.randint(0, 3)):
                        self._filled(getattr(message, field.name).add(), depth + 1)
                else:
                    self._filled(getattr(message, field.name), depth + 1)
            elif field.is_repeated:
                getattr(message, field.name).extend(self._value(field) for _ in range(self._dice.randint(0, 5)))
            else:
                setattr(message, field.name, self._value(field))
        return message  # type: ignore[no-any-return]

    def _value(self, field: Any) -> Any:
        dice = self._dice
        if field.enum_type is not None:
            return dice.choice(field.enum_type.values).number
        if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            odd = [0.0, 1.0, -1.0, 1e-9, 3e9, float("nan"), float("inf"), -float("inf")]
            return dice.choice([0.0, SHORT_WAIT_S] if "wait" in field.name else odd)
        if field.cpp_type == field.CPPTYPE_BOOL:
            return dice.random() < 0.5
        if field.type == field.TYPE_BYTES:
            return dice.choice([b"", NAMESPACE.digest(), dice.randbytes(dice.choice([1, 4, 16, 64, 4096]))])
        if field.type == field.TYPE_STRING:
            if "json" in field.name:
                return self._odd_description()
            return dice.choice(["", "default", "a", "\0", "x" * 5000, "\u20ac\U0001f600", "../../etc"])
        bits = 32 if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_INT32) else 64
        signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
        most = (1 << (bits - 1 if signed else bits)) - 1
        return dice.choice([0, 1, 2, 3, 1 << 20, most, dice.randint(0, most)])

    def _odd_description(self) -> str:
        plain = NAMESPACE.to_dict()
        for _ in range(self._dice.randint(0, 2)):
            name = self._dice.choice(sorted(plain))
            plain[name] = self._dice.choice([None, -1, 0, 1 << 40, "", "x" * 2000, [], {}, [[[]]], 1.5, True])
        text = json.dumps(plain)
        return text if self._dice.random() < 0.8 else text[: self._dice.randint(0, len(text))]

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
