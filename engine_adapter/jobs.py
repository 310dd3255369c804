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
from kvstore.engine_adapter.moving import HERE, Moves
from kvstore.errors import DeviceError

_LOG = logging.getLogger(__name__)

LOOK_S = 0.0005
"""How often who waits for a layer on a device looks whether it is complete: events wake nobody here."""


class Job:
    """One transfer, with ``n_layers`` layers, over at ``deadline_s`` (of ``time.monotonic``) at the latest.

    On a device a layer is first given, then complete; a job is over only when all that was given is.
    """

    def __init__(self, n_layers: int, deadline_s: float) -> None:
        self.reason = ""
        """Why it did not succeed; final once it is over."""
        self._deadline_s = deadline_s
        self._n_layers = n_layers
        self._moves: Moves = HERE
        self._marks: list[int | None] = []
        """One for each layer that was given."""
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
            while self._n_done <= layer and not self._over:
                rest_s = deadline_s - time.monotonic()
                if rest_s <= 0:
                    return False
                if len(self._marks) > layer:
                    if self._moves.reached(self._marks[layer]):
                        return True
                    rest_s = min(rest_s, LOOK_S)
                self._state.wait(rest_s)
            return self._n_done > layer

    def let_wait(self, layer: int, stream: int, deadline_s: float) -> bool:
        """Block until a layer is given to the device, and let what the engine's stream is given from now on come after
        it; False if it won't be, or not by ``deadline_s``. Without a device as ``wait_layer``."""
        with self._state:
            rest_s = max(deadline_s - time.monotonic(), 0.0)
            self._state.wait_for(lambda: len(self._marks) > layer or self._over, rest_s)
            if len(self._marks) <= layer:
                return False
        self._moves.let_wait(stream, self._marks[layer])
        return True

    def wait_copied(self, deadline_s: float) -> bool:
        """Block until the engine may use the memory again; False if not by ``deadline_s``: cancel it then."""
        return self.wait_layer(self._n_layers - 1, deadline_s) or self.over

    def wait(self, deadline_s: float) -> bool:
        """Block until the job is over, at most until ``deadline_s``; True if it is over and succeeded."""
        with self._state:
            self._state.wait_for(lambda: self._over, max(deadline_s - time.monotonic(), 0.0))
            return self._over and not self.reason

    def cancel(self, why: str = "it was cancelled") -> None:
        """End it. Blocks until the copies that are under way are done. Does nothing when it is over."""
        # Said first: the thread could take the lock for all its layers before it is our turn.
        self._ending = self._ending or why
        with self._touching:
            self.finish(why)

    def use(self, moves: Moves) -> None:
        """What makes this job's copies; before the first."""
        self._moves = moves

    def step(self, copy: Callable[[], bool | None]) -> bool:
        """Copy one layer, or give it, unless the job is over or its time is; whether it was. ``copy`` may say False for
        a layer that is not whole, as the job is ending."""
        with self._touching:
            if self._ending:
                self.finish(self._ending)
            if self._over:
                return False
            if time.monotonic() >= self._deadline_s:
                self.finish("its deadline had passed")
                return False
            if copy() is False:
                self.finish(self._ending or "it was cancelled")
                return False
            mark = self._moves.mark()
        with self._state:
            self._marks.append(mark)
            self._n_done += mark is None
            self._state.notify_all()
        return True

    def complete(self, ahead: int = 0) -> None:
        """Block until all layers that were given are complete but the last ``ahead`` ones. Raises DeviceError."""
        while self._n_done < len(self._marks) - ahead:
            self._moves.sync(self._marks[self._n_done])
            with self._state:
                self._n_done += 1
                self._state.notify_all()

    def finish(self, reason: str = "") -> None:
        """It is over, with success unless there is a reason why not. Blocks until the copies under way are."""
        settled = True
        if not self._over:
            try:
                self._moves.settle()
            except DeviceError as error:
                reason, settled = reason or str(error), False
        with self._state:
            if not self._over:
                self._over, self.reason = True, reason
                self._n_done = len(self._marks) if settled else self._n_done
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
