"""The client for asyncio: what awaiting adds. That its calls do the same as the blocking ones, the tests beside this
one say, which run over it too."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore import AsyncClient, Client, KVSpec, Namespace
from kvstore.cli.daemon_process import own_process
from kvstore.client.aio import AsyncLease, AsyncNamespace, AsyncReservation
from kvstore.client.awaiting import COPIES_MAX
from kvstore.client.hands import Hands, _Call
from kvstore.client.results import Match, PutResult
from kvstore.client.transport import Transport
from kvstore.client.waiting import CONNECTIONS_MAX
from kvstore.errors import BadInputError, UnavailableError
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.wire.framing import Method

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


@pytest.fixture(autouse=True)
def _no_threads_left() -> Any:
    assert not hands()
    yield
    assert not hands()


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


# Cancelling --------------------------------------------------------------------------------------


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Method]:
    """What clients have sent, but for what tests ask in between."""
    found: list[Method] = []
    send = Transport.send

    def spied(self: Transport, method: Method, *arguments: Any, **more: Any) -> int:
        request_id = send(self, method, *arguments, **more)
        if method not in (Method.STATS, Method.HEARTBEAT, Method.HELLO):
            found.append(method)
        return request_id

    monkeypatch.setattr(Transport, "send", spied)
    return found


@pytest.mark.parametrize(
    ("ask", "method", "gauge"),
    [
        (lambda cache: cache.lease(prompt(3)), Method.LEASE, "leases"),
        (lambda cache: cache.reserve(prompt(2, 9), n_blocks=2), Method.RESERVE, "dram_reserved_bytes"),
        (lambda cache: cache.pin(prompt(3)), Method.PIN, "pins"),
    ],
)
def test_what_comes_after_a_cancellation_is_given_back(
    daemon: Any, sent: list[Method], ask: Callable[..., Any], method: Method, gauge: str
) -> None:
    async def main() -> None:
        async with opened(daemon) as (client, cache):
            await cache.put(prompt(3), content(3))
            sent.clear()
            held = Held(daemon)
            task = asyncio.ensure_future(awaited(ask(cache)))
            await until(lambda: method in sent)
            await cancel(task)
            held.let_go()
            granted = await client.stats()  # behind the answer, and before what gives it back
            assert granted[gauge] != 0

            async def given_back() -> bool:
                return (await client.stats())[gauge] == 0

            await until(given_back)

    run(main())


def test_what_was_not_begun_before_its_cancellation_is_not_made(daemon: Any, sent: list[Method]) -> None:
    async def main() -> None:
        async with opened(daemon) as (client, cache):
            await cache.put(prompt(3), content(3))
            held = Held(daemon)
            first, second = asyncio.ensure_future(cache.match(prompt(3))), asyncio.ensure_future(cache.pin(prompt(3)))
            await until(lambda: Method.MATCH in sent)
            await cancel(second)
            held.let_go()
            assert (await first).n_blocks == 3
            assert (await client.stats())["pins"] == 0
            assert Method.PIN not in sent

    run(main())


def test_a_cancellation_that_meets_the_answer_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = _Call.deliver

    async def main() -> None:
        hands = Hands("quick", 1)
        given_back: list[int] = []
        task = asyncio.ensure_future(hands.do(lambda: 5, given_back.append))

        def meet(call: _Call[Any]) -> None:
            deliver(call)
            task.cancel()

        monkeypatch.setattr(_Call, "deliver", meet)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert given_back == [5]
        monkeypatch.setattr(_Call, "deliver", deliver)
        assert await hands.do(lambda: 6, given_back.append) == 6
        assert given_back == [5]
        await hands.end()

    run(main())


def test_a_cancelled_block_lets_go_of_what_it_holds(daemon: Any) -> None:
    async def main() -> None:
        async with opened(daemon) as (client, cache):
            await cache.put(prompt(3), content(3))
            inside = asyncio.Event()

            async def hold() -> None:
                async with cache.lease(prompt(3)), cache.reserve(prompt(1, 7), n_blocks=1):
                    inside.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hold())
            await inside.wait()
            assert (await client.stats())["leases"] == 1
            await cancel(task)
            stats = await client.stats()
            assert stats["leases"] == 0

            async def aborted() -> bool:
                return (await client.stats())["dram_reserved_bytes"] == 0

            await until(aborted)

    run(main())


def test_a_timeout_is_a_cancellation(daemon: Any) -> None:
    async def main() -> None:
        async with opened(daemon) as (client, cache):
            held = Held(daemon)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(cache.match(prompt(1)), 0.01)
            held.let_go()
            assert (await cache.match(prompt(1))).reason == ""
            assert client.healthy

    run(main())


# Many at once ------------------------------------------------------------------------------------


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


@pytest.fixture
def disk(start_daemon: Callable[..., Any], nvme: dict[str, Any]) -> Iterator[tuple[Any, FaultyFiles]]:
    """A daemon that has prompt 0 on its disk only, and that disk."""
    first = start_daemon(**nvme)
    with Client(first.config.socket_path, timeout_s=WAIT_S) as client:
        assert client.open(NAMESPACE).put(prompt(8), content(8), durable_within_s=WAIT_S).n_durable == 8
    first.stop()
    files = FaultyFiles(DirectFiles(nvme["nvme_dir"]))
    yield start_daemon(files=files, **nvme, io_timeout_s=600.0), files
    files.release_all()


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


# A daemon that hangs -----------------------------------------------------------------------------


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
