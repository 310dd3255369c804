"""The streams of one CUDA device, and waiting for them without touching anybody else's.

A graph that another thread captures is lost when somebody waits for the whole device, and in the mode that is usual
for threads by many calls besides: so waits are for streams of our own, and calls are made under ``relaxed``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvstore.device.cuda_calls import bindings, do, number_of
from kvstore.errors import BadInputError


@contextmanager
def relaxed() -> Iterator[None]:
    """This thread's calls to CUDA leave graphs that others capture alone; afterwards the thread has the mode it had."""
    runtime = bindings("runtime")
    exchange = runtime.cudaThreadExchangeStreamCaptureMode
    previous = do(exchange, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
    try:
        yield
    finally:
        do(exchange, previous)


class OwnStreams:
    """Made, ended and waited for, from any thread, with the device's context current."""

    def __init__(self) -> None:
        # Reentrant: memory that the garbage collector finds is closed, which waits, wherever a thread is just then.
        self._lock = threading.RLock()
        self._draining = threading.RLock()
        self._streams: set[int] = set()
        self._last: set[int] = set()
        """Events behind all that ended streams were given."""

    def make(self) -> int:
        """A new stream, concurrent with all others."""
        runtime = bindings("runtime")
        stream = number_of(do(runtime.cudaStreamCreateWithFlags, runtime.cudaStreamNonBlocking))
        with self._lock:
            self._streams.add(stream)
        return stream

    def end(self, stream: int) -> None:
        """What the stream was given is still done. Raises BadInputError for one that is not there."""
        with self._lock:
            if stream not in self._streams:
                raise BadInputError(
                    f"free_stream of {stream:#x}, which no stream gave, or which was given back already"
                )
            self._last.add(_event_behind(stream))
            self._streams.remove(stream)
        do(bindings("runtime").cudaStreamDestroy, stream)

    def drain(self) -> None:
        """Wait for all that these streams were given until now, also those that ended."""
        runtime = bindings("runtime")
        with self._draining:
            with self._lock:
                self._last.update(_event_behind(stream) for stream in self._streams)
            while self._last:
                event = self._last.pop()
                try:
                    do(runtime.cudaEventSynchronize, event)
                finally:
                    do(runtime.cudaEventDestroy, event)

    def destroy(self) -> None:
        """End all, when what they were given is over."""
        with self._lock, ExitStack() as each:
            for stream in self._streams:
                each.callback(do, bindings("runtime").cudaStreamDestroy, stream)
            self._streams.clear()


def _event_behind(stream: int) -> int:
    """A new event behind what a stream was given."""
    runtime = bindings("runtime")
    flags = runtime.cudaEventDisableTiming | runtime.cudaEventBlockingSync
    event = number_of(do(runtime.cudaEventCreateWithFlags, flags))
    do(runtime.cudaEventRecord, event, stream)
    return event


def or_legacy(stream: Any) -> Any:
    """The default stream by a name that means the same whatever CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM says.

    Torch's stream 0 is the legacy one always, and 0 may be another to the bindings.
    """
    return stream or bindings("runtime").cudaStreamLegacy
