"""A real daemon for tests: on a thread of its own with the same code as ``kvstore serve``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvstore.client import Client
from kvstore.clock import ManualClock
from kvstore.config import DaemonConfig
from kvstore.server.daemon import Daemon
from kvstore.tiers.nvme.files import Files

MIB = 1 << 20
WAIT_S = 20.0

# Time says nothing here: a busy machine draws examples slowly. Tests that name checks of their own name this one, too.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


class DaemonThread:
    """A daemon in this process. ``call(function)`` runs ``function(daemon)`` on its loop's thread.

    ``files`` replaces the disk below an NVMe tier.
    """

    def __init__(self, config: DaemonConfig, clock: ManualClock | None = None, files: Files | None = None) -> None:
        self.config = config
        self.clock = clock
        self._files = files
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self.stopped_in_order = False
        self._thread = threading.Thread(target=self._run, name="daemon", daemon=True)
        self._thread.start()
        assert self._ready.wait(WAIT_S), "the daemon did not start in time"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            self.daemon = Daemon(self.config, self.clock, self._files)
            self.daemon.start()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._ready.set()
        await self._stop.wait()
        self.stopped_in_order = await self.daemon.stop()

    def call(self, function: Callable[[Daemon], Any]) -> Any:
        """Run on the loop and return the result, or raise what it raised."""

        async def run() -> Any:
            return function(self.daemon)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the daemon did not stop in time"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll for a state that another thread or process brings about; fails after ``WAIT_S``."""
    done = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        done.wait(0.005)
    pytest.fail(f"did not happen within {WAIT_S} s: {what}")


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[[Callable[[], bool], str], None]:
    return wait_until


@pytest.fixture
def config(tmp_path: Path) -> DaemonConfig:
    return DaemonConfig(socket_path=tmp_path / "d.sock", dram_bytes=8 * MIB, prefault=False, heartbeat_s=5.0)


@pytest.fixture
def start_daemon(config: DaemonConfig) -> Iterator[Callable[..., DaemonThread]]:
    """``start_daemon(clock=None, files=None, **settings)``; all are checked and stopped at the end."""
    started: list[DaemonThread] = []

    def start(clock: ManualClock | None = None, files: Files | None = None, **settings: Any) -> DaemonThread:
        started.append(DaemonThread(replace(config, **settings), clock, files))
        return started[-1]

    yield start
    for thread in started:
        if thread._thread.is_alive():
            thread.call(lambda daemon: daemon.store.check())
        thread.stop()


@pytest.fixture
def nvme(tmp_path: Path) -> dict[str, Any]:
    """Settings of an NVMe tier for ``start_daemon``: daemons of one test find what the one before left."""
    return {"nvme_dir": tmp_path / "nvme", "nvme_bytes": 64 * MIB}


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonThread]) -> DaemonThread:
    return start_daemon()


@pytest.fixture
def client(daemon: DaemonThread) -> Iterator[Client]:
    with Client(daemon.config.socket_path, timeout_s=5.0) as connected:
        yield connected
