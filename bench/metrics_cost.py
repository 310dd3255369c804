"""What metrics cost: two daemons that differ in nothing but the HTTP server, read from in turn.

Both as nobody scrapes (``steady``), which is what it costs to have metrics, and with a scrape a second, at the
beginning of measurements that take so long: a Prometheus asks every 15 s or so. Medians of ratios of pairs; bytes are
compared after the timing.
"""

from __future__ import annotations

import math
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
SCRAPE_EVERY_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class MetricsCostOptions:
    """One measurement reads ``batch_bytes`` so many times, or leases that prefix so often; one with a scrape does
    it more often, for ``scrape_every_s`` at least."""

    pairs: int = 21
    block_bytes: int = 256 * KIB
    batch_bytes: int = 64 * MIB
    reads: int = 16
    leases: int = 500
    scrape_every_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("pairs", "block_bytes", "batch_bytes", "reads", "leases"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.scrape_every_s <= SCRAPE_EVERY_S_MAX:
            raise BadInputError(f"scrape_every_s is {self.scrape_every_s}; give seconds up to {SCRAPE_EVERY_S_MAX:g}")

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
    """All figures by name; ``step`` is told what is measured next. Blocks for some minutes.

    ``connect_on`` is the socket of the daemon that serves metrics on ``port`` of 127.0.0.1. Raises UnavailableError
    if one can't be reached, IntegrityError for wrong bytes.
    """
    figures: dict[str, float] = {"pairs": options.pairs}
    with _Side(connect_on, options, port) as on, _Side(connect_off, options) as off:
        for side in (on, off):
            side.measure_s("read", 1)  # maps memory
        for what, n_times in (("read", options.reads), ("lease", options.leases)):
            step(f"{what}s with and without metrics")
            _compare(figures, what, n_times, on, off, options)
        figures["lease_on_p99_us"] = float(np.percentile(on.lease_times_s, 99)) * 1e6
        figures["lease_off_p99_us"] = float(np.percentile(off.lease_times_s, 99)) * 1e6
        step("scrapes")
        scrapes = [timed(on.scrape) for _ in range(SCRAPES)]
        figures["scrape_ms"] = float(np.median([seconds for seconds, _ in scrapes])) * 1e3
        figures["scrape_bytes"] = scrapes[-1][1]
    step("observations of a histogram")
    figures["observe_ns"] = _observe_s() * 1e9
    return figures


def _compare(
    figures: dict[str, float], what: str, n_times: int, on: _Side, off: _Side, options: MetricsCostOptions
) -> None:
    """Adds the figures of one operation: without scrapes, and with one at the start of each measurement."""
    steady_s = paired(options.pairs, lambda _: on.measure_s(what, n_times), lambda _: off.measure_s(what, n_times))
    each_s = float(np.median(steady_s)) / n_times
    n_long = max(n_times, math.ceil(options.scrape_every_s / each_s))
    scraped_s = paired(
        options.pairs, lambda _: on.scraped_s(what, n_long), lambda _: off.measure_s(what, n_long)
    )  # fmt: skip
    for name, seconds in ((f"{what}_steady", steady_s), (what, scraped_s)):
        ratios = seconds[:, 1] / seconds[:, 0]
        figures[f"{name}_ratio"], figures[f"{name}_ratio_low"] = float(np.median(ratios)), bootstrap_low(ratios)
    for side, seconds in zip(("on", "off"), np.median(scraped_s, axis=0) / n_long, strict=True):
        if what == "read":
            figures[f"read_{side}_gb_per_s"] = float(on.batch_bytes / seconds / 1e9)
        else:
            figures[f"lease_{side}_us"] = float(seconds * 1e6)


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

    def measure_s(self, what: str, n_times: int) -> float:
        """Seconds that so many reads or leases take together."""
        return (self._read_s if what == "read" else self._lease_s)(n_times)

    def scraped_s(self, what: str, n_times: int) -> float:
        """The same; a scrape begins with them."""
        scraping = threading.Thread(target=self.scrape)
        scraping.start()
        try:
            return self.measure_s(what, n_times)
        finally:
            scraping.join()

    def scrape(self) -> int:
        """Fetch the metrics; returns the bytes of the answer."""
        with socket.create_connection(("127.0.0.1", self._port), TIMEOUT_S) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        if not answer.startswith(b"HTTP/1.0 200"):
            raise UnavailableError(f"port {self._port} answered {answer[:60]!r} instead of metrics")
        return len(answer)

    def _read_s(self, n_times: int) -> float:
        total_s = 0.0
        for _ in range(n_times):
            self._target[:, 0] ^= 1
            seconds, got = timed(lambda: self._namespace.get_into(self._tokens, self._target))
            total_s += seconds
            if got.n_blocks != self._n or not np.array_equal(self._target, self._blocks):
                raise IntegrityError(f"{got.n_blocks} of {self._n} blocks were read, or other bytes: {got.reason}")
        return total_s

    def _lease_s(self, n_times: int) -> float:
        times_s = [timed(lambda: self._namespace.lease(self._tokens).release())[0] for _ in range(n_times)]
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
