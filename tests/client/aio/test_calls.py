"""The client for asyncio: what awaiting adds. That its calls do the same as the blocking ones, the tests above this
folder say, which run over it too.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore import AsyncClient, Client, Namespace
from kvstore.cli.daemon_process import own_process
from kvstore.client.aio import AsyncLease, AsyncNamespace, AsyncReservation
from kvstore.client.results import Match, PutResult
from kvstore.errors import BadInputError, UnavailableError
from tests.client.aio.scene import BLOCK_BYTES, NAMESPACE, WAIT_S, content, hands, opened, prompt, run


def test_its_calls_have_the_types_and_arguments_of_the_blocking_ones(daemon: Any) -> None:
    async def main() -> None:
        async with opened(daemon) as (client, cache):
            put = await cache.put(prompt(4), content(4))
            assert_type(put, PutResult)
            found = await cache.match(prompt(4))
            assert_type(found, Match)
            assert (put.n_stored, found.n_blocks) == (4, 4)
            async with cache.lease(prompt(4), first_block=1) as lease:
                assert_type(lease, AsyncLease)
                assert_type(lease.n_blocks, int)
                assert_type(lease.addresses, NDArray[np.uint64])
                out = np.zeros((3, BLOCK_BYTES), np.uint8)
                assert_type(await lease.copy_into(out), int)
                np.testing.assert_array_equal(out, content(4)[1:])
                np.testing.assert_array_equal(lease[0], out[0])
                assert (await client.stats())["leases"] == 1
            assert not lease.valid
            assert_type(await client.stats(), dict[str, float | str])
            assert (await client.stats())["leases"] == 0
            slots = await cache.reserve(prompt(2, 1), n_blocks=2)
            assert_type(slots, AsyncReservation)
            async with slots:
                await slots.fill(content(2, 1))
                assert await slots.commit() == (2, 0)
            with pytest.raises(BadInputError, match="max_blocks is -1"):
                await cache.lease(prompt(1), max_blocks=-1)
            assert (await client.run(client.blocking.stats)).keys() == (await client.stats()).keys()

    assert inspect.signature(AsyncClient) == inspect.signature(Client)
    assert inspect.signature(AsyncNamespace.put) == inspect.signature(kvstore.NamespaceHandle.put)
    run(main())


def test_it_is_connected_when_it_is_entered_or_awaited(daemon: Any, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(UnavailableError, match="kvstore serve"):
            await AsyncClient(tmp_path / "nobody.sock")
        async with AsyncClient(tmp_path / "nobody.sock", required=False) as client:
            assert not client.healthy
            assert (await (await client.open(NAMESPACE)).match(prompt(1))).n_blocks == 0
        client = AsyncClient(daemon.config.socket_path, tenant="b", timeout_s=WAIT_S)
        with pytest.raises(UnavailableError, match="async with"):
            await client.stats()
        async with await client as same:
            assert same is client
            assert (client.healthy, client.tenant) == (True, "b")
            assert (await client.stats())["sessions"] == 1
        await client.close()
        await client.close()

    run(main())


def test_afterwards_everything_is_a_miss_at_once(daemon: Any) -> None:
    async def main() -> None:
        async with opened(daemon) as (client, cache):
            await cache.put(prompt(2), content(2))
            lease = await cache.lease(prompt(2))
        assert not hands()
        assert not lease.valid
        assert await lease.copy_into(np.zeros((2, BLOCK_BYTES), np.uint8)) == 0
        assert not await lease.renew()
        assert (await cache.match(prompt(2))).reason == "the client is closed"
        assert not await cache.lease(prompt(2))
        assert (await cache.put(prompt(1, 5), content(1, 5))).n_stored == 0
        with pytest.raises(UnavailableError, match="closed"):
            await client.stats()
        assert not hands()

    run(main())


def test_it_uses_an_embedded_store_too() -> None:
    async def main() -> None:
        store = await asyncio.to_thread(kvstore.open, dram="8MiB", prefault=False)
        async with AsyncClient.of(store) as client:
            cache = await client.open(NAMESPACE)
            await cache.put(prompt(3), content(3))
            out = np.zeros((3, BLOCK_BYTES), np.uint8)
            assert (await cache.get_into(prompt(3), out)).n_blocks == 3
            np.testing.assert_array_equal(out, content(3))
        assert not store.healthy
        with pytest.raises(BadInputError, match="give a kvstore"):
            AsyncClient.of(client)  # type: ignore[arg-type]

    run(main())


def test_one_that_is_forgotten_ends_its_threads(daemon: Any, wait_until: Callable[..., None]) -> None:
    async def main() -> None:
        client = await AsyncClient.of(Client(daemon.config.socket_path, timeout_s=WAIT_S))
        cache = await client.open(NAMESPACE)
        await asyncio.gather(*(cache.put(prompt(1, seed), content(1, seed)) for seed in range(20)))
        client.blocking.close()
        assert hands()

    run(main())
    gc.collect()
    wait_until(lambda: not hands(), "its threads end")


def test_the_loop_goes_on_while_the_daemon_is_stopped(tmp_path: Path) -> None:
    """Of each call: the loop turned many times between its beginning and its end, the deadline."""

    async def main(pid: int, path: Path) -> None:
        async with AsyncClient(path, timeout_s=0.3) as client:
            cache = await client.open(NAMESPACE)
            await cache.put(prompt(4), content(4))
            lease, slots = await cache.lease(prompt(4)), await cache.reserve(prompt(1, 3), n_blocks=1)
            n_turns = 0

            async def turn() -> None:
                nonlocal n_turns
                while True:
                    n_turns += 1
                    await asyncio.sleep(0.001)

            turning = asyncio.create_task(turn())
            out = np.zeros((4, BLOCK_BYTES), np.uint8)
            os.kill(pid, signal.SIGSTOP)
            try:
                calls: dict[str, Callable[[], Any]] = {
                    "match": lambda: cache.match(prompt(4)),
                    "lease": lambda: cache.lease(prompt(4), wait="best_effort"),
                    "get_into": lambda: cache.get_into(prompt(4), out),
                    "put": lambda: cache.put(prompt(1, 5), content(1, 5)),
                    "open": lambda: client.open(Namespace("another", NAMESPACE.spec)),
                    "renew": lease.renew,
                    "commit": slots.commit,
                    "connect": lambda: AsyncClient(path, timeout_s=0.3, required=False),
                }
                for name, call in calls.items():
                    os.kill(pid, signal.SIGCONT)
                    assert await client.wait_healthy(WAIT_S)
                    os.kill(pid, signal.SIGSTOP)
                    before = n_turns
                    result = await call()
                    assert n_turns - before > 20, name
                    if name == "connect":
                        assert not result.healthy
                        await result.close()
                turns = n_turns
                await lease.release()
                await client.close()
                assert n_turns > turns
            finally:
                os.kill(pid, signal.SIGCONT)
                turning.cancel()

    with own_process(["--dram", "16MiB"], tmp_path / "d.sock") as process:
        run(main(process.pid, process.socket_path))
