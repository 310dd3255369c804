"""Case 2: a block is read while it is being written. A miss or all of its bytes, never a part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.client import Client
from kvstore.jobs import Lane
from kvstore.types import KVSpec, Namespace
from tests.cases.scenes import READER, WRITER, again, read
from tests.store.two_tier import TwoTierRig

N = 4


def test_a_block_that_is_not_committed_is_a_miss_and_then_all_there(rig: TwoTierRig) -> None:
    prompt = rig.rows(N, tag=1)
    reservation = rig.reserve(WRITER, prompt)
    rig.map_regions(WRITER, reservation.slots, writable=True)
    for n_filled in range(N):
        assert read(rig, prompt) == []
        assert rig.store.begin_persist(prompt) is None
        rig.dram.view(int(reservation.slots[n_filled]))[:100] = 7
    rig.fill(reservation, prompt)
    assert read(rig, prompt) == []
    rig.store.commit(WRITER, reservation.id)
    assert read(rig, prompt) == rig.expected(prompt, N)


def test_a_block_on_its_way_to_disk_is_read_from_dram_and_is_not_durable(rig: TwoTierRig) -> None:
    prompt = rig.rows(N, tag=1)
    rig.put(WRITER, prompt)
    persist = rig.store.begin_persist(prompt)
    assert persist is not None
    for _ in range(3):
        assert read_now(rig, prompt) == rig.expected(prompt, N)
        assert rig.store.n_durable(persist) == 0
        (job,) = rig.jobs.runnable()
        rig.jobs.run(job)
        assert read_now(rig, prompt) == rig.expected(prompt, N)
        assert rig.store.n_durable(persist) == 0
        rig.jobs.finish(job)
        if job.lane is Lane.CATALOG:
            break
    assert rig.store.n_durable(persist) == N
    rig.store.end_persist(persist)


def test_a_daemon_that_dies_between_data_and_name_leaves_a_miss(rig: TwoTierRig) -> None:
    prompt = rig.rows(N, tag=1)
    rig.put(WRITER, prompt)
    (write,) = rig.jobs.runnable()
    rig.jobs.run(write)
    rig.store.forget_session(WRITER)
    after = rig.killed()
    assert read(after, again(after, prompt)) == []
    after.close()


def test_a_block_on_its_way_up_is_a_miss_until_all_of_it_is_there(rig: TwoTierRig) -> None:
    prompt = rig.rows(N, tag=1)
    rig.put(WRITER, prompt)
    assert rig.persist(prompt) == N
    rig.store.forget_session(WRITER)
    after = rig.killed()
    prompt = again(after, prompt)
    load = after.store.begin_load(prompt)
    assert load is not None
    while not load.done:
        assert read_now(after, prompt) == []
        (job,) = after.jobs.runnable()
        after.jobs.run(job)
        assert read_now(after, prompt) == []
        after.jobs.finish(job)
    assert read_now(after, prompt) == after.expected(prompt, N)
    after.store.end_load(load)
    after.close()


def read_now(rig: TwoTierRig, prompt: Any) -> list[bytes]:
    """What a client gets that doesn't wait."""
    lease = rig.store.lease(READER, prompt)
    content = rig.bytes_at(rig.slots_of(lease))
    rig.store.release(READER, lease.id)
    return content


def test_clients_that_read_what_others_write_see_all_or_nothing(
    start_daemon: Callable[..., Any], nvme: dict[str, Any]
) -> None:
    """Through a real daemon whose DRAM holds a part only, so that blocks go down and come up all the time."""
    block_bytes, tokens, n_prompts = 65536, 16, 40
    daemon = start_daemon(dram_bytes=4 << 20, **nvme)
    namespace = Namespace("m", KVSpec.opaque(tokens, block_bytes))

    def prompt(number: int) -> Any:
        return np.random.default_rng(number).integers(0, 1 << 20, 4 * tokens, dtype=np.uint32)

    def content(number: int) -> Any:
        return np.random.default_rng(1000 + number).integers(0, 256, (4, block_bytes), dtype=np.uint8)

    wrong: list[str] = []
    written = threading.Event()
    n_hits = 0

    def write() -> None:
        with Client(daemon.config.socket_path, timeout_s=20.0) as client:
            handle = client.open(namespace)
            for number in range(n_prompts):
                handle.put(prompt(number), content(number))
        written.set()

    def look(seed: int) -> None:
        nonlocal n_hits
        dice = np.random.default_rng(seed)
        into = np.zeros((4, block_bytes), np.uint8)
        with Client(daemon.config.socket_path, timeout_s=20.0) as client:
            handle = client.open(namespace)
            done_rounds = 0
            while done_rounds < 2:
                done_rounds += written.is_set()
                for number in dice.permutation(n_prompts).tolist():
                    n = handle.get_into(prompt(number), into).n_blocks
                    n_hits += n
                    if not (into[:n] == content(number)[:n]).all():
                        wrong.append(f"prompt {number}: {n} blocks")

    threads = [threading.Thread(target=write), *(threading.Thread(target=look, args=(seed,)) for seed in range(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert n_hits > n_prompts
