"""Worker threads for the store's slow work, and the pump between them and the store.

Each lane has threads of its own, so that a disk that hangs for reads does not stop writes, nor names. The
threads are daemon threads: one that is stuck in the kernel keeps neither the loop nor the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from kvstore.jobs import Job, Jobs, Lane
from kvstore.logs import about

THREADS: Mapping[Lane, int] = {Lane.READ: 4, Lane.WRITE: 3, Lane.CATALOG: 1, Lane.DEVICE: 1}

log = logging.getLogger("kvstore.server")


class JobPump:
    """Runs what the store puts into ``jobs`` and hands it back. Call its methods on the loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, jobs: Jobs, feed: Callable[[], None]) -> None:
        """``feed`` puts what has become ready into ``jobs``."""
        self._loop = loop
        self._feed = feed
        self._jobs = jobs
        self._queues: dict[Lane, SimpleQueue[Job | None]] = {}
        self._threads: list[threading.Thread] = []
        self._ran: deque[Job] = deque()
        self._woken = False
        self._closed = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.n_running = 0
        """Jobs that were handed to a lane and have not come back."""
        self.n_failed = 0
        """Jobs that raised, which none may. Each is logged; above 0 the daemon has a fault."""

    def pump(self) -> None:
        """Hand out the jobs that wait. Cheap if there are none; never blocks."""
        self._feed()
        jobs = self._jobs
        while jobs and not self._closed:
            job = jobs.popleft()
            self.n_running += 1
            self._quiet.clear()
            self._queue(job.lane).put(job)

    async def until_quiet(self, deadline_s: float) -> bool:
        """Wait until no job is running or waiting, at most to ``deadline_s`` of the loop's clock; whether it is so."""
        self.pump()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s):
                await self._quiet.wait()
        return self._quiet.is_set()

    def start_threads(self) -> None:
        """Start all threads now, not with the first job: at the end of a program none can be started any more."""
        for lane in THREADS:
            self._queue(lane)

    def close(self, *, join: bool = False) -> None:
        """Take nothing back any more. Threads end with the job they are at, if that ever ends. Idempotent.

        With ``join``, for when no job is running, they have ended afterwards.
        """
        self._closed = True
        for lane, queue in self._queues.items():
            for _ in range(THREADS[lane]):
                queue.put(None)
        if join:
            for thread in self._threads:
                thread.join()

    def _queue(self, lane: Lane) -> SimpleQueue[Job | None]:
        queue = self._queues.get(lane)
        if queue is None:
            queue = self._queues[lane] = SimpleQueue()
            for number in range(THREADS[lane]):
                name = f"kvstore-{lane.value}-{number}"
                thread = threading.Thread(target=self._work, args=(queue,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        return queue

    def _work(self, queue: SimpleQueue[Job | None]) -> None:
        while (job := queue.get()) is not None:
            if self._closed:
                continue
            try:
                job.run()
            except BaseException:
                self.n_failed += 1
                log.exception(
                    "a %s job failed where none may", job.lane.value, extra=about("job_failed", lane=job.lane.value)
                )
            self._ran.append(job)
            if not self._woken:
                self._woken = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                    self._loop.call_soon_threadsafe(self._take_back)

    def _take_back(self) -> None:
        self._woken = False  # before looking: what comes from now on wakes again
        while self._ran and not self._closed:
            job = self._ran.popleft()
            self.n_running -= 1
            try:
                job.done()
            except Exception:
                # The daemon goes on: what it holds for this job stays as it is, and clients get misses.
                self.n_failed += 1
                log.exception(
                    "a %s job could not be taken in", job.lane.value, extra=about("job_lost", lane=job.lane.value)
                )
        self.pump()
        if not self.n_running:
            self._quiet.set()
