"""Daemons as processes that keep their DRAM with a holder: killed, started again, and nothing served is wrong."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.cli.daemon_process import READY
from kvstore.client import Client, NamespaceHandle
from kvstore.config import DaemonConfig
from kvstore.takeover.link import end_holder
from kvstore.types import KVSpec, Namespace

if "holder_path" not in DaemonConfig.__dataclass_fields__:  # goes with the daemon's wiring
    pytest.skip("the daemon is not wired to a holder yet", allow_module_level=True)

MIB = 1 << 20
BLOCK_BYTES, BLOCK_TOKENS, N = 16384, 16, 4
NAMESPACE = Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
SPAWN = multiprocessing.get_context("spawn")
WaitUntil = Callable[[Callable[[], bool], str], None]


def prompt(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1_000_000).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)


def put(ns: NamespaceHandle, seeds: range) -> int:
    return sum(ns.put(prompt(seed), content(seed)).n_stored for seed in seeds)


def found(ns: NamespaceHandle, seeds: range) -> int:
    """Blocks of these prompts that are found, each compared."""
    total = 0
    for seed in seeds:
        out = np.zeros((N, BLOCK_BYTES), np.uint8)
        n = ns.get_into(prompt(seed), out).n_blocks
        np.testing.assert_array_equal(out[:n], content(seed)[:n])
        total += n
    return total


class Warm:
    """``kvstore serve`` with a holder; ``start`` returns when clients are accepted."""

    def __init__(self, folder: Path) -> None:
        self.path, self.holder = folder / "d.sock", folder / "h.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.said = ""

    def spawn(self, *more: str, dram: str = "8MiB") -> int:
        """Start, without waiting; returns the end to read that it is ready from."""
        ready, child = os.pipe()
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(self.path), "--dram", dram,
                   "--no-prefault", "--ready-fd", str(child), "--holder", str(self.holder), *more]  # fmt: skip
        self.process = subprocess.Popen(command, pass_fds=(child,), stderr=subprocess.PIPE)
        os.close(child)
        return ready

    def start(self, *more: str, dram: str = "8MiB") -> None:
        with os.fdopen(self.spawn(*more, dram=dram), "rb") as pipe:
            assert pipe.read(len(READY)) == READY, self.end(signal.SIGKILL) or self.said

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        self.said = self.process.communicate(timeout=30)[1].decode()
        return self.process.returncode

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def holder_pid(self) -> int:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as sock:
            sock.connect(str(self.holder))
            return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


@pytest.fixture
def warm() -> Iterator[Warm]:
    with tempfile.TemporaryDirectory(prefix="kvw-") as folder:
        made = Warm(Path(folder))
        yield made
        if made.process is not None and made.process.poll() is None:
            made.process.send_signal(signal.SIGCONT)
            made.kill()
        if made.holder.exists():
            with contextlib.suppress(OSError):
                os.kill(made.holder_pid(), signal.SIGKILL)


@pytest.fixture
def client(warm: Warm) -> Iterator[Client]:
    with Client(warm.path, timeout_s=20.0, required=False) as connected:
        yield connected


def region_bytes(*pids: int) -> int:
    """Memory of all regions that these processes have open or mapped, each counted once."""
    sizes: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if "memfd:kvstore-region" in str(fd.readlink()):
                        facts = fd.stat()
                        sizes[str(facts.st_ino)] = facts.st_size
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "memfd:kvstore-region" in line:
                    start, end, inode = re.match(r"(\w+)-(\w+) \S+ \S+ \S+ (\d+)", line).groups()  # type: ignore[union-attr]
                    sizes.setdefault(inode, int(end, 16) - int(start, 16))
    return sum(sizes.values())


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


@contextlib.contextmanager
def child(target: Any, *args: Any) -> Iterator[tuple[Any, Connection]]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
        with contextlib.suppress(OSError):
            ours.send("end")
        process.join(20)
        if process.exitcode is None:
            process.kill()
        ours.close()
    assert process.exitcode == 0, "the child ended badly"


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
    for _ in range(12):
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
    process = SPAWN.Process(target=stopped_reader, args=(str(warm.path), SPAWN.Pipe()[1]))
    process.start()
    wait_until(lambda: client.stats()["leases"] == 20, "it has its leases")
    process.kill()
    warm.kill()
    process.join(20)
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
    assert region_bytes(warm.pid, warm.holder_pid(), os.getpid()) <= 8 * MIB
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


def test_blocks_of_a_daemon_without_nvme_are_left_out_by_one_with(warm: Warm, client: Client, tmp_path: Path) -> None:
    """It could not say whose frames they would be."""
    warm.start()
    assert client.wait_healthy(20.0)
    ns = client.open(NAMESPACE)
    put(ns, range(20))
    warm.kill()
    warm.start("--nvme-dir", str(tmp_path / "nvme"), "--nvme", "64MiB")
    assert client.wait_healthy(20.0)
    assert client.stats()["taken_over_blocks"] == 0
    assert put(ns, range(20)) == 80
    assert found(ns, range(20)) == 80


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


# -- nothing is leaked -------------------------------------------------------------------------------


def holder_facts(pid: int) -> tuple[int, int]:
    """Descriptors, and resident memory in KiB."""
    rss = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert rss is not None
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), int(rss[1])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_twenty_restarts_leak_nothing(warm: Warm, client: Client) -> None:
    warm.start()
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
        warm.start()
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
                assert daemon.call(lambda running: running.store.stats()[0]["taken_over_blocks"]) >= before
                assert found(ns, range(100 * turn, 100 * turn + 80)) >= before  # NVMe has all
                put(ns, range(5000 + 100 * turn, 5060 + 100 * turn))
                daemon.call(lambda running: running.store.check())
            wait_until(lambda: client.stats()["dram_unsettled_bytes"] == 0, "the client settles")
        daemon.stop()
        end_holder(settings["holder_path"])
