"""A daemon of a test's own, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import DaemonConfig
from kvstore.server.daemon import Daemon

StartDaemon = Callable[..., str]
RunningDaemon = Callable[..., AbstractContextManager[str]]


@contextmanager
def running_daemon(dram_bytes: int, **settings: Any) -> Iterator[str]:
    """Yields the socket path of a daemon whose policy clock is the client's; ``settings`` as in ``DaemonConfig``, but
    that its policy is LRU."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        socket_path = Path(folder) / "d.sock"
        config = DaemonConfig(
            socket_path=socket_path, dram_bytes=dram_bytes, policy_clock="client", **{"policy": "lru"} | settings
        )
        started, stop = threading.Event(), threading.Event()
        failures: list[BaseException] = []

        async def serve() -> None:
            daemon = Daemon(config)
            daemon.start()
            started.set()
            try:
                await asyncio.to_thread(stop.wait)
            finally:
                await daemon.stop()

        def run() -> None:
            try:
                asyncio.run(serve())
            except BaseException as error:
                failures.append(error)
                started.set()

        thread = threading.Thread(target=run)
        thread.start()
        started.wait()
        try:
            if failures:
                raise failures[0]
            yield str(socket_path)
        finally:
            stop.set()
            thread.join()
        assert not failures


@pytest.fixture
def start_daemon() -> Iterator[StartDaemon]:
    """Starts daemons by their DRAM size in bytes and other settings; all are stopped at the end of the test."""
    with ExitStack() as stack:
        yield lambda dram_bytes, **settings: stack.enter_context(running_daemon(dram_bytes, **settings))


@pytest.fixture(scope="session")
def daemon_context() -> RunningDaemon:
    """For fixtures that outlive one test."""
    return running_daemon
