"""One message ahead: gRPC receives the next one while the one before is copied.

A thread of gRPC asks for a message only when somebody waits for it. So without this, either the connection or the copy
stands still.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self


class ReadAhead:
    """Iterates over the messages of a stream, which a thread takes from it; two are held at most. A context manager.

    Iterating raises what they raise. Leaving it calls ``cancel``, of the stream, after which the thread ends by itself.
    """

    def __init__(self, messages: Iterator[bytes], cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self._taken = threading.Semaphore(0)
        self._arrived: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        threading.Thread(
            target=_receive, args=(messages, self._arrived, self._taken), name="kvstore-read-ahead", daemon=True
        ).start()

    def __iter__(self) -> Iterator[bytes]:
        while (arrived := self._arrived.get()) is not None:
            self._taken.release()
            if isinstance(arrived, Exception):
                raise arrived
            yield arrived

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()
        self._taken.release()  # the thread may wait for that one to be taken


def _receive(
    messages: Iterator[bytes], arrived: queue.SimpleQueue[bytes | Exception | None], taken: threading.Semaphore
) -> None:
    try:
        for payload in messages:
            arrived.put(payload)
            taken.acquire()
        arrived.put(None)
    except Exception as error:
        arrived.put(error)
