"""Answers that come later: order is kept, nobody else waits, and who goes away is noticed and cleaned up after."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from kvstore.config import LogOptions
from kvstore.errors import BadInputError
from kvstore.server.answers import Answers
from kvstore.server.connection import BACKLOG_BYTES_PAUSED, Connection
from kvstore.server.handlers import Reply
from kvstore.server.monitor import Monitor
from kvstore.server.session import Session
from kvstore.server.waits import checked_wait_s, wait_for
from kvstore.wire import faults
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import (
    FLAG_ERROR,
    FLAG_NO_REPLY,
    FLAG_REPLY,
    HEADER,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Method,
    decode,
    encode,
)

WAIT_S = 20.0


class Served:
    """One connection over a socket pair; PREFETCH is answered by ``slow``, everything else at once."""

    def __init__(self, slow: Callable[[], Awaitable[Reply]]) -> None:
        self.loop = asyncio.get_running_loop()
        self.ours, theirs = socket.socketpair()
        for sock in (self.ours, theirs):
            sock.setblocking(False)
        self.slow = slow
        self.at_once: Message = pb.UnpinReply(found=True)
        self.after = 0
        self.monitor = Monitor(self.loop, LogOptions(), lambda: ({}, {}))
        self.closed = asyncio.Event()
        self.answers = Answers(self.loop, self._dispatch, self._count, self.monitor)
        self.connection = Connection(self.loop, theirs, self.answers.on_frame, self._on_close)
        self.connection.context = Session(1, "t", "test", 1, -1, 0.0)
        self.connection.payload_bytes_max = 64 << 20

    def _count(self) -> None:
        self.after += 1

    def _on_close(self, connection: Connection) -> None:
        self.answers.cancel(connection)
        self.closed.set()

    def _dispatch(self, _connection: Connection, method: int, _payload: bytes) -> Reply | Awaitable[Reply]:
        if method == Method.PREFETCH:
            return self.slow()
        return Reply(self.at_once)

    async def send(self, method: int, request_id: int, message: Any, flags: int = 0) -> None:
        await self.loop.sock_sendall(self.ours, encode(method, flags, request_id, message))

    async def receive(self) -> tuple[int, int, bytes]:
        """(flags, request id, payload) of the next frame."""
        head = await self._exactly(HEADER_BYTES)
        length, _, flags, request_id = HEADER.unpack(head)
        return flags, request_id, await self._exactly(length)

    async def _exactly(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            part = await asyncio.wait_for(self.loop.sock_recv(self.ours, n - len(data)), WAIT_S)
            assert part, "the connection ended"
            data += part
        return data


def served(body: Callable[..., Any]) -> None:
    async def main() -> None:
        await asyncio.wait_for(body(), WAIT_S)

    asyncio.run(main())


class Waiting:
    """A slow answer that can be let go, and tells what became of it."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.started = asyncio.Event()
        self.ended: list[str] = []

    async def __call__(self) -> Reply:
        try:
            self.started.set()
            await self.go.wait()
            self.ended.append("answered")
            return Reply(pb.PrefetchReply(n_blocks=7))
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise


def test_frames_behind_a_slow_answer_wait_for_it() -> None:
    async def body() -> None:
        waiting = Waiting()
        it = Served(waiting)
        await it.send(Method.UNPIN, 1, pb.UnpinRequest())
        await it.send(Method.PREFETCH, 2, pb.PrefetchRequest())
        await it.send(Method.UNPIN, 3, pb.UnpinRequest())
        assert (await it.receive())[1] == 1
        await waiting.started.wait()
        waiting.go.set()
        flags, request_id, payload = await it.receive()
        assert (flags, request_id) == (FLAG_REPLY, 2)
        assert decode(pb.PrefetchReply, payload).n_blocks == 7
        assert (await it.receive())[1] == 3
        assert it.after == 4  # each request, and the slow one once more when it was answered
        it.connection.close()
        it.ours.close()

    served(body)


def test_who_asked_for_more_than_a_frame_holds_is_told() -> None:
    async def body() -> None:
        async def slow() -> Reply:
            return Reply(pb.RecordReply(keys=bytes(MAX_PAYLOAD_BYTES)))

        it = Served(slow)
        it.at_once = pb.RecordReply(keys=bytes(MAX_PAYLOAD_BYTES))
        for request_id, method in ((1, Method.RECORD), (2, Method.PREFETCH)):
            await it.send(method, request_id, pb.RecordRequest())
            flags, answered, payload = await it.receive()
            assert (flags, answered) == (FLAG_REPLY | FLAG_ERROR, request_id)
            with pytest.raises(BadInputError, match="message has 67108869 bytes; the most is 67108864"):
                raise faults.to_exception(decode(pb.Error, payload))
        it.at_once = pb.RecordReply()
        await it.send(Method.RECORD, 3, pb.RecordRequest())
        assert (await it.receive())[:2] == (FLAG_REPLY, 3)
        it.connection.close()
        it.ours.close()

    served(body)


