"""Case 12: the disk answers slowly or not at all. Requests get their miss by their deadline, those that need no disk
are as quick as ever, and storing never waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.store.hierarchy import WriteBehind
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.types import KVSpec, Namespace
from tests.cases.scenes import READER, WRITER, again, read, stored_below
from tests.store.two_tier import MIB, Settings, TwoTierRig

N = 6
IO_TIMEOUT_S = 5.0
BLOCK_BYTES, BLOCK_TOKENS = 16384, 16
NAMESPACE = Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
WAIT_S = 0.5
SLACK_S = 5.0
"""For a busy machine; a request that waited for the disk would take forever."""


# The store, without threads and clocks of its own ---------------------------------------------------


@pytest.fixture
def make_slow(make_store: Callable[..., TwoTierRig]) -> Callable[[], TwoTierRig]:
    return lambda: make_store(Settings(write=WriteBehind(queue_bytes_max=MIB, io_timeout_s=IO_TIMEOUT_S)))


def test_who_waits_for_a_read_that_never_returns_is_let_go_and_nothing_is_lost(
    make_slow: Callable[[], TwoTierRig],
) -> None:
    first = make_slow()
    prompt, other = first.rows(N, tag=1), first.rows(N, tag=2)
    rig = stored_below(first, prompt, other)
    prompt, other = again(rig, prompt), again(rig, other)
    loads = [rig.store.begin_load(prompt), rig.store.begin_load(other)]
    stuck = rig.jobs.runnable()
    assert all(load is not None and not load.done for load in loads)
    rig.clock.advance(IO_TIMEOUT_S - 0.1)
    rig.store.tick()
    assert not any(load.done for load in loads if load is not None)
    rig.clock.advance(0.2)
    rig.store.tick()
    for load in loads:
        assert load is not None
        assert load.done
        assert rig.store.lease(READER, prompt, load=load).n_blocks == 0
        rig.store.end_load(load)
    # As long as the disk hangs nobody waits for it again, and DRAM goes on.
    refused = rig.store.begin_load(prompt)
    assert refused is not None
    assert refused.done
    rig.store.end_load(refused)
    hot = rig.rows(N, tag=3)
    assert rig.put(WRITER, hot).n_committed == N
    assert rig.bytes_at(rig.slots_of(rig.store.lease(READER, hot))) == rig.expected(hot, N)
    # The memory that is being read into stays out of use: the disk may still write to it.
    assert rig.dram_bytes()["reserved"] >= N * 4096
    rig.store.check()
    for job in stuck:
        rig.jobs.run(job)
    rig.settle()
    assert rig.dram_bytes()["reserved"] == 0
    assert read(rig, prompt) == rig.expected(prompt, N)
    assert read(rig, other) == rig.expected(other, N)
    rig.store.forget_session(READER)
    rig.close()


def test_a_write_that_never_returns_is_not_durable_and_stops_nobody(make_slow: Callable[[], TwoTierRig]) -> None:
    rig = make_slow()
    prompt = rig.rows(N, tag=1)
    rig.put(WRITER, prompt)
    persist = rig.store.begin_persist(prompt)
    assert persist is not None
    (stuck,) = rig.jobs.runnable()
    rig.clock.advance(IO_TIMEOUT_S + 0.1)
    rig.store.tick()
    assert persist.done
    assert rig.store.n_durable(persist) == 0
    rig.store.end_persist(persist)
    for tag in range(2, 40):
        assert rig.put(WRITER, rig.rows(2, tag=tag)).n_committed == 2
        rig.unmap_retired()
    assert read(rig, prompt) == rig.expected(prompt, N)  # pinned as long as the disk reads it
    assert rig.stat("offload_skipped_blocks") > 0
    rig.jobs.run(stuck)
    rig.settle()
    assert rig.persist(prompt) == N
    assert rig.persist(rig.rows(2, tag=39)) == 2


# A daemon, its threads and sockets ----------------------------------------------------------------


def tokens(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(~seed & 0xFFFF).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture
def disk(start_daemon: Callable[..., Any], nvme: dict[str, Any]) -> Iterator[tuple[Any, FaultyFiles]]:
    """A daemon with prompts 0 to 9 on NVMe only, and its disk."""
    daemon = start_daemon(**nvme)
    with Client(daemon.config.socket_path, timeout_s=20.0) as client:
        for seed in range(10):
            stored = client.open(NAMESPACE).put(tokens(seed), content(seed), durable_within_s=20.0)
            assert stored.n_durable == N
    daemon.stop()
    files = FaultyFiles(DirectFiles(nvme["nvme_dir"]))
    yield start_daemon(files=files, io_timeout_s=600.0, drain_s=0.2, **nvme), files
    files.release_all()


@pytest.mark.parametrize("kind", ["slow", "stuck"])
def test_an_engine_is_never_held_up_for_longer_than_it_allows(disk: tuple[Any, FaultyFiles], kind: str) -> None:
    daemon, files = disk
    tick = threading.Event()
    if kind == "slow":
        files.delay("read", lambda: tick.wait(3 * WAIT_S), times=None)
        files.delay("write", lambda: tick.wait(3 * WAIT_S), times=None)
    else:
        files.stick("read", times=None)
        files.stick("write", times=None)
    out = np.zeros((N, BLOCK_BYTES), np.uint8)
    with Client(daemon.config.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        for seed in range(10):
            start_s = time.monotonic()
            n = ns.get_into(tokens(seed), out, wait=WAIT_S).n_blocks
            assert time.monotonic() - start_s < WAIT_S + SLACK_S
            assert (out[:n] == content(seed)[:n]).all()
            # It computes the blocks itself, stores them, and has them from then on.
            start_s = time.monotonic()
            ns.put(tokens(100 + seed), content(100 + seed))
            with ns.lease(tokens(100 + seed), wait=WAIT_S) as lease:
                assert len(lease) == N
            assert time.monotonic() - start_s < SLACK_S
        daemon.call(lambda it: it.store.check())
        tick.set()
        files.release_all()
        for seed in range(10):
            n = ns.get_into(tokens(seed), out, wait=20.0).n_blocks
            assert n == N
            assert (out == content(seed)).all()
