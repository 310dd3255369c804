"""Case 11: a request is cancelled while its blocks load, an engine is killed while it writes. The slots come back
within the lease time, and nothing half-written is visible, in any tier."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.errors import EndedError
from kvstore.types import KVSpec, Namespace
from tests.cases.scenes import READER, WRITER, again, read, stored_below
from tests.store.two_tier import TwoTierRig
from tests.tiers.segment_files import frames_in

N = 6
LEASE_S = 10.0
SPAWN = multiprocessing.get_context("spawn")
BLOCK_BYTES, BLOCK_TOKENS = 16384, 16
NAMESPACE = Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))


@pytest.mark.parametrize("n_jobs_done", [0, 1])
@pytest.mark.parametrize("others_wait", [False, True])
def test_a_cancelled_load_gives_everything_back(rig: TwoTierRig, n_jobs_done: int, others_wait: bool) -> None:
    prompt = rig.rows(N, tag=1)
    rig = stored_below(rig, prompt)
    prompt = again(rig, prompt)
    load = rig.store.begin_load(prompt)
    other = rig.store.begin_load(prompt) if others_wait else None
    assert load is not None
    assert rig.dram_bytes()["reserved"] == N * 4096
    for job in rig.jobs.runnable()[:n_jobs_done]:
        rig.jobs.run(job)
    rig.store.end_load(load)
    rig.store.check()
    assert rig.found(prompt) == N
    assert rig.store.lease(READER, prompt).n_blocks == 0
    rig.settle()
    assert rig.dram_bytes()["reserved"] == 0
    if other is not None:
        assert other.done
        assert rig.store.lease(READER, prompt, load=other).n_blocks == N
        rig.store.end_load(other)
        rig.store.forget_session(READER)
    assert not rig.store.index.table.refs.any()
    # What was read for nobody can go again like anything else.
    for tag in range(2, 12):
        assert rig.put(WRITER, rig.rows(8, tag=tag)).n_committed == 8
        rig.settle()
        rig.unmap_retired()
    rig.close()


@pytest.mark.parametrize("ending", ["killed", "cut off", "silent", "aborted"])
def test_an_engine_that_ends_while_it_writes_leaves_nothing(rig: TwoTierRig, ending: str) -> None:
    prompt = rig.rows(N, tag=1)
    kept = rig.rows(2, tag=2)
    rig.put(READER, kept)
    reservation = rig.reserve(WRITER, prompt, ttl_s=LEASE_S)
    rig.map_regions(WRITER, reservation.slots, writable=True)
    rig.dram.view(int(reservation.slots[0]))[:] = 1  # one whole, one half, the others not at all
    rig.dram.view(int(reservation.slots[1]))[:2000] = 1
    if ending == "killed":
        rig.store.forget_session(WRITER)
    elif ending == "cut off":
        rig.store.end_rights(WRITER)
    elif ending == "aborted":
        assert rig.store.abort(WRITER, reservation.id)
    rig.clock.advance(LEASE_S)
    rig.store.expire()
    rig.settle()
    if ending in ("cut off", "silent"):
        # The right is over; the slots stay out of use until its process is gone, as it may still write.
        assert rig.dram_bytes()["quarantined"] == N * 4096
        with pytest.raises(EndedError):
            rig.store.commit(WRITER, reservation.id)
        rig.store.forget_session(WRITER)
    facts = rig.dram_bytes()
    assert (facts["reserved"], facts["quarantined"], facts["used"]) == (0, 0, 2 * 4096)
    assert rig.found(prompt) == 0
    assert read(rig, prompt) == []
    rig.settle()
    keys = {bytes(key) for key in prompt.path.keys(prompt.root_key)}
    assert not keys & {frame.key for frame in frames_in(rig.directory)}
    rig.store.forget_session(READER)
    after = rig.killed()
    assert after.found(again(after, prompt)) == 0
    assert read(after, again(after, kept)) == after.expected(kept, 2)
    after.close()


def tokens(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(~seed & 0xFFFF).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)


def half_written(path: str, pipe: Connection) -> None:
    with Client(path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        ns.put(tokens(1), content(1))
        reservation = ns.reserve(tokens(2), n_blocks=N)
        reservation[0][:] = content(2)[0]
        reservation[1][: BLOCK_BYTES // 2] = content(2)[1][: BLOCK_BYTES // 2]
        pipe.send(len(reservation))
        pipe.recv()


def test_engines_killed_while_they_write_leave_only_whole_blocks_on_any_tier(
    start_daemon: Callable[..., Any], nvme: dict[str, Any], wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    daemon = start_daemon(**nvme)
    with Client(daemon.config.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        for _ in range(3):
            ours, theirs = SPAWN.Pipe()
            engine = SPAWN.Process(target=half_written, args=(str(daemon.config.socket_path), theirs))
            engine.start()
            theirs.close()
            assert ours.recv() == N
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            engine.join(20)
            ours.close()
            wait_until(lambda: client.stats()["sessions"] == 1, "the engine is seen to be gone")
            stats = client.stats()
            assert stats["reservations"] == stats["dram_quarantined_bytes"] == stats["dram_reserved_bytes"] == 0
            assert ns.match(tokens(2)).n_blocks == 0
        assert ns.persist(tokens(1), wait_s=20.0).n_durable == N
        assert ns.persist(tokens(2), wait_s=20.0).n_durable == 0
    daemon.stop()
    daemon = start_daemon(**nvme)
    with Client(daemon.config.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        out = np.zeros((N, BLOCK_BYTES), np.uint8)
        assert ns.match(tokens(2)).n_blocks == 0
        assert ns.get_into(tokens(1), out).n_blocks == N
        assert (out == content(1)).all()
