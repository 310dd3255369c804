"""Threads that help whoever moves a batch.

Daemon threads, not an executor's: those keep a program from ending whose disk hangs, and refuse work once it ends.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_Item = tuple["Future[None]", Callable[[], None]]


class Helpers:
    """At most ``n`` threads, started as they are needed; they end with this object. Callable from any thread."""

    def __init__(self, n: int) -> None:
        self._crew = _Crew(n)
        weakref.finalize(self, self._crew.dismiss).atexit = False

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Have ``work`` run soon. The future can be cancelled until then, and must be in the end: it may never begin.

        Its result raises what the work raised.
        """
        return self._crew.submit(work)

    def rest(self) -> None:
        """End the threads, and wait for what they are at. They come back when there is something to do."""
        for thread in self._crew.dismiss():
            thread.join()


class _Crew:
    """What the threads know: not the object whose end they wait for."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._lock = threading.RLock()  # ``dismiss`` may be a finalizer's, at any point
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._n_unfinished = 0
        self.threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            self._n_unfinished += 1
            if len(self.threads) < min(self._n, self._n_unfinished):
                self._start_thread()
            self._queue.put((future, work))
        return future

    def dismiss(self) -> list[threading.Thread]:
        """The threads, which end once they have done what was asked for before."""
        with self._lock:
            threads, self.threads = self.threads, []
            queue, self._queue = self._queue, SimpleQueue()
            for _ in threads:
                queue.put(None)
        return threads

    def _start_thread(self) -> None:
        name = f"kvstore-nvme-{len(self.threads)}"
        thread = threading.Thread(target=self._work, args=(self._queue,), name=name, daemon=True)
        with contextlib.suppress(RuntimeError):  # the program ends: who submits cancels what nobody has begun
            thread.start()
            self.threads.append(thread)

    def _work(self, queue: SimpleQueue[_Item | None]) -> None:
        while (item := queue.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    work()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(None)
            del item, future, work
            with self._lock:
                self._n_unfinished -= 1
