"""A disk that hangs: who needs it gets a miss by the deadline, nobody else notices, nothing is lost or leaked."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client, NamespaceHandle
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import Fault, FaultyFiles
from kvstore.tiers.nvme.files import Extent
from kvstore.types import KVSpec, Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

BLOCK_BYTES, BLOCK_TOKENS = 16384, 16
N = 8
NAMESPACE = Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
SOON_S = 10.0
"""Far less than anything here would take if it waited for the disk, far more than it takes otherwise."""
FOREVER_S = 600.0


def prompt(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1_000_000).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)


class Disk:
    """A daemon with prompts 0..3 on a disk that misbehaves on order, and a client."""

    def __init__(self, daemon: Any, files: FaultyFiles) -> None:
        self.daemon = daemon
        self.files = files
        self.client = Client(daemon.config.socket_path, timeout_s=FOREVER_S)
        self.ns: NamespaceHandle = self.client.open(NAMESPACE)


@pytest.fixture
def disk(start_daemon: Callable[..., Any], nvme: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Disk]:
    first = start_daemon(**nvme)
    with Client(first.config.socket_path, timeout_s=20.0) as client:
        ns = client.open(NAMESPACE)
        for seed in range(4):
            assert ns.put(prompt(seed), content(seed), durable_within_s=20.0).n_durable == N
    first.stop()
    files = FaultyFiles(DirectFiles(nvme["nvme_dir"]))
    settings = {"io_timeout_s": FOREVER_S, "drain_s": 0.2, **getattr(request, "param", {})}
    made = Disk(start_daemon(files=files, **nvme, **settings), files)
    yield made
    files.release_all()
    made.client.close()


def quickly(call: Callable[[], Any]) -> Any:
    start_s = time.monotonic()
    result = call()
    assert time.monotonic() - start_s < SOON_S
    return result


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def reached(fault: Fault) -> None:
    assert fault.reached.wait(SOON_S), "the disk was not asked"


def test_a_request_waits_no_longer_than_it_said(disk: Disk) -> None:
    stuck = disk.files.stick("read", times=None)
    out = np.zeros((N, BLOCK_BYTES), np.uint8)
    got = quickly(lambda: disk.ns.get_into(prompt(1), out, wait=0.1))
    assert (got.n_blocks, got.n_pending, got.reason) == (0, N, "")
    assert not out.any()
    ready = quickly(lambda: disk.ns.prefetch(prompt(1), wait=0.1))
    assert (ready.n_blocks, ready.n_ready, ready.n_pending) == (N, 0, N)
    assert not quickly(lambda: disk.ns.lease(prompt(1), wait="best_effort"))
    assert disk.client.healthy
    stuck.release()
    assert disk.ns.get_into(prompt(1), out).n_blocks == N
    np.testing.assert_array_equal(out, content(1))
    assert disk.client.stats()["onboarded_blocks"] == N


@pytest.mark.parametrize("disk", [{"io_timeout_s": 0.2}], indirect=True)
def test_a_read_that_does_not_return_is_a_miss_for_all_who_wait(disk: Disk, wait_until: Any) -> None:
    stuck = disk.files.stick("read", times=None)
    start_s = time.monotonic()
    threads = [in_thread(lambda: disk.ns.lease(prompt(1), wait=FOREVER_S)) for _ in range(3)]
    for thread, _ in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert time.monotonic() - start_s >= 0.2
    for _, (lease,) in threads:
        assert (len(lease), lease.n_pending, lease.reason) == (0, 0, "")  # nobody can say that it will come
    # While it is stuck nothing more is asked of it, and nobody waits at all.
    assert not quickly(lambda: disk.ns.lease(prompt(2), wait=FOREVER_S))
    stuck.release()
    wait_until(lambda: disk.client.stats()["onboard_stuck"] == 0, "the disk is taken back")
    with disk.ns.lease(prompt(2), wait=FOREVER_S) as lease:
        assert len(lease) == N


def test_others_are_served_meanwhile_also_the_same_clients(disk: Disk) -> None:
    """Waiting keeps neither the daemon nor another thread of this client."""
    disk.ns.get_into(prompt(0), np.zeros((N, BLOCK_BYTES), np.uint8))
    stuck = disk.files.stick("read", times=None)
    thread, results = in_thread(lambda: disk.ns.lease(prompt(1), wait=FOREVER_S))
    reached(stuck)
    with Client(disk.daemon.config.socket_path, timeout_s=SOON_S) as other:
        for ns in (disk.ns, other.open(NAMESPACE)):
            assert quickly(lambda ns=ns: ns.match(prompt(1)).n_blocks) == N  # type: ignore[misc]
            with quickly(lambda ns=ns: ns.lease(prompt(0), wait=FOREVER_S)) as lease:  # type: ignore[misc]
                assert len(lease) == N
            seed = 100 if ns is disk.ns else 101
            assert quickly(lambda ns=ns, seed=seed: ns.put(prompt(seed), content(seed)).n_stored) == N  # type: ignore[misc]
            with quickly(lambda ns=ns, seed=seed: ns.lease(prompt(seed), wait=FOREVER_S)) as lease:  # type: ignore[misc]
                np.testing.assert_array_equal(lease[0], content(seed)[0])
    assert thread.is_alive()
    stuck.release()
    thread.join(SOON_S)
    assert len(results[0]) == N
    results[0].release()


@pytest.mark.parametrize("disk", [{"io_timeout_s": 0.2}], indirect=True)
def test_a_write_that_does_not_return_is_not_durable_and_holds_up_nobody(disk: Disk, wait_until: Any) -> None:
    stuck = disk.files.stick("write", times=None)
    result = quickly(lambda: disk.ns.put(prompt(10), content(10), durable_within_s=FOREVER_S))
    assert (result.n_stored, result.n_durable) == (N, 0)
    for seed in range(11, 15):
        assert quickly(lambda seed=seed: disk.ns.put(prompt(seed), content(seed)).n_stored) == N  # type: ignore[misc]
    out = np.zeros((N, BLOCK_BYTES), np.uint8)
    assert quickly(lambda: disk.ns.get_into(prompt(12), out)).n_blocks == N
    np.testing.assert_array_equal(out, content(12))
    assert quickly(lambda: disk.ns.get_into(prompt(1), out)).n_blocks == N  # reads go on
    np.testing.assert_array_equal(out, content(1))
    stuck.release()
    wait_until(lambda: disk.client.stats()["offload_suspended"] == 0, "the disk is taken back")
    for seed in (10, 12):
        wait_until(lambda seed=seed: disk.ns.persist(prompt(seed), 1.0).n_durable == N, "it is durable")


def raw_lease(disk: Disk, raw: Any, seed: int, wait_s: float) -> None:
    """A client of few words that waits for a lease."""
    raw.greeted()
    request = pb.LeaseRequest(wait_s=wait_s)
    request.prompt.namespace, request.prompt.rows = disk.ns.ensure_open(), prompt(seed).tobytes()
    raw.send(Method.LEASE, request, 2)


def holds(disk: Disk) -> tuple[int, int]:
    """(leases in the store, blocks that loads pin)."""
    return disk.daemon.call(  # type: ignore[no-any-return]
        lambda d: (len(d.store.leases), sum(len(load.ids) for load in d.store.hierarchy.onboarder._loads))
    )


def test_a_client_that_goes_away_while_it_waits_gives_everything_back(disk: Disk, dial: Any, wait_until: Any) -> None:
    """Case 11: cancelled while its blocks load."""
    stuck = disk.files.stick("read", times=None)
    raw = dial(disk.daemon.config.socket_path)
    raw_lease(disk, raw, 1, FOREVER_S)
    reached(stuck)
    wait_until(lambda: holds(disk) == (0, N), "the request waits")
    raw.sock.close()
    wait_until(lambda: holds(disk) == (0, 0), "what it waited for is let go of")
    stuck.release()
    wait_until(lambda: disk.client.stats()["dram_reserved_bytes"] == 0, "the slots that were read into are settled")
    assert disk.client.stats()["leases"] == 0
    disk.daemon.call(lambda d: d.store.check())
    # The reading went on for others.
    with disk.ns.lease(prompt(1), wait="best_effort") as lease:
        assert len(lease) == N
        np.testing.assert_array_equal(lease[5], content(1)[5])


def test_a_client_that_falls_silent_while_it_waits_is_told_and_cleaned_up(
    disk: Disk, dial: Any, wait_until: Any
) -> None:
    stuck = disk.files.stick("read", times=None)
    raw = dial(disk.daemon.config.socket_path)
    raw_lease(disk, raw, 1, FOREVER_S)
    reached(stuck)
    wait_until(lambda: holds(disk) == (0, N), "the request waits")

    def silence(d: Any) -> None:
        for session in d.sessions:
            if session.client_name == "":
                session.heartbeat_at_s = -1e9

    disk.daemon.call(silence)
    assert raw.error().code == pb.SESSION_ENDED
    assert holds(disk) == (0, 0)
    raw.sock.close()


def test_the_end_of_a_process_ends_its_waiting_even_if_a_child_keeps_the_socket(
    disk: Disk, dial: Any, wait_until: Any
) -> None:
    disk.files.stick("read", times=None)
    raw = dial(disk.daemon.config.socket_path)
    raw_lease(disk, raw, 1, FOREVER_S)
    wait_until(lambda: holds(disk) == (0, N), "the request waits")
    disk.daemon.call(lambda d: [d.end_session(s) for s in d.sessions if s.client_name == ""])
    wait_until(lambda: holds(disk) == (0, 0), "the load is let go of")


def test_a_session_that_ended_otherwise_meanwhile_gets_no_lease(disk: Disk, dial: Any, wait_until: Any) -> None:
    stuck = disk.files.stick("read", times=None)
    raw = dial(disk.daemon.config.socket_path)
    raw_lease(disk, raw, 1, FOREVER_S)
    wait_until(lambda: holds(disk) == (0, N), "the request waits")

    def end(d: Any) -> None:
        for session in d.sessions:
            session.live = session.client_name != ""

    disk.daemon.call(end)
    stuck.release()
    assert raw.error().code == pb.SESSION_ENDED
    assert holds(disk) == (0, 0)


def test_a_fork_while_a_thread_waits_takes_nothing_from_it(disk: Disk, wait_until: Any) -> None:
    stuck = disk.files.stick("read", times=None)
    thread, results = in_thread(lambda: disk.ns.lease(prompt(1), wait=FOREVER_S))
    reached(stuck)
    wait_until(lambda: holds(disk) == (0, N), "the request waits")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if disk.ns.match(prompt(1)).n_blocks == N else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    stuck.release()
    thread.join(SOON_S)
    assert len(results[0]) == N
    np.testing.assert_array_equal(results[0][2], content(1)[2])
    results[0].release()


def test_closing_a_client_ends_the_waiting_of_its_threads(disk: Disk, wait_until: Any) -> None:
    stuck = disk.files.stick("read", times=None)
    client = Client(disk.daemon.config.socket_path, timeout_s=FOREVER_S)
    ns = client.open(NAMESPACE)
    thread, results = in_thread(lambda: ns.lease(prompt(1), wait=FOREVER_S))
    reached(stuck)
    wait_until(lambda: holds(disk) == (0, N), "the request waits")
    quickly(client.close)
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert not results[0]
    assert results[0].reason
    wait_until(lambda: holds(disk) == (0, 0), "the load is let go of")


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_daemon_stops_in_time_although_the_disk_does_not(disk: Disk, operation: str) -> None:
    stuck = disk.files.stick(operation, times=None)
    if operation == "read":
        thread, results = in_thread(lambda: disk.ns.lease(prompt(1), wait=FOREVER_S))
    else:
        thread, results = in_thread(lambda: disk.ns.put(prompt(9), content(9), durable_within_s=FOREVER_S))
    reached(stuck)
    quickly(disk.daemon.stop)
    assert not disk.daemon.stopped_in_order
    thread.join(SOON_S)
    assert not thread.is_alive()
    if operation == "read":
        assert not results[0]
    else:
        assert (results[0].n_stored, results[0].n_durable) == (N, 0)


def test_an_error_of_the_moment_loses_nothing(disk: Disk) -> None:
    disk.files.fail("read", errno.EIO, after=5, times=1)
    with disk.ns.lease(prompt(1), wait=FOREVER_S) as lease:
        assert len(lease) == N
        for i in range(N):
            np.testing.assert_array_equal(lease[i], content(1)[i])
    assert "onboard_unreadable_blocks" not in disk.client.stats()


def test_an_error_of_the_disk_is_a_miss_for_exactly_those_blocks(disk: Disk) -> None:
    """Case 3."""
    disk.files.fail("read", errno.EIO, times=None, where=nth_place(5))
    with disk.ns.lease(prompt(1), wait=FOREVER_S) as lease:
        assert len(lease) == 5
        for i in range(5):
            np.testing.assert_array_equal(lease[i], content(1)[i])
    assert ns_stat(disk, "onboard_unreadable_blocks") == 1
    # The block is gone for good and can be stored again.
    assert disk.ns.match(prompt(1)).n_blocks == 5
    assert disk.ns.put(prompt(1), content(1)).n_stored >= 1
    out = np.zeros((N, BLOCK_BYTES), np.uint8)
    assert disk.ns.get_into(prompt(1), out).n_blocks == N
    np.testing.assert_array_equal(out, content(1))


def test_a_flipped_bit_is_a_miss(disk: Disk) -> None:
    """Case 1, through a socket."""
    disk.files.flip("read", times=None, where=nth_place(2))
    with disk.ns.lease(prompt(2), wait=FOREVER_S) as lease:
        assert len(lease) == 2
    assert ns_stat(disk, "onboard_corrupt_blocks") == 1


def nth_place(n: int) -> Callable[[str, Extent | None], bool]:
    """Always the same place of a file: the n-th that is read, counted from 0."""
    seen: list[tuple[str, int]] = []

    def is_it(name: str, extent: Extent | None) -> bool:
        assert extent is not None
        place = (name, extent.offset)
        if place not in seen:
            seen.append(place)
        return seen.index(place) == n

    return is_it


def ns_stat(disk: Disk, name: str) -> float:
    return float(disk.client.stats()[name])
