"""The end of a daemon while its clients live: their rights end, what they look at and write to stays theirs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.clock import ManualClock
from kvstore.errors import KVStoreError
from kvstore.types import KVSpec, Namespace

BLOCK_BYTES, BLOCK_TOKENS, N = 65536, 16, 12
NAMESPACE = Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
N_HELD, N_WAITING = 10, 6
"""Prompts that are looked at, nearly all of DRAM, and those that wait for room in it."""


def prompt(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1_000_000).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)


def test_what_a_living_client_looks_at_outlives_reads_that_waited_for_room(
    start_daemon: Callable[..., Any], nvme: dict[str, Any], wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    first = start_daemon(**nvme)
    with Client(first.config.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        for seed in range(N_HELD + N_WAITING):
            assert ns.put(prompt(seed), content(seed), durable_within_s=20.0).n_durable == N
    first.stop()
    # Time stands still: who waits for room does so until somebody gives it.
    daemon = start_daemon(clock=ManualClock(), **nvme)
    path = daemon.config.socket_path
    with Client(path, timeout_s=20.0) as reader, Client(path, timeout_s=20.0) as other:
        ns = reader.open(NAMESPACE)
        leases = [ns.lease(prompt(seed), wait="wait") for seed in range(N_HELD)]
        assert [len(lease) for lease in leases] == [N] * N_HELD
        views = [[lease.view(i) for i in range(N)] for lease in leases]

        def wait_in_vain(seed: int) -> None:
            with contextlib.suppress(KVStoreError):
                other.open(NAMESPACE).lease(prompt(seed), wait="wait")

        threads = [threading.Thread(target=wait_in_vain, args=(N_HELD + i,)) for i in range(N_WAITING)]
        for thread in threads:
            thread.start()
        wait_until(lambda: float(reader.stats()["onboard_waiting_blocks"]) >= N_WAITING * N // 2, "they wait for room")
        daemon.stop()
        for thread in threads:
            thread.join(30)
        assert daemon.stopped_in_order
        for seed, looked_at in enumerate(views):
            np.testing.assert_array_equal(np.stack(looked_at), content(seed))
        assert not any(lease.valid for lease in leases)


def test_nothing_that_clients_may_write_to_or_look_at_is_free_when_the_daemon_drains(
    start_daemon: Callable[..., Any], nvme: dict[str, Any]
) -> None:
    daemon = start_daemon(**nvme)
    with Client(daemon.config.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        ns.put(prompt(1), content(1))
        lease = ns.lease(prompt(1))
        late = ns.reserve(prompt(2), n_blocks=N)
        views = [late.view(i) for i in range(N)]
        daemon.stop()
        for view in views:
            view[:] = 0xEE
        store = daemon.daemon.store
        assert store.dram.stats()["quarantined_bytes"] == N * BLOCK_BYTES
        assert (store.index.table.refs[[each for one in store.leases for each in one.ids]] == 1).all()
        assert len(lease) == N
    again = start_daemon(**nvme)
    with Client(again.config.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        assert ns.match(prompt(2)).n_blocks == 0
        out = np.zeros((N, BLOCK_BYTES), np.uint8)
        assert ns.get_into(prompt(1), out, wait="wait").n_blocks == N
        np.testing.assert_array_equal(out, content(1))
