"""Clients that are gone without a word while their process lives: what it maps no longer comes back, nothing else."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.client.mapping import Regions, map_regions
from kvstore.errors import UnavailableError
from kvstore.server.lingering import LOOK_S, Lingering
from kvstore.server.session import Session, Sessions
from kvstore.store.mapped import Mapped
from kvstore.tiers import memfd
from kvstore.tiers.dram import DramTier
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from tests.server.warm import BLOCK_BYTES, NAMESPACE, N, WaitUntil, Warm, content, found, prompt, put, warm_daemon


@pytest.fixture
def warm() -> Iterator[Warm]:
    with warm_daemon() as made:
        yield made


def nothing_lingers(client: Client) -> bool:
    stats = client.stats()
    return not any(stats[name] for name in ("sessions_lingering", "dram_retired_mapped_bytes", "dram_unsettled_bytes"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_memory_of_a_client_closed_while_no_daemon_was_there_comes_back(
    warm: Warm, wait_until: WaitUntil, number: int
) -> None:
    warm.start("--region-bytes", "1MiB")
    client = Client(warm.path, timeout_s=20.0)
    put(client.open(NAMESPACE), range(120))
    warm.end(number)
    client.close()
    warm.start("--region-bytes", "1MiB")
    with Client(warm.path, timeout_s=20.0) as another:
        wait_until(lambda: nothing_lingers(another), "the next daemon sees that it is gone")
        assert put(another.open(NAMESPACE), range(1000, 1120)) == 120 * N


def test_what_an_array_still_shows_is_kept_until_it_is_gone(warm: Warm, wait_until: WaitUntil) -> None:
    warm.start("--region-bytes", "1MiB")
    looking, other = Client(warm.path, timeout_s=20.0), Client(warm.path, timeout_s=20.0)
    put(looking.open(NAMESPACE), range(60))
    put(other.open(NAMESPACE), range(60, 120))
    kept = looking.open(NAMESPACE).lease(prompt(59))[0]
    warm.kill()
    looking.close()
    other.close()
    gc.collect()
    warm.start("--region-bytes", "1MiB")
    with Client(warm.path, timeout_s=20.0) as another:
        ns = another.open(NAMESPACE)
        # Both are looked at together: once the other is gone, this one has been found to map its region still.
        wait_until(lambda: another.stats()["sessions_lingering"] == 1, "the other is seen to be gone")
        put(ns, range(1000, 1200))
        np.testing.assert_array_equal(kept, content(59)[0])
        del kept
        gc.collect()
        wait_until(lambda: nothing_lingers(another), "nothing is mapped any more")


def test_memory_of_arrays_that_outlived_their_client_comes_back_when_they_are_gone(
    warm: Warm, wait_until: WaitUntil
) -> None:
    warm.start()
    with Client(warm.path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        put(ns, range(10))
        kept = ns.lease(prompt(3))[1]
    with Client(warm.path, timeout_s=20.0) as another:
        wait_until(lambda: another.stats()["sessions_lingering"] == 1, "it maps what the array shows")
        np.testing.assert_array_equal(kept, content(3)[1])
        del kept
        gc.collect()
        wait_until(lambda: nothing_lingers(another), "it maps nothing any more")
        stats = another.stats()
        assert stats["leases"] == stats["leases_ended_unacknowledged"] == 0
        assert found(another.open(NAMESPACE), range(10)) == 10 * N


def test_one_that_came_back_meanwhile_keeps_what_it_has() -> None:
    """What was seen before it came back says nothing of what it has mapped since."""
    ended: list[Session] = []
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    async def look_twice() -> None:
        loop = asyncio.get_running_loop()
        sessions = Sessions(loop.add_reader, loop.remove_reader)
        with DramTier(1 << 20, prefault=False) as dram:
            slots = dram.allocate(7, "a", BLOCK_BYTES, 1)
            (region_id,) = dram.regions
            dram.add_mapper(region_id, 7)
            session = Session(7, "a", "c", process.pid, os.pidfd_open(process.pid), 0.0)
            sessions.adopt(session, lambda _: None)
            lingering = Lingering(loop, sessions, Mapped(dram, None), ended.append, lambda: None)
            for now_s, returns in ((0.0, True), (LOOK_S, False)):
                lingering.tick(now_s)
                assert lingering._lives
                session.n_returns += returns
                while lingering._lives:  # noqa: ASYNC110 - nobody is told of the end of a look
                    await asyncio.sleep(0.001)
                assert ended == ([] if returns else [session])
            assert len(slots) == 1
            sessions.forget(session)

    try:
        asyncio.run(look_twice())
    finally:
        process.kill()
        process.communicate()


def test_a_region_mapped_after_the_daemon_had_gone_is_not_used() -> None:
    """The next daemon may have looked before it was mapped."""
    regions = Regions(lambda _: None)
    fd = memfd.create("kvstore-test", memfd.PAGE_BYTES)
    inode = os.fstat(fd).st_ino

    def call(method: Method, request: object, kind: type[object], descriptors: list[int] | None = None) -> object:
        if method == Method.MAP_REGIONS:
            assert descriptors is not None
            descriptors.append(os.dup(fd))
            return pb.MapRegionsReply(region_ids=[1], sizes_bytes=[memfd.PAGE_BYTES])
        raise UnavailableError("the daemon closed the connection")

    try:
        for writable in (False, True):
            with pytest.raises(UnavailableError):
                map_regions(call, regions, [1], writable=writable)  # type: ignore[arg-type]
            assert regions.find([1], writable=False) == {}
            assert f" {inode} " not in Path("/proc/self/maps").read_text()
    finally:
        os.close(fd)
