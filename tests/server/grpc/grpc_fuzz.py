"""Malformed and misplaced gRPC calls in numbers, against a daemon that is a process of its own.

Whatever is sent, each call must end: with a reply, or with a status that says whose fault it was. A fault of the
daemon, or a call that nothing comes back to, fails the run.
"""

from __future__ import annotations

import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import psutil
import xxhash
from google.protobuf.message import DecodeError, Message

from kvstore.server.remote import LOCAL
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from kvstore.wire.framing import REPLIES, REQUESTS, Method
from kvstore.wire.rpc import ERROR_KEY, SERVICE, SESSION_KEY, TENANT_KEY, rpc_name
from tests.server.odd_messages import NAMESPACE, OddMessages

ANSWER_S = 60.0
WAITED_S = 0.02
"""How long a call that asks to wait for long is waited for."""
MESSAGE_BYTES_MAX = 64 << 10
"""What the daemon must be told to take at most."""
TOKEN = "a-token-for-any-tenant"  # noqa: S105 - of the daemon under test
OTHERS_TOKEN = "a-token-for-the-other-tenant"  # noqa: S105
TOKEN_FILE = f"{TOKEN}\n{OTHERS_TOKEN} other\n"
BLOCK_BYTES = NAMESPACE.spec.block_bytes
BLOCK_TOKENS = NAMESPACE.spec.block_tokens
NOISY: dict[Any, float] = {Method.GOODBYE: 0.02, Method.VERIFY: 0.1}
"""As in ``wire_fuzz``."""
UNARY = {rpc_name(method.name): method for method in sorted(REPLIES) if method not in LOCAL}  # type: ignore[attr-defined]
GRPC_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

Metadata = tuple[tuple[str, str | bytes], ...]


