"""Daemons with a holder killed in the middle of things, and clients of the old epoch that don't answer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Client, NamespaceHandle
from tests.server.children import SPAWN
from tests.server.warm import (
    BLOCK_BYTES,
    MIB,
    NAMESPACE,
    N,
    WaitUntil,
    Warm,
    child,
    content,
    found,
    prompt,
    put,
    region_bytes,
)

# -- killed in the middle of things ------------------------------------------------------------------


def busy_writer(path: str, first: int, pipe: Connection) -> None:
    """Stores and reads back until told to stop; says what it was told is stored."""
    with Client(path, timeout_s=2.0, required=False) as client:
        ns, stored, seed = client.open(NAMESPACE), 0, first
        while not pipe.poll():
            stored += ns.put(prompt(seed), content(seed)).n_stored
            found(ns, range(max(first, seed - 3), seed + 1))
            seed += 1
            if not client.healthy:
                client.wait_healthy(0.05)
        pipe.recv()
        pipe.send((seed, stored))
        pipe.recv()


def test_killed_in_a_burst_of_writes_no_byte_is_wrong(warm: Warm) -> None:
    warm.start()
    rng = np.random.default_rng(3)
    path = str(warm.path)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(child(busy_writer, path, 10_000 * i)) for i in range(3)]
        with Client(warm.path, timeout_s=20.0) as client:
            ns = client.open(NAMESPACE)
            for _ in range(5):
                time.sleep(float(rng.uniform(0.2, 0.7)))  # the moment is what is random here
                warm.kill()
                warm.start()
                assert client.wait_healthy(20.0)
                for i in range(3):
                    found(ns, range(10_000 * i, 10_000 * i + 20))
                stats = client.stats()
                assert float(stats["dram_used_bytes"]) <= float(stats["dram_capacity_bytes"])
                everybody = [warm.pid, warm.holder_pid(), os.getpid(), *(each.pid for each, _ in writers)]
                assert region_bytes(*everybody) <= 8 * MIB
            total = 0
            for i, (_, pipe) in enumerate(writers):
                pipe.send("stop")
                seed, stored = pipe.recv()
                assert stored > 0
                total += found(ns, range(10_000 * i, seed))
                pipe.send("bye")
            assert total > 0


def test_killed_while_it_takes_over_the_next_one_does(warm: Warm, client: Client) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(100))
    warm.kill()
    rng = np.random.default_rng(1)
    for _ in range(8):
        ready = warm.spawn()
        time.sleep(float(rng.uniform(0.1, 1.5)))  # at some moment of the start
        warm.kill()
        os.close(ready)
    warm.start()
    assert client.wait_healthy(20.0)
    assert found(ns, range(100)) == 400


# -- clients of the old epoch that don't answer ------------------------------------------------------


def stopped_reader(path: str, pipe: Connection) -> None:
    with Client(path, timeout_s=20.0) as client:
        leases = [client.open(NAMESPACE).lease(prompt(seed)) for seed in range(20)]
        views = [lease[i] for lease in leases for i in range(N)]
        pipe.send(len(views))
        pipe.recv()
        same = all(np.array_equal(view, content(i // N)[i % N]) for i, view in enumerate(views))
        out = np.zeros((N, BLOCK_BYTES), np.uint8)
        pipe.send((same, [lease.valid for lease in leases].count(True), leases[0].copy_into(out)))
        pipe.recv()
        client.wait_healthy(20.0)
        same = all(np.array_equal(view, content(i // N)[i % N]) for i, view in enumerate(views))
        pipe.send(same)
        pipe.recv()
        views.clear()
        for lease in leases:
            lease.release()
        pipe.send("let go")
        pipe.recv()


def test_a_stopped_reader_sees_what_it_leased_whatever_the_next_daemon_does(
    warm: Warm, client: Client, wait_until: WaitUntil
) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(100))
    with child(stopped_reader, str(warm.path)) as (process, pipe):
        assert pipe.recv() == 80
        os.kill(process.pid, signal.SIGSTOP)
        warm.kill()
        warm.start()
        assert client.wait_healthy(20.0)
        assert found(ns, range(100)) == 400
        wait_until(lambda: put_some(ns) > 0, "room is made")
        for start in range(1000, 4000, 500):
            put(ns, range(start, start + 500))
            found(ns, range(start + 480, start + 500))
        assert ns.match(prompt(0)).n_blocks == 0, "nothing was evicted, so nothing is shown"
        assert client.stats()["sessions_lingering"] == 1
        everybody = (warm.pid, warm.holder_pid(), os.getpid(), process.pid)
        assert region_bytes(*everybody) <= 8 * MIB
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("go")
        assert pipe.recv() == (True, 0, 0)
        pipe.send("go")
        assert pipe.recv(), "its bytes changed once it was back"
        put(ns, range(5000, 5500))
        pipe.send("let go")
        assert pipe.recv() == "let go"
        wait_until(lambda: client.stats()["dram_unsettled_bytes"] == 0, "it settles")
        wait_until(lambda: client.stats()["dram_retired_mapped_bytes"] == 0, "it unmaps")
        pipe.send("end")


_next = iter(range(100_000, 200_000))


def put_some(ns: NamespaceHandle) -> int:
    seed = next(_next)
    return ns.put(prompt(seed), content(seed)).n_stored


def stopped_writer(path: str, pipe: Connection) -> None:
    with Client(path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        put(ns, range(20))
        late = ns.reserve(prompt(77), n_blocks=N)
        views = [late[i] for i in range(N)]
        for view in views:
            view[:] = 7
        pipe.send(len(late))
        pipe.recv()
        client.wait_healthy(20.0)
        # The reservation is over with its daemon, but this process writes on, between puts of its own.
        wrong = 0
        for seed in range(500, 560):
            ns.put(prompt(seed), content(seed))
            for view in views:
                view[:] = seed & 0xFF
            for other in range(500, seed + 1):
                out = np.zeros((N, BLOCK_BYTES), np.uint8)
                n = ns.get_into(prompt(other), out).n_blocks
                wrong += not np.array_equal(out[:n], content(other)[:n])
        pipe.send((wrong, late.commit()))
        pipe.recv()


def test_a_stopped_writer_spoils_nothing_and_stores_nothing(warm: Warm, client: Client, wait_until: WaitUntil) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    with child(stopped_writer, str(warm.path)) as (process, pipe):
        assert pipe.recv() == N
        os.kill(process.pid, signal.SIGSTOP)
        warm.kill()
        warm.start()
        assert client.wait_healthy(20.0)
        assert ns.match(prompt(77)).n_blocks == 0
        assert found(ns, range(20)) == 80
        put(ns, range(1000, 1300))
        found(ns, range(1280, 1300))
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("go")
        assert pipe.recv() == (0, (0, 0))
        assert ns.match(prompt(77)).n_blocks == 0
        found(ns, range(500, 560))
        found(ns, range(1280, 1300))
        pipe.send("end")


def test_who_dies_meanwhile_is_known_to_be_gone(warm: Warm, client: Client, wait_until: WaitUntil) -> None:
    """Also one that died while no daemon was there."""
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(50))
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=stopped_reader, args=(str(warm.path), theirs))
    process.start()
    assert ours.recv() == 80
    warm.kill()
    process.kill()
    process.join(20)
    ours.close()
    theirs.close()
    warm.start()
    assert client.wait_healthy(20.0)
    stats = client.stats()
    assert (stats["sessions"], stats["sessions_lingering"]) == (1, 0)
    wait_until(lambda: client.stats()["dram_unsettled_bytes"] == 0, "nobody is waited for")
    assert found(ns, range(50)) == 200


def test_an_array_from_before_keeps_its_block_over_two_restarts(
    warm: Warm, client: Client, wait_until: WaitUntil
) -> None:
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(50))
    kept = ns.lease(prompt(7))[0]
    for turn in range(2):
        warm.kill()
        warm.start()
        assert client.wait_healthy(20.0)
        # Later than anybody is waited for: from then on everything is evicted and written that can be.
        wait_until(lambda: put_some(ns) == N, "room is made")
        put(ns, range(1000 * turn + 1000, 1000 * turn + 1400))
        np.testing.assert_array_equal(kept, content(7)[0])
    assert client.stats()["dram_unsettled_bytes"] or client.stats()["dram_retired_mapped_bytes"]
    del kept
    wait_until(lambda: client.stats()["dram_unsettled_bytes"] == 0, "the client settles")
    wait_until(lambda: client.stats()["dram_retired_mapped_bytes"] == 0, "the client unmaps")


# -- nothing is leaked -------------------------------------------------------------------------------


def holder_facts(pid: int) -> tuple[int, int]:
    """Descriptors, and resident memory in KiB."""
    rss = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert rss is not None
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), int(rss[1])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_twenty_restarts_leak_nothing(warm: Warm, client: Client) -> None:
    warm.start("--policy", "lru")  # which takes in whatever comes
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(100))
    facts: list[tuple[int, int, int]] = []
    own: list[int] = []
    for turn in range(20):
        with Client(warm.path, timeout_s=20.0) as passing:
            other = passing.open(NAMESPACE)
            found(other, range(100))
            put(other, range(10_000 + turn, 10_001 + turn))
        warm.end(signal.SIGKILL if turn % 2 else signal.SIGTERM)
        warm.start("--policy", "lru")
        assert client.wait_healthy(20.0)
        assert found(ns, range(100)) > 350
        assert put(ns, range(2000 + 10 * turn, 2010 + 10 * turn)) > 30
        pid = warm.holder_pid()
        stats = client.stats()
        assert stats["sessions"] == 1
        assert float(stats["dram_used_bytes"]) <= 8 * MIB
        facts.append((*holder_facts(pid), region_bytes(warm.pid, pid, os.getpid())))
        own.append(len(list(Path("/proc/self/fd").iterdir())))
        assert holder_facts(pid)[0] <= float(stats["dram_regions"]) + 14
    assert max(total for _, _, total in facts) <= 8 * MIB
    assert facts[-1][1] <= facts[4][1] + 1500, "the holder grows"
    assert own[-1] <= own[2] + 2
