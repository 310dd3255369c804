"""What tests of the asyncio client share: prompts and blocks, loops, and a daemon that is held up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import AsyncClient, KVSpec, Namespace
from kvstore.client.aio import AsyncNamespace
from kvstore.client.awaiting import COPIES_MAX
from kvstore.client.waiting import CONNECTIONS_MAX

ResultT = TypeVar("ResultT")

WAIT_S = 20.0

BLOCK_TOKENS, BLOCK_BYTES = 16, 8192

NAMESPACE = Namespace("model", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))

THREADS_MAX = 1 + COPIES_MAX + CONNECTIONS_MAX


def prompt(n_blocks: int, seed: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 50_000, n_blocks * BLOCK_TOKENS, dtype=np.uint32)


def content(n_blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1000).integers(0, 256, (n_blocks, BLOCK_BYTES), dtype=np.uint8)


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    async def bounded() -> ResultT:
        async with asyncio.timeout(90.0):
            return await main

    return asyncio.run(bounded())


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Ask again until it is so; fails after ``WAIT_S``."""
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = condition()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.001)


async def awaited(coming: Awaitable[ResultT]) -> ResultT:
    """Anything that can be awaited, as what makes a task."""
    return await coming


def hands() -> set[threading.Thread]:
    """The threads of asyncio clients."""
    names = ("kvstore-quick", "kvstore-copies", "kvstore-waits")
    return {thread for thread in threading.enumerate() if thread.name.startswith(names)}


class Held:
    """The loop of the fixtures' daemon, kept from answering until told otherwise."""

    def __init__(self, daemon: Any) -> None:
        self._go, held = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            self._go.wait(WAIT_S)

        daemon._loop.call_soon_threadsafe(hold)
        assert held.wait(WAIT_S)

    def let_go(self) -> None:
        self._go.set()


@asynccontextmanager
async def opened(daemon: Any, timeout_s: float = WAIT_S) -> AsyncIterator[tuple[AsyncClient, AsyncNamespace]]:
    async with AsyncClient(daemon.config.socket_path, timeout_s=timeout_s) as client:
        yield client, await client.open(NAMESPACE)


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
