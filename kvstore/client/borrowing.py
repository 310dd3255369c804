"""The caller's memory, which a call may touch only as long as somebody waits for that call.

A call on a thread goes on when its ``await`` is cancelled, and its caller uses its arrays for something else then. So
what a call reads from them, or writes to them, is done inside ``current().touching()``: none of that begins after the
cancellation, which returns when what had begun before is over. A call on its caller's own thread is never abandoned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class AbandonedError(BaseException):
    """Nobody waits for this call any more, so it ends; as a cancellation, nothing but its thread takes it."""


class Borrowing:
    """What one call may still do with its caller's memory. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.abandoned = False
        self._lock = threading.Lock()
        self._n_touching = 0
        self._then: Callable[[], object] | None = None

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Around reading or writing the caller's memory; not around waiting. Raises AbandonedError."""
        with self._lock:
            self.must_be_wanted()
            self._n_touching += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_touching -= 1
                then = self._then if not self._n_touching else None
            if then is not None:
                then()

    def must_be_wanted(self) -> None:
        """Before a step that had better not be taken for nobody. Raises AbandonedError."""
        if self.abandoned:
            raise AbandonedError("nobody waits for this call any more")

    def abandon(self, then: Callable[[], object]) -> bool:
        """Nothing is touched from here on. False if something is just now: ``then()`` is called, on any thread, when
        that is over; it must not block."""
        with self._lock:
            self.abandoned = True
            if self._n_touching:
                self._then = then
            return not self._n_touching

    @contextmanager
    def here(self) -> Iterator[None]:
        """Around the call, on its thread: it is ``current()`` there."""
        _here.borrowing = self
        try:
            yield
        finally:
            del _here.borrowing


_here = threading.local()


def current() -> Borrowing:
    """That of the call which this thread makes."""
    found: Borrowing | None = getattr(_here, "borrowing", None)
    return found if found is not None else Borrowing()
