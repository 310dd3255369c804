"""How the daemon is doing, apart from what its store holds: its loop, its requests, and who may ask over HTTP."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import Message

from kvstore.config import LogOptions, MetricsOptions
from kvstore.http.source import Phase, Pulse, Snapshot, TenantSample
from kvstore.logs import about
from kvstore.metrics import Distribution, Histogram, Histograms
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.wire.framing import Method

if TYPE_CHECKING:
    from kvstore.http.server import HttpServer

LAG_KEPT = 0.99
"""How much of the largest lag is left after each tick: what was long ago fades."""

WAITING_IS_THEIR_WORK = frozenset({Method.WATCH, Method.VERIFY})
"""Requests that are meant to take long."""

COUNTS = ("n_blocks", "n_pending", "n_durable")

log = logging.getLogger("kvstore.server")

Value = TypeVar("Value")
Numbers = Callable[[], tuple[dict[str, float], dict[str, str]]]


class Monitor:
    """Of one daemon. On the loop's thread, but for ``pulse`` and ``snapshot``: those are for threads of HTTP."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log_options: LogOptions, numbers: Numbers) -> None:
        """``numbers`` gives what ``stats`` does, once the daemon serves."""
        self.tenants: Callable[[], Sequence[TenantSample]] = tuple
        """Gives what tenants have, once there is a store."""
        self._loop = loop
        self._numbers = numbers
        self._stall_s = MetricsOptions().stall_s
        self._slow_s = log_options.slow_s or float("inf")
        self._phase = Phase.STARTING
        self._seen_s = time.monotonic()
        self._lag_s = Histogram()
        self._requests_s: Histograms[int] = Histograms()
        self._waits_s: Histograms[int] = Histograms()
        self._failures: Counter[int] = Counter()
        self.loop_lag_s_max = 0.0
        self.http: HttpServer | None = None

    def listen(self, options: MetricsOptions) -> None:
        """Answer over HTTP from now on, if that is asked for. Raises ConfigError if it can't be."""
        self._stall_s = options.stall_s
        if not options.enabled:
            return
        from kvstore.http.server import HttpServer  # only who wants it pays for importing it

        self.http = HttpServer(options, self)
        self.http.start()

    # On the loop -----------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """The daemon is in this phase from now on."""
        self._seen_s = time.monotonic()
        self._phase = phase

    def tick(self, lag_s: float) -> None:
        """The loop goes round; it is late by so much."""
        self._seen_s = time.monotonic()
        self._lag_s.observe(lag_s)
        self.loop_lag_s_max = max(self.loop_lag_s_max * LAG_KEPT, lag_s)

    def answered(
        self, method: int, took_s: float, session: Session | None, reply: Message, *, waited: bool = False
    ) -> None:
        """A request has been answered, at once or (``waited``) when what it waited for was there."""
        (self._waits_s if waited else self._requests_s).observe(method, took_s)
        if took_s >= self._slow_s and method not in WAITING_IS_THEIR_WORK:
            name, client = Method(method).name, session.client_name if session is not None else ""
            log.warning(
                "a %s request of client %s took %.3f s%s", name, client or "?", took_s, ", waiting" if waited else "",
                extra=about(
                    "slow_request", method=name.lower(), client=client, session=session.id if session else 0,
                    took_s=round(took_s, 6), waited=waited, **_told_of(reply),
                ),
            )  # fmt: skip

    def latencies(self) -> Iterator[tuple[str, bool, Distribution]]:
        """How long requests took: the method, whether they waited, and the times."""
        for waited, histograms in ((False, self._requests_s), (True, self._waits_s)):
            for method, distribution in _named(histograms.snapshot()).items():
                yield method, waited, distribution

    def failed(self, method: int) -> None:
        """A request has been answered with an error."""
        self._failures[method] += 1

    def measured(self, method: int, session: Session, work: Callable[[], Result]) -> Result:
        """What ``work`` answers, now or later, counted as ``answered`` or ``failed``. Raises what it raises."""
        begun_s = time.perf_counter()
        try:
            result = work()
        except Exception:
            self.failed(method)
            raise
        if isinstance(result, Reply):
            self.answered(method, time.perf_counter() - begun_s, session, result.message)
            return result
        return self._measured_later(method, session, result, begun_s)

    async def _measured_later(self, method: int, session: Session, result: Awaitable[Reply], begun_s: float) -> Reply:
        try:
            reply = await result
        except Exception:
            self.failed(method)
            raise
        self.answered(method, time.perf_counter() - begun_s, session, reply.message, waited=True)
        return reply

    def stop(self) -> None:
        """Nobody is answered over HTTP any more. Idempotent; blocks for a moment."""
        if self.http is not None:
            self.http.stop()

    def after_fork(self) -> None:
        """In a forked child: the address is the parent's alone."""
        if self.http is not None:
            self.http.after_fork()

    # On any thread ---------------------------------------------------------------------------------

    def pulse(self) -> Pulse:
        """See ``Source``."""
        return Pulse(self._phase, max(time.monotonic() - self._seen_s, 0.0), self._stall_s)

    def snapshot(self, timeout_s: float) -> Snapshot | None:
        """See ``Source``."""
        answer: concurrent.futures.Future[Snapshot] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(self._take, answer)
            return answer.result(timeout_s)
        except (RuntimeError, TimeoutError):  # the loop is closed; the loop is busy
            answer.cancel()
            return None

    def _take(self, answer: concurrent.futures.Future[Snapshot]) -> None:
        if not answer.set_running_or_notify_cancel():
            return  # whoever asked has given up
        try:
            numbers, texts = self._numbers() if self._phase is not Phase.STARTING else ({}, {})
            snapshot = Snapshot(
                numbers,
                texts,
                {"loop_lag_seconds": self._lag_s.snapshot()},
                {
                    "request_seconds": _named(self._requests_s.snapshot()),
                    "request_wait_seconds": _named(self._waits_s.snapshot()),
                },
                _named(self._failures),
                self.tenants() if self._phase is not Phase.STARTING else (),
            )
        except Exception as error:
            answer.set_exception(error)
        else:
            answer.set_result(snapshot)


def _told_of(reply: Message) -> dict[str, int]:
    """What a reply says of claims and blocks."""
    return {name: getattr(reply, name) for name in ("lease_id", "reservation_id", *COUNTS) if hasattr(reply, name)}


def _named(by_method: Mapping[int, Value]) -> dict[str, Value]:
    return {Method(method).name.lower(): value for method, value in by_method.items()}
