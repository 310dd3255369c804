"""Reading one message ahead: in order, no further, with every error, and no thread is left."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator

import pytest

from kvstore.client.remote.ahead import ReadAhead
from kvstore.errors import EndedError

TIMEOUT_S = 20.0


class Stream:
    """Gives ``n`` messages and then raises ``error``, if there is one; tells of each that is asked for."""

    def __init__(self, n: int, error: Exception | None = None) -> None:
        self.asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self._n = n
        self._error = error
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self.thread = threading.current_thread()
        for i in itertools.count():
            self.asked.put(i)
            if self._cancelled.is_set():
                raise EndedError("cancelled")
            if i == self._n:
                break
            yield b"%d" % i
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self._cancelled.set()

    def must_have_no_thread(self) -> None:
        assert self.thread is not None
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()


def test_all_messages_come_in_order() -> None:
    stream = Stream(100)
    with ReadAhead(iter(stream), stream.cancel) as messages:
        assert list(messages) == [b"%d" % i for i in range(100)]
        assert stream.thread is not threading.current_thread()
    stream.must_have_no_thread()


def test_the_next_one_is_asked_for_while_one_is_used_and_no_other() -> None:
    stream = Stream(100)
    with ReadAhead(iter(stream), stream.cancel) as messages:
        for i, _ in zip(range(10), messages, strict=False):
            assert stream.asked.get(timeout=TIMEOUT_S) == i
        assert stream.asked.get(timeout=TIMEOUT_S) == 10  # while the one before is in use
    stream.must_have_no_thread()
    assert stream.asked.qsize() <= 1  # leaving lets the thread ask once more, to find that it is over


def test_what_the_stream_raises_is_raised_after_what_came_before() -> None:
    stream, seen = Stream(2, error=ValueError("broken")), list[bytes]()
    with pytest.raises(ValueError, match="broken"), ReadAhead(iter(stream), stream.cancel) as messages:
        seen.extend(messages)
    stream.must_have_no_thread()
    assert seen == [b"0", b"1"]


@pytest.mark.parametrize("n_taken", [0, 1, 5])
def test_who_leaves_early_leaves_no_thread(n_taken: int) -> None:
    stream = Stream(1000)
    with ReadAhead(iter(stream), stream.cancel) as messages:
        assert len(list(itertools.islice(messages, n_taken))) == n_taken
        stream.asked.get(timeout=TIMEOUT_S)  # it has begun
    stream.must_have_no_thread()
