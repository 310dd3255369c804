"""Threads that make blocking calls for an event loop.

A call that has begun goes on, whatever becomes of whoever awaits it, until it would touch its caller's memory (see
``borrowing.py``); what it brings then is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kvstore.client.borrowing import AbandonedError, Borrowing

ResultT = TypeVar("ResultT")


class _Call(Generic[ResultT]):
    """One call, what came of it, and who awaits that."""

    def __init__(
        self,
        work: Callable[[], ResultT],
        future: asyncio.Future[ResultT] | None,
        undo: Callable[[ResultT], object] | None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self.borrowing = Borrowing()
        """Abandoned: nobody awaits it any more."""
        self._work = work
        self._future = future
        self._undo = undo
        self._after = after
        self._results: list[ResultT] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """On a thread. What nobody awaits any more is not begun."""
        if not self.borrowing.abandoned:
            try:
                with self.borrowing.here():
                    self._results.append(self._work())
            except AbandonedError:
                pass  # to nobody
            except BaseException as error:
                self._error = error

    def deliver(self) -> None:
        """On the loop's thread."""
        if self._after is not None:
            self._after()
        future = self._future
        if future is None or self.borrowing.abandoned or future.done():
            self._error = None  # its traceback keeps what the call held
            self.give_back()
        elif self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._results[0])

    def give_back(self) -> None:
        """Nobody takes the result. Idempotent."""
        if self._results and self._undo is not None:
            self._undo(self._results.pop())


class _Outcomes:
    """What threads bring back to the loop, many at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[_Call[Any]] = deque()
        self._woken = False
        self.n_expected = 0
        """Calls that were asked for and have not been delivered."""

    def add(self, call: _Call[Any]) -> None:
        """On a thread."""
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody awaits anything
                while self._calls:
                    self._calls.popleft().give_back()

    def tell(self, over: asyncio.Future[None]) -> None:
        """On a thread: what this future stands for is over."""
        with contextlib.suppress(RuntimeError):  # as above
            self._loop.call_soon_threadsafe(over.set_result, None)

    def _deliver(self) -> None:
        self._woken = False  # before looking: what comes from now on wakes again
        while self._calls:
            self.n_expected -= 1
            self._calls.popleft().deliver()


class Hands:
    """At most ``n`` threads, started as they are needed, which begin calls in the order they were asked for.

    Made and used on one loop's thread. The threads of one that is forgotten end with their last call.
    """

    def __init__(self, name: str, n: int) -> None:
        self._name = name
        self._n = n
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._outcomes = _Outcomes(self._loop)
        self._threads: list[threading.Thread] = []
        self._ends: list[asyncio.Future[None]] = []
        self._ended = False
        weakref.finalize(self, _end, self._queue, n).atexit = False

    async def do(
        self,
        work: Callable[[], ResultT],
        undo: Callable[[ResultT], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> ResultT:
        """What ``work()`` returns or raises, on one of the threads.

        If the caller is cancelled, this returns when the call does not touch the caller's memory any more, and
        ``undo(result)`` is called once there is a result, on any thread; it must not block. ``after`` is called on
        the loop's thread when the thread is free again, which may be later than that.
        """
        if self._ended:
            try:
                return work()
            finally:
                if after is not None:
                    after()
        future: asyncio.Future[ResultT] = self._loop.create_future()
        call = _Call(work, future, undo, after)
        self._put(call)
        try:
            return await future
        except asyncio.CancelledError:
            await self._abandon(call)
            call.give_back()  # it may have come just before the cancellation
            raise

    async def _abandon(self, call: _Call[Any]) -> None:
        """Nobody awaits the call any more. Waits for the copy that it makes just now, and is not to be cancelled."""
        over: asyncio.Future[None] = self._loop.create_future()
        if not call.borrowing.abandon(lambda: self._outcomes.tell(over)):
            while not over.done():
                with contextlib.suppress(asyncio.CancelledError):  # the caller raises one already
                    await asyncio.shield(over)

    def soon(self, work: Callable[[], object]) -> None:
        """Have it done, in its turn, without waiting for that; what it returns or raises is of no interest."""
        if self._ended:
            work()
        else:
            self._put(_Call(work, None, None))

    async def end(self) -> None:
        """Wait for all calls, and for the threads to end. What is asked for later is done at once, by who asks."""
        if not self._ended:
            self._ended = True
            _end(self._queue, len(self._threads))
            await asyncio.gather(*self._ends)
            for thread in self._threads:
                thread.join()  # it has nothing left to do

    def _put(self, call: _Call[Any]) -> None:
        self._outcomes.n_expected += 1
        if len(self._threads) < min(self._n, self._outcomes.n_expected):
            name = f"kvstore-{self._name}-{len(self._threads)}"
            end: asyncio.Future[None] = self._loop.create_future()
            thread = threading.Thread(target=_work, args=(self._queue, self._outcomes, end), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
            self._ends.append(end)
        self._queue.put(call)


def _end(queue: SimpleQueue[_Call[Any] | None], n: int) -> None:
    for _ in range(n):
        queue.put(None)


def _work(queue: SimpleQueue[_Call[Any] | None], outcomes: _Outcomes, end: asyncio.Future[None]) -> None:
    while (call := queue.get()) is not None:
        call.run()
        outcomes.add(call)
        del call  # what it brought is its caller's alone
    outcomes.tell(end)
