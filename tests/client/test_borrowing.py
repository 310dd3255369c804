"""Cancelling a call that copies: it returns when the caller's arrays are the caller's own again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import AsyncClient, native
from kvstore.client.borrowing import AbandonedError, Borrowing, current
from kvstore.client.hands import Hands
from kvstore.config import DaemonConfig
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace
from kvstore.wire.block_chunks import BlockChunks
from tests.client.conftest import grpc_options
from tests.client.stopped import WAIT_S, Stopped

BLOCK_TOKENS, BLOCK_BYTES, N = 16, 8192, 4
NAMESPACE = Namespace("model", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
GROUP = KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=BLOCK_BYTES)
Blocks = NDArray[np.uint8]


def prompt(seed: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 50_000, N * BLOCK_TOKENS, dtype=np.uint32)


def content(value: int) -> Blocks:
    return np.full((N, BLOCK_BYTES), value, np.uint8)


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90.0):
            await main

    asyncio.run(bounded())


@asynccontextmanager
async def opened(target: Any) -> AsyncIterator[tuple[AsyncClient, Any]]:
    async with AsyncClient(target, timeout_s=WAIT_S) as client:
        yield client, await client.open(NAMESPACE)


@pytest.fixture(params=["unix", "grpc"])
def target(request: pytest.FixtureRequest, start_daemon: Callable[..., Any], config: DaemonConfig) -> Any:
    if request.param == "unix":
        return start_daemon().config.socket_path
    start_daemon(grpc=grpc_options(config))
    return f"grpc+{grpc_options(config).listen}"


async def cancelled_in(stopped: Stopped, coming: Awaitable[object]) -> None:
    """Cancel what makes the copy, twice; see that this returns after the copy, not before."""

    async def awaited() -> object:
        return await coming

    task = asyncio.create_task(awaited())
    assert await asyncio.to_thread(stopped.reached.wait, WAIT_S)
    try:
        for _ in range(2):
            task.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not task.done(), "its caller has its memory back, and the copy has not ended"
    finally:
        stopped.let_go()
    with pytest.raises(asyncio.CancelledError):
        await task


async def until(client: AsyncClient, gauge: str, value: float | str = 0) -> None:
    """Until the daemon's gauge has this value."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if (await client.stats())[gauge] == value:
                return
            await asyncio.sleep(0.001)


async def nothing_reserved(client: AsyncClient) -> None:
    await until(client, "dram_reserved_bytes")


def copies_of(target: Any, patch: pytest.MonkeyPatch, remote: str) -> Stopped:
    """The next copy from or to a caller's array: over gRPC by the function of this name."""
    if str(target).startswith("grpc+"):
        return Stopped(patch, BlockChunks, remote)
    return Stopped(patch, native, "copy_batch")


def test_a_cancelled_put_stores_nothing_of_afterwards(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(target) as (client, cache):
            blocks = content(1)
            await cancelled_in(copies_of(target, monkeypatch, "chunk_of"), cache.put(prompt(), blocks))
            blocks[:] = 0xEE
            await nothing_reserved(client)
            out = content(0)
            n = (await cache.get_into(prompt(), out)).n_blocks
            if not str(target).startswith("grpc+"):  # there its last message may be on its way
                assert n == 0
            assert (out[:n] == 1).all()
            again = await cache.put(prompt(), content(1))
            assert again.n_stored + again.n_present == N
            assert client.healthy

    run(main())


def test_a_cancelled_put_of_groups_stores_nothing(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of the copies that it makes: of groups into one, and that to the slots."""

    async def main() -> None:
        async with AsyncClient(daemon.config.socket_path, timeout_s=WAIT_S) as client:
            state = KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=64, kind=GroupKind.STATE)
            cache = await client.open_hybrid(Namespace("hybrid", KVSpec(BLOCK_TOKENS, (GROUP, GROUP, state))))
            for module, name in ((np, "concatenate"), (native, "copy_batch")):
                tokens, blocks = prompt(), {0: content(1), 1: content(2)}
                with monkeypatch.context() as patch:
                    await cancelled_in(Stopped(patch, module, name), cache.put(tokens, blocks))
                blocks[0][:] = blocks[1][:] = 0xEE
                await nothing_reserved(client)
                assert (await cache.match(tokens)).by_group == (0, 0, 0)

    run(main())


@pytest.mark.parametrize("way", ["get_into", "copy_into"])
def test_a_cancelled_read_writes_nothing_afterwards(target: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(target) as (client, cache):
            assert (await cache.put(prompt(), content(1))).n_stored == N
            out = content(0)
            lease = await cache.lease(prompt())
            coming = cache.get_into(prompt(), out) if way == "get_into" else lease.copy_into(out)
            await cancelled_in(copies_of(target, monkeypatch, "take"), coming)
            await lease.release()
            out[:] = 7
            await until(client, "leases")
            assert (out == 7).all()
            assert (await cache.get_into(prompt(), out)).n_blocks == N
            assert (out == 1).all()

    run(main())


def test_a_cancelled_fill_is_over_before_its_slots_are_given_back(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(target) as (client, cache):
            stopped = Stopped(monkeypatch, native, "copy_batch")

            async def fill() -> None:
                async with cache.reserve(prompt(), n_blocks=N) as slots:
                    await slots.fill(content(0xEE))

            await cancelled_in(stopped, fill())
            await nothing_reserved(client)
            assert (await cache.match(prompt())).n_blocks == 0

    run(main())


def test_a_block_that_is_left_keeps_its_slots_until_a_fill_has_ended(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(target) as (client, cache):
            stopped = Stopped(monkeypatch, native, "copy_batch")
            async with cache.reserve(prompt(), n_blocks=N) as slots:
                filling = asyncio.create_task(slots.fill(content(0xEE)))
                assert await asyncio.to_thread(stopped.reached.wait, WAIT_S)
            reserved = (await client.stats())["dram_reserved_bytes"]
            async with cache.reserve(prompt(1), n_blocks=N):
                pass
            await until(client, "dram_reserved_bytes", reserved)
            assert reserved != 0
            stopped.let_go()
            await filling
            await nothing_reserved(client)

    run(main())


# What it is made of ------------------------------------------------------------------------------


def test_a_call_that_only_waits_is_cancelled_at_once_and_touches_nothing_then() -> None:
    async def main() -> None:
        hands = Hands("copies", 1)
        begun, go, out = threading.Event(), threading.Event(), np.zeros(4)
        ended: list[BaseException] = []

        def work() -> None:
            begun.set()
            assert go.wait(WAIT_S)
            try:
                with current().touching():
                    out[:] = 1
            except AbandonedError as error:
                ended.append(error)
                raise

        task = asyncio.create_task(hands.do(work))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await hands.end()
        assert len(ended) == 1
        assert not out.any()

    run(main())


def test_nothing_is_touched_for_nobody_and_the_end_of_the_last_is_told() -> None:
    borrowing, told = Borrowing(), list[int]()
    with borrowing.here():
        assert current() is borrowing
        with current().touching():
            with current().touching():
                assert not borrowing.abandon(lambda: told.append(1))
            assert told == []
            with pytest.raises(AbandonedError), borrowing.touching():
                raise AssertionError("it was begun")
            assert told == []
        assert told == [1]
        with pytest.raises(AbandonedError):
            current().must_be_wanted()
        assert borrowing.abandon(lambda: told.append(2))
    assert current() is not borrowing
    with current().touching():
        assert told == [1]
