"""From a frame to its answer: at once, or later while its connection takes no further frames."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvstore.errors import KVStoreError, SessionEndedError
from kvstore.logs import about
from kvstore.server.connection import Connection
from kvstore.server.handlers import Reply
from kvstore.server.monitor import Monitor
from kvstore.server.session import Session
from kvstore.wire import faults
from kvstore.wire.framing import FLAG_ERROR, FLAG_NO_REPLY, FLAG_REPLY, Method, encode

Dispatch = Callable[[Connection, int, bytes], Reply | Awaitable[Reply]]

log = logging.getLogger("kvstore.server")


@dataclass(slots=True, eq=False)
class _Slow:
    """A request whose answer comes later."""

    connection: Connection
    method: int
    flags: int
    request_id: int
    result: Awaitable[Reply]
    task: asyncio.Task[None] | None = None
    begun_s: float = 0.0
    started: bool = False
    cancelled: bool = False


class Answers:
    """Answers frames through ``dispatch``; ``after`` is called when a request has been worked on.

    Single-threaded; no call but ``cancel_all`` waits.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, dispatch: Dispatch, after: Callable[[], None], monitor: Monitor
    ) -> None:
        self._loop = loop
        self._monitor = monitor
        self._dispatch = dispatch
        self._after = after
        self._slow: dict[Connection, _Slow] = {}

    def on_frame(self, connection: Connection, method: int, flags: int, request_id: int, payload: bytes) -> None:
        """Work on one frame. Whatever it causes, the daemon goes on and the client hears of it."""
        begun_s = time.perf_counter()
        frame = None
        try:
            result = self._dispatch(connection, method, payload)
            if isinstance(result, Reply):
                frame = _frame(method, flags, request_id, result)
        except Exception as error:
            self._fail(connection, method, request_id, error)
            return
        finally:
            self._after()
        if isinstance(result, Reply):
            _send(connection, frame, result)
            self._monitor.answered(method, time.perf_counter() - begun_s, _session_of(connection), result.message)
            return
        slow = self._slow[connection] = _Slow(connection, method, flags, request_id, result, begun_s=begun_s)
        connection.pause(lambda: self.cancel(connection))
        slow.task = self._loop.create_task(self._answer(slow))

    def cancel(self, connection: Connection) -> None:
        """Nobody waits for the answer of this connection any more; no effect if there is none to come."""
        slow = self._slow.get(connection)
        if slow is None or slow.task is None or slow.cancelled:
            return
        slow.cancelled = True
        if slow.started:  # else what it has to give back would never be reached
            slow.task.cancel()

    async def cancel_all(self) -> None:
        """Cancel every answer that is to come, and wait until what they held is given back."""
        tasks = [slow.task for slow in self._slow.values() if slow.task is not None]
        for connection in list(self._slow):
            self.cancel(connection)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, slow: _Slow) -> None:
        slow.started = True
        if slow.cancelled and slow.task is not None:
            slow.task.cancel()
        try:
            reply = await slow.result
            _send(slow.connection, _frame(slow.method, slow.flags, slow.request_id, reply), reply)
            took_s = time.perf_counter() - slow.begun_s
            self._monitor.answered(slow.method, took_s, _session_of(slow.connection), reply.message, waited=True)
        except asyncio.CancelledError:
            ended = SessionEndedError("the session ended while this request waited: say hello again")
            self._fail(slow.connection, slow.method, slow.request_id, ended)
        except Exception as error:
            self._fail(slow.connection, slow.method, slow.request_id, error)
        finally:
            del self._slow[slow.connection]
            slow.connection.resume()
            self._after()

    def _fail(self, connection: Connection, method: int, request_id: int, error: Exception) -> None:
        if not isinstance(error, KVStoreError):
            name = Method(method).name
            log.error("a %s request failed", name, exc_info=error, extra=about("request_failed", method=name.lower()))
        self._monitor.failed(method)
        connection.send(encode(method, FLAG_REPLY | FLAG_ERROR, request_id, faults.to_message(error)))
        if not isinstance(connection.context, Session):
            connection.close_after_sending()


def _frame(method: int, flags: int, request_id: int, reply: Reply) -> bytes | None:
    """None where no reply is wanted. Raises BadInputError for one that is too long."""
    return None if flags & FLAG_NO_REPLY else encode(method, FLAG_REPLY, request_id, reply.message)


def _send(connection: Connection, frame: bytes | None, reply: Reply) -> None:
    if frame is not None:
        connection.send(frame, reply.descriptors)


def _session_of(connection: Connection) -> Session | None:
    return connection.context if isinstance(connection.context, Session) else None