class GrpcFuzz:
    """Calls, and counts what came of it in ``outcomes``: by the shape of the call, and its status."""

    def __init__(self, target: str, seed: int) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._path = target.removeprefix("unix:")
        self._dice = random.Random(seed)
        self._odd = OddMessages(self._dice)
        self._channel = grpc.insecure_channel(target)
        self._stream: Any = None
        self._metadata: Metadata = ()
        self._shape = ""
        self._shapes: list[tuple[float, Callable[[], None]]] = [
            (6.0, self._odd_fields), (3.0, self._odd_bytes), (2.0, self._read), (3.0, self._write),
            (1.0, self._odd_metadata), (1.0, self._not_that_way), (1.0, self._too_late), (0.5, self._cancelled),
            (0.5, self._session), (0.3, self._too_long), (0.3, self._no_grpc),
        ]  # fmt: skip

    def run(self, n_calls: int, pid: int) -> tuple[int, int]:
        """Make so many calls; the resident bytes of process ``pid`` when a tenth was made, and at the end."""
        process = psutil.Process(pid)
        early_bytes = 0
        weights, shapes = zip(*self._shapes, strict=True)
        try:
            for number in range(n_calls):
                if number == n_calls // 10:
                    early_bytes = process.memory_info().rss
                if self._stream is None or self._dice.random() < 0.005:
                    self._begin_session()
                (shape,) = self._dice.choices(shapes, weights)
                self._shape = shape.__name__.strip("_")
                shape()
        finally:
            self._channel.close()
        return early_bytes, process.memory_info().rss

    # What is called --------------------------------------------------------------------------------

    def _odd_fields(self) -> None:
        """A message whose fields are of the right type and hardly ever make sense."""
        name = self._name()
        self._unary(name, self._odd.filled(REQUESTS[UNARY[name]]()).SerializeToString())

    def _odd_bytes(self) -> None:
        """Such a message with bytes changed, put in, left out, or cut off; or no message at all."""
        name = self._name()
        payload = self._odd.filled(REQUESTS[UNARY[name]]()).SerializeToString()
        spoiled = (
            self._odd.spoiled(payload),
            payload[: self._dice.randint(0, len(payload))],
            self._dice.randbytes(self._dice.randint(1, 4096)),
        )
        self._unary(name, self._dice.choice(spoiled))

    def _odd_metadata(self) -> None:
        """Who calls is nobody, somebody else, or says so twice."""
        name = self._name()
        payload = self._odd.filled(REQUESTS[UNARY[name]]()).SerializeToString()
        self._unary(name, payload, metadata=self._dice.choice(self._wrong_metadata()))

    def _wrong_metadata(self) -> list[Metadata]:
        mine = self._metadata
        named = (("authorization", f"Bearer {TOKEN}"),)
        return [
            (), mine[1:], (("authorization", TOKEN), *mine[1:]), (("authorization", "Bearer "), *mine[1:]),
            (("authorization", f"Bearer {self._dice.getrandbits(400):x}"), *mine[1:]),
            (("authorization", f"Bearer {OTHERS_TOKEN}"), *mine[1:]), (*mine, *mine),
            (*named, (SESSION_KEY, self._dice.randbytes(self._dice.choice([0, 1, 16, 32, 2000])))),
            (*named, (TENANT_KEY, self._dice.choice(["", "other", "x" * 2000, "../..", "a b"]))),
            (("authorization", f"Bearer {OTHERS_TOKEN}"), (TENANT_KEY, "default")),
        ]  # fmt: skip

    def _not_that_way(self) -> None:
        """A name that is none, or no message, or several, where there is to be one."""
        names = [*UNARY, "Read", "Session", "Hello", "MapRegions", "Event", "", "read", "x" * 500]
        service, name = self._dice.choice([SERVICE, SERVICE, "other"]), self._dice.choice(names)
        stub = self._channel.stream_stream(f"/{service}/{name}")
        payloads = [
            self._odd.filled(self._dice.choice([pb.LeaseRequest, spb.ReadRequest])()).SerializeToString()
            for _ in range(self._dice.choice([0, 2, 3]))
        ]
        stream = stub(iter(payloads), metadata=self._metadata, timeout=ANSWER_S)
        self._until_end(stream, what=name, messages_max=1, several=len(payloads) != 1)

    def _too_late(self) -> None:
        """A call whose time is up before it is answered."""
        name = self._name()
        payload = self._odd.filled(REQUESTS[UNARY[name]]()).SerializeToString()
        self._unary(name, payload, timeout_s=self._dice.choice([1e-6, 1e-4, 1e-3]))

    def _cancelled(self) -> None:
        """A call that its client gives up."""
        name = self._name()
        payload = self._odd.filled(REQUESTS[UNARY[name]]()).SerializeToString()
        future = self._channel.unary_unary(f"/{SERVICE}/{name}").future(payload, metadata=self._metadata)
        future.cancel()
        self._note("cancelled")

    def _session(self) -> None:
        """A session with an odd hello, or one that is dropped at once."""
        hello = pb.HelloRequest(version_min=1, version_max=1, tenant=self._dice.choice(["", "default", "other"]))
        kind = self._dice.randint(0, 2)
        payload = (self._odd.filled(pb.HelloRequest()) if kind == 0 else hello).SerializeToString()
        stream = self._channel.unary_stream(f"/{SERVICE}/Session")(
            self._odd.spoiled(payload) if kind == 1 else payload, metadata=self._metadata, timeout=ANSWER_S
        )
        self._until_end(stream, messages_max=1)

    def _too_long(self) -> None:
        """A message longer than the daemon takes."""
        payload = bytes(MESSAGE_BYTES_MAX + self._dice.choice([1, 4096, 1 << 20]))
        if self._dice.random() < 0.5:
            self._unary(self._name(), payload)
        else:
            self._until_end(self._streams("Write")(iter([payload]), metadata=self._metadata, timeout=ANSWER_S))

    def _no_grpc(self) -> None:
        """Bytes on the socket that are no HTTP/2, or hardly."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(ANSWER_S)
            sock.connect(self._path)
            try:
                sock.sendall(self._dice.choice([b"", GRPC_PREFACE]) + self._dice.randbytes(self._dice.randint(1, 4096)))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass
        self._note("closed")

    # Streams ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        """A Read of what is there or not, with odd bounds, taken to its end or dropped."""
        request = spb.ReadRequest()
        if self._dice.random() < 0.5:
            self._odd.filled(request)
        else:
            request.lease.prompt.CopyFrom(self._prompt())
            if self._dice.random() < 0.5:
                request.first, request.n_blocks = self._dice.randint(0, 9), self._dice.randint(0, 9)
                request.chunk_bytes_max = self._dice.choice([0, 1, 16 << 10, 1 << 31])
        payload = request.SerializeToString()
        if self._dice.random() < 0.3:
            payload = self._odd.spoiled(payload)
        timeout_s, asks_to_wait = _time_for(spb.ReadRequest, payload)
        stream = self._channel.unary_stream(f"/{SERVICE}/Read")(payload, metadata=self._metadata, timeout=timeout_s)
        self._until_end(stream, messages_max=self._dice.choice([1, None]), may_be_late=asks_to_wait)

    def _write(self) -> None:
        """A Write with pieces that don't fit, in any order, to its end, given up, or never ended."""
        messages = [message.SerializeToString() for message in self._pieces()]
        if self._dice.random() < 0.3:
            at = self._dice.randrange(len(messages))
            messages[at] = self._odd.spoiled(messages[at])
        if self._dice.random() < 0.2:
            self._dice.shuffle(messages)
        given_up = threading.Event()
        goes_on = self._dice.random() < 0.2

        def send() -> Iterator[bytes]:
            yield from messages
            if goes_on:
                given_up.wait(ANSWER_S)

        stream = self._streams("Write")(send(), metadata=self._metadata, timeout=ANSWER_S)
        try:
            self._until_end(stream, messages_max=1 if goes_on else self._dice.choice([1, None, None]))
        finally:
            given_up.set()

    def _pieces(self) -> Sequence[Message]:
        dice = self._dice
        if dice.random() < 0.2:
            return [self._odd.filled(spb.WriteRequest()) for _ in range(dice.randint(1, 4))]
        n_blocks = dice.randint(1, 6)
        reserve = pb.ReserveRequest(prompt=self._prompt(), n_blocks=n_blocks)
        pieces = [spb.WriteRequest(reserve=reserve)]
        data = dice.randbytes(n_blocks * BLOCK_BYTES)
        cut = dice.choice([len(data), BLOCK_BYTES, 1000])
        for start in range(0, len(data), cut):
            piece = data[start : start + cut]
            ended = range(start // BLOCK_BYTES, (start + len(piece)) // BLOCK_BYTES)
            sums = b"".join(_sum_of(data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) for i in ended)
            pieces.append(spb.WriteRequest(data=piece, offset=start, checksums=sums))
        fault, spoilt = dice.randint(0, 6), pieces[dice.randrange(1, len(pieces))]
        if fault == 0:
            spoilt.checksums = dice.randbytes(len(spoilt.checksums) + dice.choice([0, 8, 3]))
        elif fault == 1:
            spoilt.offset = dice.choice([0, 1, len(data), (1 << 64) - 1])
        elif fault == 2:
            spoilt.data += dice.randbytes(dice.choice([1, BLOCK_BYTES]))
        elif fault == 3:
            pieces.remove(spoilt)
        elif fault == 4:
            pieces.append(pieces[0])
        commit = pb.CommitRequest(n_blocks=dice.choice([0, n_blocks, n_blocks + 1, 1 << 31]))
        return [*pieces, spb.WriteRequest(commit=commit)][: dice.choice([1, len(pieces), None])]

    def _prompt(self) -> pb.Prompt:
        """Of some prompts that begin alike, so that there are hits."""
        tokens = np.arange(BLOCK_TOKENS * self._dice.randint(1, 9), dtype="<u4")
        tokens[self._dice.randint(0, len(tokens)) :] += self._dice.randint(0, 99)
        return pb.Prompt(namespace=NAMESPACE.digest(), rows=tokens.tobytes())

    # What comes back -------------------------------------------------------------------------------

    def _begin_session(self) -> None:
        """One to name in calls, and a lease and a reservation of it."""
        if self._stream is not None:
            self._stream.cancel()
        hello = pb.HelloRequest(version_min=1, version_max=1, tenant="default").SerializeToString()
        named: Metadata = (("authorization", f"Bearer {TOKEN}"),)
        self._stream = self._channel.unary_stream(f"/{SERVICE}/Session")(hello, metadata=named)
        token = spb.SessionMessage.FromString(next(self._stream)).hello.session_token
        self._metadata = (*named, (SESSION_KEY, token))
        self._ask("OpenNamespace", pb.OpenNamespaceRequest(description_json=json.dumps(NAMESPACE.to_dict())))
        lease = self._ask("Lease", pb.LeaseRequest(prompt=self._prompt()))
        reserved = self._ask("Reserve", pb.ReserveRequest(prompt=self._prompt(), n_blocks=1))
        self._odd.known = {"lease_id": [lease.lease_id], "reservation_id": [reserved.reservation_id]}

    def _ask(self, name: str, request: Message) -> Any:
        stub = self._channel.unary_unary(f"/{SERVICE}/{name}")
        reply = stub(request.SerializeToString(), metadata=self._metadata, timeout=ANSWER_S)
        return REPLIES[UNARY[name]].FromString(reply)

    def _name(self) -> str:
        while True:
            name = self._dice.choice(list(UNARY))
            if self._dice.random() < NOISY.get(UNARY[name], 1.0):
                return name

    def _streams(self, name: str) -> Any:
        return self._channel.stream_stream(f"/{SERVICE}/{name}")

    def _unary(
        self, name: str, payload: bytes, *, metadata: Metadata | None = None, timeout_s: float | None = None
    ) -> None:
        enough_s, asks_to_wait = _time_for(REQUESTS[UNARY[name]], payload)
        try:
            self._channel.unary_unary(f"/{SERVICE}/{name}")(
                payload,
                metadata=self._metadata if metadata is None else metadata,
                timeout=enough_s if timeout_s is None else timeout_s,
            )
            self._note("OK")
        except grpc.RpcError as error:
            self._failed(error, f"{name} {payload.hex()}", may_be_late=asks_to_wait or timeout_s is not None)
        if UNARY[name] == Method.GOODBYE and metadata is None:
            self._stream = None

    def _until_end(
        self,
        stream: Any,
        *,
        what: str = "a stream",
        messages_max: int | None = None,
        may_be_late: bool = False,
        several: bool = False,
    ) -> None:
        """Take what comes of a stream, at most so many messages, then give it up."""
        try:
            for number, _ in enumerate(stream, 1):
                if number == messages_max:
                    break
            else:
                self._note("OK")
                return
            stream.cancel()
            self._note("given up")
        except grpc.RpcError as error:
            self._failed(error, what, may_be_late=may_be_late, several=several)

    def _failed(self, error: grpc.RpcError, what: str, *, may_be_late: bool = False, several: bool = False) -> None:
        status = error.code()
        sent = any(key == ERROR_KEY for key, _ in error.trailing_metadata() or ())
        told = f"{self._shape}, {what:.2000}: {status.name}, {error.details()}"
        assert sent or status is not grpc.StatusCode.UNAVAILABLE, f"the connection broke; {told}"
        assert status is not grpc.StatusCode.UNKNOWN, f"a fault of the daemon; {told}"
        # Without the daemon's own error it is gRPC's for a client that breaks the rules of the call.
        assert status is not grpc.StatusCode.INTERNAL or (several and not sent), f"a fault of the daemon; {told}"
        assert may_be_late or status is not grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer in time; {told}"
        self._note(status.name)

    def _note(self, outcome: str) -> None:
        self.outcomes[self._shape, outcome] += 1


def _time_for(kind: type[Message], payload: bytes) -> tuple[float, bool]:
    """How long to wait for the answer to such a request, and whether it asks to wait longer than that."""
    try:
        request: Any = kind.FromString(payload)
    except DecodeError:
        return ANSWER_S, False
    wait_s = max(getattr(part, "wait_s", 0.0) for part in (request, getattr(request, "lease", request)))
    return (WAITED_S, True) if wait_s >= ANSWER_S / 2 else (ANSWER_S, False)


def _sum_of(block: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(block).to_bytes(8, "little")
