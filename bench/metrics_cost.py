"""What metrics cost: two daemons that differ in nothing but the HTTP server, read from in turn.

While the one with metrics is measured it is scraped once at the beginning of every measurement, so far more often
than a Prometheus would. Medians of ratios of pairs; bytes are compared after the timing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.bandwidth_row import KIB, MIB, bootstrap_low
from kvstore.bench.measure import ordinary_array, paired, timed
from kvstore.client import Client
from kvstore.errors import BadInputError, IntegrityError, UnavailableError
from kvstore.metrics import Histogram
from kvstore.types import KVSpec, Namespace

BLOCK_TOKENS = 16
OBSERVATIONS = 200_000
SCRAPES = 20
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class MetricsCostOptions:
    """One measurement reads ``batch_bytes`` so many times, or leases that prefix so often."""

    pairs: int = 41
    block_bytes: int = 256 * KIB
    batch_bytes: int = 64 * MIB
    reads: int = 16
    leases: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("pairs", "block_bytes", "batch_bytes", "reads", "leases"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def dram_bytes(self) -> int:
        """What a daemon must have."""
        return max(4 * self.batch_bytes, 64 * MIB)


def run(
    options: MetricsCostOptions,
    connect_on: str,
    connect_off: str,
    port: int,
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """All figures by name; ``step`` is told what is measured next. Blocks for a minute or so.

    ``connect_on`` is the socket of the daemon that serves metrics on ``port`` of 127.0.0.1. Raises UnavailableError
    if one can't be reached, IntegrityError for wrong bytes.
    """
    figures: dict[str, float] = {"pairs": options.pairs}
    with _Side(connect_on, options, port) as on, _Side(connect_off, options) as off:
        for side in (on, off):
            side.read_s()  # maps memory
        step("reads with and without metrics")
        _compare(figures, "read", options.pairs, on.read_s, off.read_s)
        n_bytes = on.batch_bytes * options.reads
        for name in ("on", "off"):
            figures[f"read_{name}_gb_per_s"] = n_bytes / figures.pop(f"read_{name}_s") / 1e9
        step("leases with and without metrics")
        _compare(figures, "lease", options.pairs, on.lease_s, off.lease_s)
        for name, side in (("on", on), ("off", off)):
            figures[f"lease_{name}_us"] = figures.pop(f"lease_{name}_s") / options.leases * 1e6
            figures[f"lease_{name}_p99_us"] = float(np.percentile(side.lease_times_s, 99)) * 1e6
        step("scrapes")
        scrapes = [timed(on.scrape) for _ in range(SCRAPES)]
        figures["scrape_ms"] = float(np.median([seconds for seconds, _ in scrapes])) * 1e3
        figures["scrape_bytes"] = scrapes[-1][1]
    step("observations of a histogram")
    figures["observe_ns"] = _observe_s() * 1e9
    return figures


def _compare(
    figures: dict[str, float], name: str, pairs: int, on: Callable[[], float], off: Callable[[], float]
) -> None:
    seconds = paired(pairs, lambda _: on(), lambda _: off())
    ratios = seconds[:, 1] / seconds[:, 0]
    figures[f"{name}_ratio"] = float(np.median(ratios))
    figures[f"{name}_ratio_low"] = bootstrap_low(ratios)
    figures[f"{name}_on_s"], figures[f"{name}_off_s"] = map(float, np.median(seconds, axis=0))


class _Side:
    """A client of one of the two daemons, over blocks that it has stored. A context manager."""

    def __init__(self, connect: str, options: MetricsCostOptions, port: int = 0) -> None:
        self._options = options
        self._port = port
        self._n = max(1, options.batch_bytes // options.block_bytes)
        self.batch_bytes = self._n * options.block_bytes
        self.lease_times_s: list[float] = []
        rng = np.random.default_rng(options.seed)
        words = rng.integers(0, 1 << 64, self.batch_bytes // 8, dtype=np.uint64)
        self._blocks: NDArray[np.uint8] = words.view(np.uint8).reshape(self._n, options.block_bytes)
        self._tokens = rng.integers(0, 1 << 32, self._n * BLOCK_TOKENS, dtype=np.uint32)
        self._target = ordinary_array(self.batch_bytes).reshape(self._n, options.block_bytes)
        self._client = Client(connect, timeout_s=TIMEOUT_S, name="bench metrics")
        self._namespace = self._client.open(
            Namespace("bench:metrics", KVSpec.opaque(BLOCK_TOKENS, options.block_bytes))
        )
        self._namespace.put(self._tokens, self._blocks)

    def read_s(self) -> float:
        """Seconds that all reads of one measurement take together; a scrape begins with them."""
        return self._with_scrape(self._read_s)

    def lease_s(self) -> float:
        """The same for leases."""
        return self._with_scrape(self._lease_s)

    def scrape(self) -> int:
        """Fetch the metrics; returns the bytes of the answer."""
        with socket.create_connection(("127.0.0.1", self._port), TIMEOUT_S) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        if not answer.startswith(b"HTTP/1.0 200"):
            raise UnavailableError(f"port {self._port} answered {answer[:60]!r} instead of metrics")
        return len(answer)

    def _with_scrape(self, measure: Callable[[], float]) -> float:
        if not self._port:
            return measure()
        scraping = threading.Thread(target=self.scrape)
        scraping.start()
        try:
            return measure()
        finally:
            scraping.join()

    def _read_s(self) -> float:
        total_s = 0.0
        for _ in range(self._options.reads):
            self._target[:, 0] ^= 1
            seconds, got = timed(lambda: self._namespace.get_into(self._tokens, self._target))
            total_s += seconds
            if got.n_blocks != self._n or not np.array_equal(self._target, self._blocks):
                raise IntegrityError(f"{got.n_blocks} of {self._n} blocks were read, or other bytes: {got.reason}")
        return total_s

    def _lease_s(self) -> float:
        times_s = [timed(lambda: self._namespace.lease(self._tokens).release())[0] for _ in range(self._options.leases)]
        self.lease_times_s += times_s
        return sum(times_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()


def _observe_s() -> float:
    """Seconds of one observation as a request makes it: two looks at the clock, and a value counted."""
    histogram = Histogram()
    start_s = time.perf_counter()
    for _ in range(OBSERVATIONS):
        begun_s = time.perf_counter()
        histogram.observe(time.perf_counter() - begun_s)
    return (time.perf_counter() - start_s) / OBSERVATIONS
