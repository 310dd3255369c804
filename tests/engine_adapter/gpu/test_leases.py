"""Copies from and to a real daemon's slots: what is held while the device copies, and what counts afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.cli.daemon_process import own_process
from kvstore.client import Client, Lease, NamespaceHandle
from kvstore.engine_adapter.gpu.choice import Route
from kvstore.engine_adapter.gpu.staged import StagedMoves, StagedReader
from kvstore.types import KVSpec, Namespace
from tests.engine_adapter.gpu.scene import Bytes, Scene, far, one

BLOCK_TOKENS, BLOCK_BYTES, N = 16, 16384, 4
TTL_S = 0.3
WaitUntil = Callable[[Callable[[], bool], str], None]


def prompt(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 20, N * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int) -> Bytes:
    return np.random.default_rng(seed + 1_000_000).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)


def opened(client: Client) -> NamespaceHandle:
    return client.open(Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES)))


def flood(cache: NamespaceHandle) -> None:
    """More than the tier has room for: every slot that may be is used again."""
    for seed in range(100, 400):
        cache.put(prompt(seed), content(seed))


def gauge(client: Client, name: str) -> float:
    return float(client.stats()[name])


@pytest.fixture
def cache(on_device: Scene, client: Client) -> Iterator[NamespaceHandle]:
    """A namespace with a stored prompt, whose memory the device has registered."""
    client.watch_mappings(on_device.pinned)
    handle = opened(client)
    assert handle.put(prompt(1), content(1)).n_stored == N
    yield handle
    client.unwatch_mappings(on_device.pinned)


def given(reader: StagedReader, lease: Lease, there: int) -> StagedMoves:
    """The blocks of a lease on their way to the device, and held; not one byte has moved yet."""
    moves = reader.begin()
    moves.hold(lease)
    for i, address in enumerate(lease.addresses.tolist()):
        moves.copy(one(there + i * BLOCK_BYTES, address, BLOCK_BYTES))
    return moves


def came(on_device: Scene, there: int) -> Bytes:
    return on_device.download(there, N * BLOCK_BYTES).reshape(N, BLOCK_BYTES)


@pytest.mark.parametrize("route", [*Route])
def test_leased_blocks_come_as_they_were_stored(on_device: Scene, cache: NamespaceHandle, route: Route) -> None:
    there = on_device.device.malloc(N * BLOCK_BYTES)
    with cache.lease(prompt(1)) as lease:
        moves = given(on_device.reader(route), lease, there)
        assert moves.finish() == ""
    assert (came(on_device, there) == content(1)).all()


def test_an_early_release_does_not_free_the_slots_under_the_copy(
    on_device: Scene, client: Client, cache: NamespaceHandle, wait_until: WaitUntil
) -> None:
    there = on_device.device.malloc(N * BLOCK_BYTES)
    lease = cache.lease(prompt(1))
    moves = given(on_device.reader(Route.DIRECT), lease, there)
    lease.release()
    flood(cache)
    assert "the lease ended" in moves.finish()
    assert (came(on_device, there) == content(1)).all(), "the slots were held"
    cache.put(prompt(2), content(2))
    wait_until(lambda: gauge(client, "dram_quarantined_bytes") == 0, "the daemon hears that the copy is over")


def test_a_slot_that_was_used_again_under_the_copy_is_reported(
    on_device: Scene, cache: NamespaceHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: early release. Nothing is held, so that the copy brings the bytes of other blocks."""
    there = on_device.device.malloc(N * BLOCK_BYTES)
    lease = cache.lease(prompt(1))
    with monkeypatch.context() as patch:
        patch.setattr(StagedMoves, "hold", lambda moves, lease: moves._leases.append(lease))
        moves = given(on_device.reader(Route.DIRECT), lease, there)
    slots = lease.slots
    lease.release()
    flood(cache)
    assert not slots.unchanged(), "the generations tell"
    assert "the lease ended, or a slot changed" in moves.finish()
    assert (came(on_device, there) != content(1)).any()


def test_a_right_that_ends_while_the_device_copies_is_a_failure_and_frees_nothing(
    on_device: Scene, client: Client, cache: NamespaceHandle, wait_until: WaitUntil
) -> None:
    there = on_device.device.malloc(N * BLOCK_BYTES)
    lease = cache.lease(prompt(1), ttl_s=TTL_S)
    moves = given(on_device.reader(Route.DIRECT), lease, there)
    wait_until(lambda: not lease.valid, "its time is up")
    flood(cache)
    assert "the lease ended" in moves.finish()
    assert (came(on_device, there) == content(1)).all(), "the slots were held"
    lease.release()
    wait_until(lambda: gauge(client, "dram_quarantined_bytes") == 0, "the daemon has its slots back")
    assert on_device.counters.snapshot()["unvouched_reads"] == 1