def test_a_slow_answer_nobody_wants_is_not_sent() -> None:
    async def body() -> None:
        waiting = Waiting()
        it = Served(waiting)
        await it.send(Method.PREFETCH, 1, pb.PrefetchRequest(), FLAG_NO_REPLY)
        await it.send(Method.UNPIN, 2, pb.UnpinRequest())
        waiting.go.set()
        assert (await it.receive())[1] == 2
        it.connection.close()
        it.ours.close()

    served(body)


@pytest.mark.parametrize("n_bytes_before", [0, 3 * BACKLOG_BYTES_PAUSED])
def test_a_client_that_goes_away_while_it_waits_is_noticed(n_bytes_before: int) -> None:
    """Also when its request was a long one."""

    async def body() -> None:
        waiting = Waiting()
        it = Served(waiting)
        await it.send(Method.PREFETCH, 1, pb.PrefetchRequest(prompt=pb.Prompt(rows=bytes(n_bytes_before))))
        await waiting.started.wait()
        await it.send(Method.UNPIN, 2, pb.UnpinRequest())
        it.ours.close()
        await it.closed.wait()
        assert waiting.ended == ["cancelled"]

    served(body)


def test_what_is_cancelled_before_it_began_is_cleaned_up_too() -> None:
    async def body() -> None:
        waiting = Waiting()
        it = Served(waiting)
        it.answers.on_frame(it.connection, Method.PREFETCH, 0, 9, b"")
        it.answers.cancel(it.connection)
        it.answers.cancel(it.connection)
        flags, request_id, payload = await it.receive()
        assert (flags, request_id) == (FLAG_REPLY | FLAG_ERROR, 9)
        assert decode(pb.Error, payload).code == pb.SESSION_ENDED
        assert waiting.ended == ["cancelled"]
        await it.send(Method.UNPIN, 10, pb.UnpinRequest())
        assert (await it.receive())[1] == 10
        it.connection.close()
        it.ours.close()

    served(body)


def test_cancel_all_waits_for_the_cleaning_up() -> None:
    async def body() -> None:
        cleaned: list[int] = []
        entered = asyncio.Semaphore(0)

        async def slow() -> Reply:
            try:
                entered.release()
                await asyncio.Event().wait()
            finally:
                for _ in range(5):
                    await asyncio.sleep(0)
                cleaned.append(1)
            raise AssertionError

        many = [Served(slow) for _ in range(3)]
        for it in many:
            await it.send(Method.PREFETCH, 1, pb.PrefetchRequest())
            await entered.acquire()
            await it.answers.cancel_all()
            it.connection.close()
            it.ours.close()
        assert cleaned == [1, 1, 1]

    served(body)


def test_an_error_of_a_slow_answer_is_told() -> None:
    async def body() -> None:
        async def slow() -> Reply:
            await asyncio.sleep(0)
            raise BadInputError("seven is too many")

        it = Served(slow)
        await it.send(Method.PREFETCH, 4, pb.PrefetchRequest())
        flags, request_id, payload = await it.receive()
        assert (flags, request_id) == (FLAG_REPLY | FLAG_ERROR, 4)
        assert decode(pb.Error, payload).message == "seven is too many"
        it.connection.close()
        it.ours.close()

    served(body)


# Waiting -----------------------------------------------------------------------------------------


class Under:
    """Something under way."""

    def __init__(self) -> None:
        self.done = False
        self.callbacks: list[Callable[[], None]] = []

    def on_done(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def finish(self) -> None:
        self.done = True
        for callback in self.callbacks:
            callback()


def test_waiting_ends_when_it_is_done_or_the_time_is_up() -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        under = Under()
        loop.call_soon(under.finish)
        await wait_for(under, 1000.0)
        late = Under()
        start_s = loop.time()
        await wait_for(late, 0.02)
        assert loop.time() - start_s >= 0.02
        late.finish()  # nobody waits any more: no harm
        await wait_for(late, 1000.0)

    served(body)


@pytest.mark.parametrize("wait_s", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_wait_that_is_none_is_refused(wait_s: float) -> None:
    with pytest.raises(BadInputError, match="wait_s"):
        checked_wait_s(wait_s)
