"""Daemons as processes that keep their DRAM with a holder: what the next one finds, whatever it is told."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.takeover.link import end_holder
from kvstore.types import Namespace
from tests.server.warm import (
    BLOCK_BYTES,
    MIB,
    NAMESPACE,
    N,
    WaitUntil,
    Warm,
    content,
    found,
    prompt,
    put,
    region_bytes,
)

# -- killed with everything in place ----------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_blocks_are_found_again_in_the_same_memory(warm: Warm, client: Client, number: int) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    assert put(ns, range(100)) == 400
    assert found(ns, range(100)) == 400
    mapped = dict(client._session.regions._mappings)
    before_bytes = region_bytes(warm.pid, os.getpid())
    for turn in range(2):
        warm.end(number)
        warm.start()
        assert client.wait_healthy(20.0)
        n_more = N * turn
        assert found(ns, range(100)) == 400
        assert found(ns, range(200, 200 + turn)) == n_more
        assert client._session.regions._mappings == mapped, "the client maps anew what it has"
        assert region_bytes(warm.pid, warm.holder_pid(), os.getpid()) == before_bytes
        stats = client.stats()
        assert stats["taken_over_blocks"] == 400 + n_more
        assert (stats["sessions"], stats["sessions_lingering"]) == (1, 0)
        assert ns.put(prompt(200 + turn), content(200 + turn)).n_stored == N
        mapped = dict(client._session.regions._mappings)
        before_bytes = region_bytes(warm.pid, os.getpid())


def test_an_acknowledged_put_is_found_though_the_daemon_dies_at_once(warm: Warm, client: Client) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    for seed in range(3):
        assert ns.put(prompt(seed), content(seed)).n_stored == N
        warm.kill()
        warm.start()
        assert client.wait_healthy(20.0)
        assert found(ns, range(seed + 1)) == N * (seed + 1)


def test_a_new_client_finds_them_too_and_the_old_ones_memory_comes_back(warm: Warm, wait_until: WaitUntil) -> None:
    warm.start()
    with Client(warm.path, timeout_s=20.0) as first:
        put(first.open(NAMESPACE), range(100))
        warm.kill()
    warm.start()
    with Client(warm.path, timeout_s=20.0) as second:
        ns = second.open(NAMESPACE)
        assert found(ns, range(100)) == 400
        assert put(ns, range(1000, 1500)) > 1500
        assert found(ns, range(1490, 1500)) == 40


def test_a_writer_goes_on_in_its_own_memory(warm: Warm, client: Client, wait_until: WaitUntil) -> None:
    """Nothing is moved, nothing retired: a full tier evicts slot by slot as before."""
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(200))
    regions = client.stats()["dram_regions"]
    warm.kill()
    warm.start()
    assert client.wait_healthy(20.0)
    wait_until(lambda: client.stats()["dram_unsettled_bytes"] == 0, "the client settles")
    before = found(ns, range(80, 200))
    assert before > 400
    assert put(ns, range(1000, 1005)) == 20
    assert found(ns, range(1000, 1005)) == 20
    stats = client.stats()
    assert stats["dram_regions"] == regions
    assert stats.get("moved_blocks", 0) == 0
    assert found(ns, range(100, 200)) >= before - 120


def test_namespaces_tenants_and_pins_are_as_after_any_restart(warm: Warm) -> None:
    warm.start()
    other = Namespace("another", NAMESPACE.spec)
    with Client(warm.path, timeout_s=20.0) as mine, Client(warm.path, "t2", timeout_s=20.0) as theirs:
        ns, ns2 = mine.open(NAMESPACE), theirs.open(Namespace("m", NAMESPACE.spec, tenant="t2"))
        put(ns, range(10))
        pinned = ns.pin(prompt(1))
        warm.kill()
        warm.start()
        assert mine.wait_healthy(20.0)
        assert theirs.wait_healthy(20.0)
        assert ns2.match(prompt(1)).n_blocks == 0
        assert mine.open(other).match(prompt(1)).n_blocks == 0
        assert not ns.unpin(pinned)
        assert found(ns, range(10)) == 40


# -- another configuration ---------------------------------------------------------------------------


def test_a_smaller_tier_keeps_what_fits(warm: Warm, client: Client, wait_until: WaitUntil) -> None:
    warm.start(dram="16MiB")
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(240))
    warm.kill()
    warm.start(dram="8MiB")
    assert client.wait_healthy(20.0)
    wait_until(lambda: client.stats()["dram_retired_mapped_bytes"] == 0, "what does not fit is unmapped")
    stats = client.stats()
    assert float(stats["dram_used_bytes"]) <= float(stats["dram_capacity_bytes"]) == 8 * MIB
    # What was said to be unmapped is a moment later.
    pids = (warm.pid, warm.holder_pid(), os.getpid())
    wait_until(lambda: region_bytes(*pids) <= 8 * MIB, "memory is within the tier")
    assert 200 <= found(ns, range(240)) <= 512
    assert put(ns, range(1000, 1010)) == 40
    assert found(ns, range(1000, 1010)) == 40


def test_a_larger_tier_with_other_regions_keeps_all(warm: Warm, client: Client) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(100))
    warm.kill()
    warm.start("--region-bytes", "1MiB", dram="32MiB")
    assert client.wait_healthy(20.0)
    assert found(ns, range(100)) == 400
    assert put(ns, range(1000, 1300)) == 1200
    assert found(ns, range(100)) == 400


def test_with_an_nvme_tier_both_are_found(warm: Warm, client: Client, tmp_path: Path, wait_until: WaitUntil) -> None:
    nvme = ("--nvme-dir", str(tmp_path / "nvme"), "--nvme", "128MiB")
    warm.start(*nvme, dram="16MiB")
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    for seed in range(300):
        assert ns.put(prompt(seed), content(seed), durable_within_s=20.0).n_stored == N
    n_dram = client.stats()["dram_used_bytes"]
    for _ in range(2):
        warm.kill()
        warm.start(*nvme, dram="16MiB")
        assert client.wait_healthy(20.0)
        stats = client.stats()
        assert float(stats["taken_over_blocks"]) * BLOCK_BYTES >= 0.7 * float(n_dram)
        wait_until(lambda: client.stats()["dram_retired_mapped_bytes"] == 0, "what is not taken over is unmapped")
        assert found(ns, range(300)) == 1200
        assert put(ns, range(300)) == 0


def test_blocks_of_a_daemon_without_nvme_are_found_by_one_with(warm: Warm, client: Client, tmp_path: Path) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(20))
    warm.kill()
    warm.start("--nvme-dir", str(tmp_path / "nvme"), "--nvme", "64MiB")
    assert client.wait_healthy(20.0)
    assert client.stats()["taken_over_blocks"] == 80
    assert put(ns, range(20)) == 0
    assert found(ns, range(20)) == 80
    assert ns.persist(prompt(7), wait_s=20.0).n_durable == N


# -- holders that are not as they should be ----------------------------------------------------------


def test_a_holder_that_died_makes_a_cold_start(warm: Warm, client: Client) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(20))
    os.kill(warm.holder_pid(), signal.SIGKILL)
    assert found(ns, range(20)) == 80, "the daemon needs no holder to go on"
    warm.kill()
    warm.start()
    assert client.wait_healthy(20.0)
    assert found(ns, range(20)) == 0
    assert put(ns, range(20)) == 80
    warm.kill()
    warm.start()
    assert client.wait_healthy(20.0)
    assert found(ns, range(20)) == 80


@pytest.mark.parametrize("what", ["a file", "silence", "nowhere"])
def test_something_else_at_the_holders_path_makes_a_cold_start(warm: Warm, client: Client, what: str) -> None:
    with contextlib.ExitStack() as stack:
        if what == "a file":
            warm.holder.write_text("precious")
            warm.holder.with_name("h.sock.lock").mkdir()
        elif what == "silence":
            other = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            other.bind(str(warm.holder))
            other.listen()
        else:
            warm.holder = warm.holder.parent / "missing" / "h.sock"
        start = time.monotonic()
        warm.start()
        assert time.monotonic() - start < 15
        assert client.wait_healthy(20.0)
        assert put(client.open(NAMESPACE), range(5)) == 20
        warm.end(signal.SIGTERM)
        assert "cold" in warm.said
        assert "Traceback" not in warm.said
        if what != "nowhere":
            warm.holder.unlink()


def test_another_daemons_holder_is_a_mistake_that_is_told(warm: Warm) -> None:
    warm.start()
    with Client(warm.path, timeout_s=20.0) as client:
        put(client.open(NAMESPACE), range(5))
    warm.kill()
    command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(warm.path) + "2", "--no-prefault",
               "--dram", "8MiB", "--holder", str(warm.holder)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "--holder" in done.stderr
    assert str(warm.path) in done.stderr
    assert "Traceback" not in done.stderr
    warm.start()
    with Client(warm.path, timeout_s=20.0) as client:
        assert found(client.open(NAMESPACE), range(5)) == 20


def test_without_a_daemon_the_holder_and_the_memory_go(warm: Warm, wait_until: WaitUntil) -> None:
    warm.start("--holder-grace", "0.5")
    with Client(warm.path, timeout_s=20.0) as client:
        put(client.open(NAMESPACE), range(5))
    pid = warm.holder_pid()
    warm.kill()
    assert region_bytes(pid) > 0
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the holder ends")
    assert not warm.holder.exists()


# -- from the inside ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nvme", [False, True])
def test_index_tiers_and_claims_agree_after_every_takeover(
    start_daemon: Any, tmp_path: Path, wait_until: WaitUntil, nvme: bool
) -> None:
    """Daemons on threads of this process; each is checked through and through, also while the tier is full."""
    with tempfile.TemporaryDirectory(prefix="kvw-") as folder:
        settings: dict[str, Any] = {"holder_path": Path(folder) / "h", "holder_grace_s": 30.0}
        if nvme:
            settings |= {"nvme_dir": tmp_path / "nvme", "nvme_bytes": 64 * MIB}
        daemon = start_daemon(**settings)
        with Client(daemon.config.socket_path, timeout_s=20.0) as client:
            ns = client.open(NAMESPACE)
            kept = None
            for turn in range(4):
                put(ns, range(100 * turn, 100 * turn + 80))
                before = found(ns, range(100 * turn, 100 * turn + 80))
                assert before > 100
                kept = ns.lease(prompt(100 * turn + 79))[0] if turn == 1 else kept if turn == 2 else None
                daemon.call(lambda running: running.store.check())
                daemon.stop()
                daemon = start_daemon(**settings)
                assert client.wait_healthy(20.0)
                daemon.call(lambda running: running.store.check())
                n_taken_over = daemon.call(lambda running: running.store.stats()[0]["taken_over_blocks"])
                assert n_taken_over >= (before // 2 if nvme else before)  # room for moves is made, NVMe has all
                assert found(ns, range(100 * turn, 100 * turn + 80)) >= before  # NVMe has all
                put(ns, range(5000 + 100 * turn, 5060 + 100 * turn))
                daemon.call(lambda running: running.store.check())
            wait_until(lambda: client.stats()["dram_unsettled_bytes"] == 0, "the client settles")
        daemon.stop()
        end_holder(settings["holder_path"])
