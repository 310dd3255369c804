"""What was cleared is not taken over with the memory, not even what somebody was still reading then."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.takeover.link import HolderLink
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace
from tests.server.warm import NAMESPACE, Warm, found, prompt, put

HYBRID = Namespace(
    model="h",
    revision="1",
    spec=KVSpec(
        16,
        (
            KVGroup(layers=1, kv_heads=1, head_dim=32, dtype="float16"),
            KVGroup(layers=1, kv_heads=1, head_dim=32, dtype="float16", kind=GroupKind.SLIDING, window_tokens=32),
        ),
    ),
)


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


@pytest.mark.parametrize("tiers", ["dram", "nvme"])
@pytest.mark.parametrize("n_starts", [1, 2])
def test_what_was_taken_over_is_listed_and_cleared_before_anybody_opens_it(
    warm: Warm, tmp_path: Path, tiers: str, n_starts: int
) -> None:
    more = [] if tiers == "dram" else ["--nvme-dir", str(tmp_path / "nvme"), "--nvme", "1GiB", "--write-policy", "back"]
    warm.start(*more)
    with Client(warm.path, timeout_s=20.0) as client:
        assert put(client.open(NAMESPACE), range(1)) == 4
        rows = np.ones((4, 16 * 32 * 4), np.uint8)
        assert client.open_hybrid(HYBRID).put(prompt(1), {0: rows, 1: rows}).n_skipped == 0
    for _ in range(n_starts):
        warm.end(signal.SIGKILL)
        warm.start(*more)
    with Client(warm.path, timeout_s=20.0) as client:
        listed = {info.namespace: (info.n_blocks, info.n_dram_blocks, info.is_open) for info in client.namespaces()}
        assert listed == {NAMESPACE: (4, 4, False), HYBRID: (4, 4, False)}
        counted = client.clear(model="h", revision="1", dry_run=True)
        cleared = client.clear(model="h", revision="1")
        assert [(each.digest, each.n_blocks) for each in cleared.namespaces] == [(HYBRID.digest(), 4)]
        assert counted.namespaces == cleared.namespaces
        assert (cleared.n_left_blocks, client.stats()["block_parts"]) == (0, 0)
        assert client.open_hybrid(HYBRID).match(prompt(1)).n_blocks == 0
        assert client.clear(everything=True).n_blocks == 4
        assert found(client.open(NAMESPACE), range(1)) == 0
    warm.end(signal.SIGKILL)
    warm.start(*more)
    with Client(warm.path, timeout_s=20.0) as client:
        assert client.stats()["taken_over_blocks"] == 0
    warm.end(signal.SIGTERM)


def test_blocks_of_which_nobody_says_what_they_are_are_not_taken_over(warm: Warm, client: Client) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    assert put(client.open(NAMESPACE), range(2)) == 8
    warm.end(signal.SIGKILL)
    link, entries = HolderLink.claim(warm.holder, str(warm.path), 60.0, start=False)
    link.put("older", [entry for entry in entries if entry.key != "namespaces"])
    link.switch("older")
    link.sync()
    link.close()
    for entry in entries:
        if entry.fd >= 0:
            os.close(entry.fd)
    warm.start()
    assert client.wait_healthy(20.0)
    assert client.stats()["taken_over_blocks"] == 0
    assert found(client.open(NAMESPACE), range(2)) == 0


def test_the_start_says_how_many_blocks_were_taken_over(warm: Warm) -> None:
    warm.start()
    with Client(warm.path, timeout_s=20.0) as client:
        assert put(client.open(NAMESPACE), range(2)) == 8
    warm.end(signal.SIGKILL)
    warm.start()
    warm.end(signal.SIGTERM)
    assert "8 blocks taken over" in warm.said