@pytest.mark.parametrize("route", [*Route])
def test_stores_are_committed_after_the_copies(on_device: Scene, cache: NamespaceHandle, route: Route) -> None:
    values = content(5)
    pages = on_device.upload(values.reshape(-1))
    writer = on_device.writer(route)
    with cache.reserve(prompt(5), n_blocks=N) as slots:
        moves = writer.begin()
        moves.keep([slots[i] for i in range(N)])
        for i, address in enumerate(slots.addresses.tolist()):
            moves.copy(one(address, pages + i * BLOCK_BYTES, BLOCK_BYTES))
        moves.settle()
        assert slots.commit() == (N, 0)
    out = np.zeros((N, BLOCK_BYTES), np.uint8)
    assert cache.get_into(prompt(5), out).n_blocks == N
    assert (out == values).all()


def test_an_aborted_stores_slots_go_back_when_the_device_has_done_with_them(
    on_device: Scene, client: Client, cache: NamespaceHandle, wait_until: WaitUntil
) -> None:
    pages = on_device.upload(content(5).reshape(-1))
    writer = on_device.writer(Route.DIRECT)
    slots = cache.reserve(prompt(5), n_blocks=N)
    moves = writer.begin()
    moves.keep([slots[i] for i in range(N)])
    for i, address in enumerate(slots.addresses.tolist()):
        moves.copy(one(address, pages + i * BLOCK_BYTES, BLOCK_BYTES))
    slots.abort()
    flood(cache)
    assert gauge(client, "dram_reserved_bytes") > 0
    kept = {seed: cache.lease(prompt(seed)) for seed in range(390, 400)}
    moves.settle()
    wait_until(lambda: gauge(client, "dram_reserved_bytes") == 0, "the slots go back")
    for seed, lease in kept.items():
        for i in range(len(lease)):
            assert (lease[i] == content(seed)[i]).all(), "the device wrote into a slot of others"
        lease.release()


def test_a_region_that_the_daemon_wants_back_is_unregistered_first(
    on_device: Scene, daemon: Any, client: Client, cache: NamespaceHandle, wait_until: WaitUntil
) -> None:
    """With a copy from it under way, which is done first: the device would fail for ever on memory that is gone."""
    there = on_device.device.malloc(N * BLOCK_BYTES)
    on_device.pinned.use_all(*everything(cache), far()).end()
    registered_bytes = on_device.pinned.registered_bytes
    assert registered_bytes
    lease = cache.lease(prompt(1))
    moves = on_device.reader(Route.DIRECT).begin()
    for i, address in enumerate(lease.addresses.tolist()):
        moves.copy(one(there + i * BLOCK_BYTES, address, BLOCK_BYTES))
    lease.release()
    client.clear(everything=True)
    # Another tenant has the whole tier now, so that this one's regions are asked back.
    with Client(daemon.config.socket_path, tenant="other", timeout_s=5.0) as other:
        handle = other.open(Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES), tenant="other"))
        flood(handle)
        wait_until(lambda: on_device.pinned.registered_bytes < registered_bytes, "it is unregistered")
        assert (came(on_device, there) == content(1)).all()
        moves.settle()
        wait_until(lambda: gauge(other, "dram_retired_mapped_bytes") == 0, "it is unmapped, and the daemon knows")


def everything(cache: NamespaceHandle) -> tuple[Any, Any]:
    with cache.lease(prompt(1)) as lease:
        return lease.addresses.copy(), np.full(len(lease), BLOCK_BYTES, np.uint64)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_daemon_that_is_gone_fails_the_read_and_breaks_nothing(
    on_device: Scene, tmp_path: Path, wait_until: WaitUntil, how: signal.Signals
) -> None:
    with own_process(["--dram", "8MiB", "--no-prefault"], tmp_path / "p.sock") as daemon:
        with Client(daemon.socket_path, timeout_s=2.0) as client:
            client.watch_mappings(on_device.pinned)
            cache = opened(client)
            assert cache.put(prompt(1), content(1)).n_stored == N
            there = on_device.device.malloc(N * BLOCK_BYTES)
            lease = cache.lease(prompt(1), ttl_s=TTL_S if how == signal.SIGSTOP else None)
            moves = given(on_device.reader(Route.STAGED), lease, there)
            os.kill(daemon.pid, how)
            wait_until(lambda: not lease.valid, "the right has ended")
            assert "the lease ended" in moves.finish()
            assert (came(on_device, there) == content(1)).all()
            lease.release()
        assert on_device.pinned.registered_bytes == 0, "a client that is closed keeps nothing registered"
        os.kill(daemon.pid, signal.SIGCONT)
