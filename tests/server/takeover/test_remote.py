"""Remote clients and a daemon that is succeeded: what they stored stays, what they held does not."""

from __future__ import annotations

import signal

import pytest

from kvstore.client import Client
from tests.server.warm import NAMESPACE, N, WaitUntil, Warm, content, found, prompt, put


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_blocks_of_remote_clients_are_taken_over(warm: Warm, wait_until: WaitUntil, number: int) -> None:
    listen = f"unix:{warm.path.with_name('grpc.sock')}"
    warm.start("--grpc-listen", listen)
    with Client(f"grpc+{listen}", timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        assert put(ns, range(20)) == 20 * N
        lease = ns.lease(prompt(0))
        reservation = ns.reserve(prompt(99), n_blocks=N)
        reservation.fill(content(99))
        warm.end(number)
        warm.start("--grpc-listen", listen)
        assert client.wait_healthy(20.0)
        assert not lease.valid
        assert reservation.commit() == (0, 0)
        assert found(ns, range(20)) == 20 * N
        assert ns.match(prompt(99)).n_tokens == 0
        assert ns.put(prompt(99), content(99)).n_stored == N
        wait_until(lambda: client.stats()["leases"] == 0, "nothing is held any more")
        stats = client.stats()
        assert stats["taken_over_blocks"] == 20 * N
        assert stats["dram_quarantined_bytes"] == stats["dram_reserved_bytes"] == 0
        with Client(warm.path, timeout_s=20.0) as local:
            assert found(local.open(NAMESPACE), range(20)) == 20 * N
