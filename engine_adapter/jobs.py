"""Transfers on threads of their own: ready layer by layer, with a deadline, and ended so that nothing is touched after.

Who cancels a job knows when ``cancel`` returns that the engine's memory is neither read nor written any more. A job
never raises into the engine: what went wrong is its ``reason``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvstore.engine_adapter.counters import SharedCounters

_LOG = logging.getLogger(__name__)


class Job:
    """One transfer, with ``n_layers`` layers, over at ``deadline_s`` (of ``time.monotonic``) at the latest."""

    def __init__(self, n_layers: int, deadline_s: float) -> None:
        self.reason = ""
        """Why it did not succeed; final once it is over."""
        self._deadline_s = deadline_s
        self._n_layers = n_layers
        self._n_done = 0
        self._over = False
        self._ending = ""
        self._state = threading.Condition()
        self._touching = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self._over

    @property
    def ending(self) -> bool:
        """Whether no further layer will be begun."""
        return bool(self._ending) or self._over

    def wait_layer(self, layer: int, deadline_s: float) -> bool:
        """Block until a layer is complete; False if it won't be, or not by ``deadline_s``."""
        with self._state:
            rest_s = max(deadline_s - time.monotonic(), 0.0)
            self._state.wait_for(lambda: self._n_done > layer or self._over, rest_s)
            return self._n_done > layer

    def wait_copied(self, deadline_s: float) -> bool:
        """Block until the engine may use the memory again; False if not by ``deadline_s``: cancel it then."""
        return self.wait_layer(self._n_layers - 1, deadline_s) or self.over

    def wait(self, deadline_s: float) -> bool:
        """Block until the job is over, at most until ``deadline_s``; True if it is over and succeeded."""
        with self._state:
            self._state.wait_for(lambda: self._over, max(deadline_s - time.monotonic(), 0.0))
            return self._over and not self.reason

    def cancel(self, why: str = "it was cancelled") -> None:
        """End it. Blocks until the copy of a layer that is under way is done. Does nothing when it is over."""
        # Said first: the thread could take the lock for all its layers before it is our turn.
        self._ending = self._ending or why
        with self._touching:
            self.finish(why)

    def step(self, copy: Callable[[], None]) -> bool:
        """Copy one layer, unless the job is over or its time is; whether it was copied."""
        with self._touching:
            if self._ending:
                self.finish(self._ending)
            if self._over:
                return False
            if time.monotonic() >= self._deadline_s:
                self.finish("its deadline had passed")
                return False
            copy()
        with self._state:
            self._n_done += 1
            self._state.notify_all()
        return True

    def finish(self, reason: str = "") -> None:
        """It is over, with success unless there is a reason why not."""
        with self._state:
            if not self._over:
                self._over, self.reason = True, reason
                self._state.notify_all()


class Workers:
    """Threads that do jobs, with a bound on how many wait. Usable from several threads."""

    def __init__(self, n_threads: int, waiting_max: int, counters: SharedCounters) -> None:
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="kvstore-adapter")
        self._places = threading.BoundedSemaphore(n_threads + waiting_max)
        self._counters = counters

    def start(self, job: Job, run: Callable[[], None]) -> None:
        """Have ``run`` done; if there is no room for one more, or it raises, the job is over with a reason."""
        if not self._places.acquire(blocking=False):
            self._counters.add("jobs_refused")
            job.cancel("too many transfers wait already")
            return
        try:
            self._pool.submit(self._do, job, run)
        except RuntimeError as error:
            self._places.release()
            job.cancel(str(error))

    def close(self) -> None:
        """Wait for the jobs that run; those that wait are cancelled."""
        self._pool.shutdown(wait=True, cancel_futures=False)

    def _do(self, job: Job, run: Callable[[], None]) -> None:
        try:
            if not job.over:
                run()
        except Exception as error:
            self._counters.add("errors")
            _LOG.exception("a transfer failed; the engine goes on without it")
            job.cancel(f"{type(error).__name__}: {error}")
        finally:
            self._places.release()
