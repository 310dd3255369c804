"""A daemon inside another program: on a thread with a loop of its own, out of the way of everything else there.

It installs no signal handlers, changes no limits and leaves the collector alone; whoever made it ends it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from kvstore.clock import Clock
from kvstore.config import DaemonConfig
from kvstore.errors import UnavailableError
from kvstore.logs import about
from kvstore.server.daemon import Daemon
from kvstore.server.polling import new_loop
from kvstore.tiers.nvme.files import Files

ResultT = TypeVar("ResultT")

STOP_S = 10.0
"""What a daemon that ends may take beyond its time to write what waits."""

log = logging.getLogger("kvstore.server")


class DaemonThread:
    """A daemon and its thread. All methods may be called from any other thread.

    Construction blocks until clients can come, as long as an NVMe tier reads its catalog, and raises what
    ``Daemon`` raises. ``files`` replaces the disk below that tier.
    """

    def __init__(self, config: DaemonConfig, clock: Clock | None = None, files: Files | None = None) -> None:
        self.config = config
        self.in_order = False
        """Once it has ended: whether all was written, and memory and files were given back."""
        self._failures: list[BaseException] = []
        self._ready = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # ``end`` may be a finalizer's, at any point
        self._ending = False
        self._thread = threading.Thread(target=self._run, args=(clock, files), name="kvstored", daemon=True)
        _threads.add(self)
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # Ctrl-C, most likely: nobody gets hold of what is being started
            self.end()
            raise
        if self._failures:
            self._thread.join()
            raise self._failures.pop()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def take(self, sock: socket.socket) -> None:
        """Serve the client at the other end of a connected Unix socket, which is the daemon's from now on.

        Raises UnavailableError if the daemon ends or has ended; the socket is the caller's still.
        """
        with self._lock:  # what is taken before the end begins is closed by it
            if self._ending:
                raise UnavailableError("the store was closed")
            self._loop.call_soon_threadsafe(self.daemon.take, sock)

    def call(self, function: Callable[[Daemon], ResultT], timeout_s: float) -> ResultT:
        """``function(daemon)`` on the daemon's own thread: what it returns or raises.

        Raises UnavailableError if the daemon has ended, TimeoutError if it does not come to it in time.
        """

        async def run() -> ResultT:
            return function(self.daemon)

        with self._lock:
            if self._ending:
                raise UnavailableError("the store was closed")
            asked = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return asked.result(timeout_s)

    def end(self) -> None:
        """Have it end: close connections, write what waits, give everything back. Never blocks; idempotent.

        Here and in ``stop`` nothing happens in a forked child: the daemon is its parent's.
        """
        if os.getpid() != self._pid:
            return  # before the lock, which a thread that is not here may hold
        with self._lock:
            if not self._ending:
                self._ending = True
                if self._ready.is_set() and self.alive:
                    self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> bool:
        """``end``, and wait for it: for ``drain_s`` of its configuration and ``STOP_S`` at most.

        False if a disk that hangs kept it from giving everything back; that is then done by the end of the process.
        """
        self.end()
        if os.getpid() != self._pid:
            return False
        self._thread.join(self.config.drain_s + STOP_S)
        if self.alive:
            log.warning(
                "the store did not end within %.0f s: its disk hangs", self.config.drain_s + STOP_S,
                extra=about("stop_cut_short", waited_s=self.config.drain_s + STOP_S),
            )  # fmt: skip
        return self.in_order

    def after_fork(self) -> None:
        """In a forked child, before anything else happens there."""
        self._ending = True
        if self._ready.is_set() and not self._failures:
            self.daemon.after_fork()

    def _run(self, clock: Clock | None, files: Files | None) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: new_loop(self.config)) as runner:
                runner.run(self._serve(clock, files))
        except BaseException as error:
            if self._ready.is_set() and not self.in_order:
                log.exception(
                    "the store has ended by a fault of its own: clients get misses", extra=about("store_failed")
                )
            self._failures.append(error)
        finally:
            with self._lock:
                self._ending = True
            self._ready.set()

    async def _serve(self, clock: Clock | None, files: Files | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.daemon = Daemon(self.config, clock, files)
        self.daemon.start()
        self._ready.set()
        with self._lock:
            if self._ending:  # before anybody could say so to the loop
                self._stop.set()
        await self._stop.wait()
        self.in_order = await self.daemon.stop()


_threads: weakref.WeakSet[DaemonThread] = weakref.WeakSet()


def _after_fork() -> None:
    for thread in _threads:
        thread.after_fork()


os.register_at_fork(after_in_child=_after_fork)
