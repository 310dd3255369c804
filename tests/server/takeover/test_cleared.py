"""What was cleared is not taken over with the memory, not even what somebody was still reading then."""

from __future__ import annotations

import signal

from kvstore.client import Client
from tests.server.warm import NAMESPACE, Warm, found, prompt, put


def test_blocks_in_use_when_they_were_cleared_are_not_found_by_the_next_daemon(warm: Warm, client: Client) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    assert put(ns, range(4)) == 16
    lease = ns.lease(prompt(0))
    assert client.clear(everything=True).n_left_blocks == len(lease) > 0
    assert put(ns, range(2, 3)) == 4
    warm.end(signal.SIGKILL)
    warm.start()
    assert client.wait_healthy(20.0)
    assert found(ns, range(4)) == 4
    assert client.stats()["taken_over_blocks"] == 4
