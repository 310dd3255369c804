"""A store among other things in its program: loops, threads, signals, forks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import UnavailableError
from tests.embedded.scene import NAMESPACE, NVME, SMALL, WAIT_S, content, holds, prompt, run_program, store_memory


@pytest.mark.usefixtures("nothing_left")
def test_it_works_under_a_running_loop() -> None:
    async def main() -> None:
        with kvstore.open(**SMALL) as store:
            cache = store.open(NAMESPACE)
            assert (await asyncio.to_thread(cache.put, prompt(2), content(2))).n_stored == 2
            assert holds(cache, 2)

    asyncio.run(main())


@pytest.mark.usefixtures("nothing_left")
def test_it_may_be_opened_used_and_closed_on_different_threads() -> None:
    with ThreadPoolExecutor(4) as pool:
        store = pool.submit(kvstore.open, **SMALL).result(WAIT_S)
        cache = store.open(NAMESPACE)
        for seed, future in [(seed, pool.submit(cache.put, prompt(4, seed), content(4, seed))) for seed in range(16)]:
            assert future.result(WAIT_S).n_stored == 4, seed
        assert all(pool.map(lambda seed: holds(cache, 4, seed), range(16)))
        pool.submit(store.close).result(WAIT_S)


def test_signals_and_limits_stay_as_they_are() -> None:
    def state() -> Any:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return handlers, gc.get_threshold(), gc.get_freeze_count(), signal.set_wakeup_fd(-1)

    before = state()
    with kvstore.open(**SMALL) as store:
        store.open(NAMESPACE).put(prompt(1), content(1))
        assert state() == before
    assert state() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_misses_at_once_and_takes_nothing_along(tmp_path: Path) -> None:
    """Nor does it keep the parent from closing: memory goes back and the directory is free while the child lives."""
    told, go = os.pipe(), os.pipe()
    before = store_memory("self")  # of other tests' stores that something still holds
    store = kvstore.open(tmp_path / "kv", **NVME, timeout_s=WAIT_S)
    cache = store.open(NAMESPACE)
    cache.put(prompt(4), content(4))
    lease, theirs = cache.lease(prompt(4)), store.client(timeout_s=3600.0).open(NAMESPACE)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            missed = cache.match(prompt(4))
            fine = missed.n_blocks == 0 and "embedded" in missed.reason and not lease.valid
            fine = fine and cache.put(prompt(1), content(1)).n_skipped == 1
            try:
                store.client()
            except UnavailableError as error:
                fine = fine and "forked child" in str(error)
            store.close()
            os.write(told[1], b"y" if fine else b"n")
            os.close(go[1])
            os.read(go[0], 1)
            code = 0
        finally:
            os._exit(code)
    try:
        os.close(go[0])
        assert os.read(told[0], 1) == b"y"
        assert lease.valid
        np.testing.assert_array_equal(lease[0], content(4)[0])
        assert cache.put(prompt(4, 1), content(4, 1)).n_stored == 4
        assert store_memory("self") - before
        assert not store_memory(pid) - before
        assert store._inside.thread.stop()
        assert theirs.match(prompt(4)).n_blocks == 0, "it hears of the end of the connection, which is not the child's"
        store.close()
        with kvstore.open(tmp_path / "kv", **NVME) as again:
            assert holds(again.open(NAMESPACE), 4, 1)
    finally:
        os.close(go[1])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.close(told[0])
        os.close(told[1])


def test_a_child_of_a_killed_parent_does_not_keep_its_directory(tmp_path: Path) -> None:
    body = (
        "store = kvstore.open(sys.argv[1], **settings)\n"
        "assert store.open(space).put(tokens, blocks, durable_within_s=30.0).n_durable == 4\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for fd in (0, 1, 2):\n"
        "        os.close(fd)\n"
        "    signal.pause()\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run_program("import warnings\nwarnings.simplefilter('ignore')\n" + body, str(tmp_path / "kv"))
    child = int(done.stdout)
    try:
        with kvstore.open(tmp_path / "kv", **NVME) as store:
            assert store.stats()["recovered_blocks"] == 4
    finally:
        os.kill(child, signal.SIGKILL)
