"""The pump: jobs run on their lane's threads and come back on the loop's, whatever happens to one of them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.jobs import Job, Jobs, Lane
from kvstore.server.jobs import THREADS, JobPump

WAIT_S = 20.0


def in_loop(body: Callable[[JobPump, Jobs], Any]) -> None:
    """Run a coroutine function with a pump; no thread of it is left behind."""
    before = threading.active_count()

    async def main() -> None:
        jobs = Jobs()
        pump = JobPump(asyncio.get_running_loop(), jobs, lambda: None)
        try:
            await body(pump, jobs)
        finally:
            pump.close()

    asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name.startswith("kvstore-") and thread.name.split("-")[1] in {lane.value for lane in Lane}:
            thread.join(WAIT_S)
    assert threading.active_count() == before


async def quiet(pump: JobPump) -> bool:
    return await pump.until_quiet(asyncio.get_running_loop().time() + WAIT_S)


def test_jobs_run_elsewhere_and_come_back_here() -> None:
    async def body(pump: JobPump, jobs: Jobs) -> None:
        loop_thread = threading.get_ident()
        ran: list[tuple[str, int]] = []
        done: list[int] = []
        for lane in Lane:
            for _ in range(20):
                jobs.append(
                    Job(
                        lane,
                        lambda lane=lane: ran.append((lane.value, threading.get_ident())),  # type: ignore[misc]
                        lambda: done.append(threading.get_ident()),
                    )
                )
        assert await quiet(pump)
        assert len(ran) == 20 * len(Lane)
        assert done == [loop_thread] * len(ran)
        by_lane = {lane: {thread for name, thread in ran if name == lane.value} for lane in Lane}
        for lane, threads in by_lane.items():
            assert loop_thread not in threads
            assert len(threads) <= THREADS[lane]
        assert not by_lane[Lane.READ] & by_lane[Lane.WRITE]

    in_loop(body)


def test_a_job_that_is_done_may_bring_others() -> None:
    async def body(pump: JobPump, jobs: Jobs) -> None:
        order: list[int] = []

        def next_job(n: int) -> Job:
            def done() -> None:
                order.append(n)
                if n < 50:
                    jobs.append(next_job(n + 1))

            return Job(list(Lane)[n % 3], lambda: None, done)

        jobs.append(next_job(0))
        assert await quiet(pump)
        assert order == list(range(51))
        assert pump.n_running == 0

    in_loop(body)


def test_the_catalogs_jobs_run_one_at_a_time_in_order() -> None:
    async def body(pump: JobPump, jobs: Jobs) -> None:
        entered: list[int] = []
        inside, most = [0], [0]

        def run(n: int) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            entered.append(n)
            time.sleep(0)
            inside[0] -= 1

        jobs.extend(Job(Lane.CATALOG, lambda n=n: run(n), lambda: None) for n in range(200))  # type: ignore[misc]
        assert await quiet(pump)
        assert entered == list(range(200))
        assert most == [1]

    in_loop(body)


def test_a_stuck_lane_holds_up_no_other() -> None:
    async def body(pump: JobPump, jobs: Jobs) -> None:
        release = threading.Event()
        done: list[str] = []
        for _ in range(THREADS[Lane.READ] + 3):
            jobs.append(Job(Lane.READ, lambda: release.wait(WAIT_S), lambda: done.append("read")))  # type: ignore[arg-type]
        written = asyncio.Event()
        jobs.append(Job(Lane.WRITE, lambda: None, written.set))
        named = asyncio.Event()
        jobs.append(Job(Lane.CATALOG, lambda: None, named.set))
        pump.pump()
        async with asyncio.timeout(WAIT_S):
            await written.wait()
            await named.wait()
        assert done == []
        start = time.monotonic()
        assert not await pump.until_quiet(asyncio.get_running_loop().time() + 0.05)
        assert time.monotonic() - start < WAIT_S / 2
        assert pump.n_running == THREADS[Lane.READ] + 3
        release.set()
        assert await quiet(pump)
        assert done == ["read"] * (THREADS[Lane.READ] + 3)

    in_loop(body)


def test_a_job_that_fails_where_none_may_is_logged_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def body(pump: JobPump, jobs: Jobs) -> None:
        done: list[str] = []

        def boom() -> None:
            raise RuntimeError("boom")

        jobs.append(Job(Lane.CATALOG, boom, lambda: done.append("first")))
        jobs.append(Job(Lane.CATALOG, lambda: None, boom))
        jobs.append(Job(Lane.CATALOG, lambda: None, lambda: done.append("last")))
        assert await quiet(pump)
        assert done == ["first", "last"]
        assert pump.n_failed == 2

    with caplog.at_level(logging.ERROR):
        in_loop(body)
    assert caplog.text.count("RuntimeError: boom") == 2


def test_after_the_close_nothing_is_run_or_taken_back() -> None:
    entered, release = threading.Event(), threading.Event()
    later: list[str] = []

    async def body(pump: JobPump, jobs: Jobs) -> None:
        def run() -> None:
            entered.set()
            release.wait(WAIT_S)

        jobs.append(Job(Lane.CATALOG, run, lambda: later.append("taken back")))
        jobs.append(Job(Lane.CATALOG, lambda: later.append("run"), lambda: None))
        pump.pump()
        await asyncio.to_thread(entered.wait, WAIT_S)
        pump.close()
        jobs.append(Job(Lane.WRITE, lambda: later.append("run"), lambda: None))
        pump.pump()
        asyncio.get_running_loop().call_later(0, release.set)

    in_loop(body)
    assert later == []


def test_threads_can_be_started_ahead_and_joined_at_the_close() -> None:
    """At the end of a program, for one: no thread can be started there any more."""
    before = set(threading.enumerate())
    done: list[str] = []

    async def body(pump: JobPump, jobs: Jobs) -> None:
        pump.start_threads()
        started = set(threading.enumerate()) - before
        assert len(started) == sum(THREADS.values())
        for lane in Lane:
            jobs.append(Job(lane, lambda: None, lambda: done.append("done")))
        assert await quiet(pump)
        assert set(threading.enumerate()) - before == started
        pump.close(join=True)
        assert not any(thread.is_alive() for thread in started)

    in_loop(body)
    assert len(done) == len(Lane)
