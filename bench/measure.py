"""Small tools for timing: latency summaries, teams of threads that start together, median ratios."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of many timings of one operation, in microseconds."""

    n: int
    p50_us: float
    p99_us: float

    @classmethod
    def from_seconds(cls, seconds: Sequence[float] | NDArray[np.float64]) -> Latency:
        """Summary of timings in seconds; zeros if there are none."""
        if not len(seconds):
            return cls(0, 0.0, 0.0)
        p50, p99 = np.percentile(np.asarray(seconds) * 1e6, [50, 99])
        return cls(len(seconds), float(p50), float(p99))

    def to_dict(self) -> dict[str, float]:
        """JSON-able."""
        return {"n": self.n, "p50_us": self.p50_us, "p99_us": self.p99_us}


class Team:
    """A fixed set of threads that run one function each, started together. A context manager."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise BadInputError(f"threads is {threads}; it must be at least 1")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def time_s(self, work: Sequence[Callable[[], None]]) -> float:
        """Seconds from the common start to the last end; blocks. One function per thread."""
        if len(work) != self.threads:
            raise BadInputError(f"{len(work)} functions for {self.threads} threads")
        if self._pool is None:
            start = time.perf_counter()
            work[0]()
            return time.perf_counter() - start
        barrier = threading.Barrier(self.threads)
        spans = list(self._pool.map(lambda function: _timed(function, barrier), work))
        return max(end for _, end in spans) - min(start for start, _ in spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _timed(function: Callable[[], None], barrier: threading.Barrier) -> tuple[float, float]:
    barrier.wait()
    start = time.perf_counter()
    function()
    return start, time.perf_counter()


def timed_s(function: Callable[[], Any]) -> float:
    """Seconds one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def timed(function: Callable[[], T]) -> tuple[float, T]:
    """Seconds one call takes, and what it returned."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def paired(pairs: int, left: Callable[[int], float], right: Callable[[int], float]) -> NDArray[np.float64]:
    """Run both sides ``pairs`` times next to each other, float64 [pairs, 2].

    Which side goes first alternates, so that neither always finds the caches the other left behind.
    """
    out = np.empty((pairs, 2))
    for index in range(pairs):
        if index % 2:
            out[index, 1] = right(index)
            out[index, 0] = left(index)
        else:
            out[index, 0] = left(index)
            out[index, 1] = right(index)
    return out


def ordinary_array(n_bytes: int, alignment: int = 1) -> NDArray[np.uint8]:
    """An ordinary array with all of its pages present, its address a multiple of ``alignment``."""
    array = np.empty(n_bytes + alignment - 1, dtype=np.uint8)
    array.fill(1)
    start = -array.ctypes.data % alignment
    return array[start : start + n_bytes]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM that come meanwhile count at the end. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, lambda got, _: came.append(got))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for got in came:
            signal.raise_signal(got)


def leave_interrupts_to_parent() -> None:
    """For child processes: Ctrl-C reaches the whole group, but the parent alone reports it and ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
