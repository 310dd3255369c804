"""Calls that are cancelled: what they bring is given back, and what had not begun is not made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client.hands import Hands, _Call
from kvstore.wire.framing import Method
from tests.client.aio.scene import Held, awaited, cancel, content, opened, prompt, run, until


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
