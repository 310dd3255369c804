"""Many calls at once: few threads, quick calls beside those that wait, places to wait."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from kvstore.client.awaiting import COPIES_MAX
from kvstore.client.waiting import CONNECTIONS_MAX
from kvstore.tiers.nvme.faults import FaultyFiles
from tests.client.aio.scene import (
    BLOCK_BYTES,
    THREADS_MAX,
    WAIT_S,
    awaited,
    cancel,
    content,
    hands,
    opened,
    prompt,
    run,
    until,
)


def test_many_callers_share_few_threads(daemon: Any) -> None:
    async def main() -> None:
        async with opened(daemon) as (client, cache):

            async def each(seed: int) -> bool:
                assert (await cache.put(prompt(2, seed % 50), content(2, seed % 50))).reason == ""
                async with cache.lease(prompt(2, seed % 50)) as lease:
                    return len(lease) == 2 and bool((lease[1] == content(2, seed % 50)[1]).all())

            assert all(await asyncio.gather(*map(each, range(300))))
            assert len(hands()) <= 1 + COPIES_MAX
            assert (await client.stats())["leases"] == 0

    run(main())


def test_hundreds_that_wait_do_not_keep_quick_calls(disk: tuple[Any, FaultyFiles]) -> None:
    daemon, files = disk

    async def main() -> None:
        async with opened(daemon, timeout_s=60.0) as (client, cache):
            await cache.put(prompt(2, 1), content(2, 1))
            stuck = files.stick("read", times=None)
            waiting = [asyncio.ensure_future(awaited(cache.lease(prompt(8)))) for _ in range(300)]
            assert await asyncio.to_thread(stuck.reached.wait, WAIT_S)
            assert (await cache.match(prompt(8))).n_blocks == 8
            assert (await cache.put(prompt(2, 2), content(2, 2))).n_stored == 2
            out = np.zeros((2, BLOCK_BYTES), np.uint8)
            assert (await cache.get_into(prompt(2, 1), out, wait="best_effort")).n_blocks == 2
            async with cache.lease(prompt(2, 2), wait=0) as lease:
                assert len(lease) == 2
            assert (await client.stats())["leases"] == 0
            assert not any(task.done() for task in waiting)
            assert len(hands()) <= THREADS_MAX
            stuck.release()
            for lease in await asyncio.gather(*waiting):
                np.testing.assert_array_equal(lease[7], content(8)[7])
                await lease.release()

    run(main())


def test_who_finds_no_place_to_wait_gets_what_is_there(disk: tuple[Any, FaultyFiles]) -> None:
    daemon, files = disk

    async def main() -> None:
        async with opened(daemon, timeout_s=0.5) as (_, cache):
            stuck = files.stick("read", times=None)
            patient = [
                asyncio.ensure_future(awaited(cache.lease(prompt(8), wait=60.0))) for _ in range(CONNECTIONS_MAX)
            ]
            assert await asyncio.to_thread(stuck.reached.wait, WAIT_S)
            lease = await cache.lease(prompt(8), wait=60.0)
            assert (len(lease), lease.n_pending, lease.reason) == (0, 8, "")
            assert (await cache.persist(prompt(8), 60.0)).n_durable == 8
            assert not any(task.done() for task in patient)
            stuck.release()
            for lease in await asyncio.gather(*patient):
                async with lease:
                    assert len(lease) == 8

    run(main())


def test_waits_that_were_cancelled_hold_up_nobody(disk: tuple[Any, FaultyFiles]) -> None:
    daemon, files = disk

    async def main() -> None:
        async with opened(daemon, timeout_s=0.5) as (client, cache):
            stuck = files.stick("read", times=None)
            tasks = [asyncio.ensure_future(awaited(cache.lease(prompt(8), wait=600.0))) for _ in range(CONNECTIONS_MAX)]
            assert await asyncio.to_thread(stuck.reached.wait, WAIT_S)
            await until(lambda: daemon.call(lambda d: sum(len(s.waits) for s in d.sessions)) == CONNECTIONS_MAX)
            for task in tasks:
                await cancel(task)
            assert (await cache.lease(prompt(8), wait=600.0)).n_pending == 8
            stuck.release()

            async def all_given_back() -> bool:
                return (await client.stats())["leases"] == 0 and (await cache.match(prompt(8))).n_dram_blocks == 8

            await until(all_given_back)
            async with cache.lease(prompt(8), wait=600.0) as lease:
                assert len(lease) == 8

    run(main())


def test_a_cancelled_wait_returns_at_once_and_its_copy_is_never_made(disk: tuple[Any, FaultyFiles]) -> None:
    daemon, files = disk

    async def main() -> None:
        async with opened(daemon) as (client, cache):
            stuck, out = files.stick("read", times=None), np.zeros((8, BLOCK_BYTES), np.uint8)
            task = asyncio.ensure_future(cache.get_into(prompt(8), out, wait=600.0))
            assert await asyncio.to_thread(stuck.reached.wait, WAIT_S)
            await cancel(task)
            stuck.release()

            async def all_given_back() -> bool:
                return (await client.stats())["leases"] == 0 and (await cache.match(prompt(8))).n_dram_blocks == 8

            await until(all_given_back)
        assert not out.any()  # and no thread is left that might copy

    run(main())
