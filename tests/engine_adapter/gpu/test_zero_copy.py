"""Kernels that read leased blocks in place, and what keeps these there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, NamespaceHandle
from kvstore.device.copy_kernels import copy, table_of_runs
from kvstore.device.pinned import PinnedBuffer
from kvstore.engine_adapter.gpu.zero_copy import Pointers, ZeroCopyReader
from kvstore.errors import BadInputError, DeviceError, EndedError
from kvstore.types import KVSpec, Namespace, Shard
from tests.engine_adapter.gpu.scene import Bytes, Scene
from tests.engine_adapter.gpu.test_leases import BLOCK_BYTES, BLOCK_TOKENS, N, content, flood, opened, prompt

WaitUntil = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def reader(on_device: Scene, client: Client) -> Iterator[ZeroCopyReader]:
    client.watch_mappings(on_device.pinned)
    made = ZeroCopyReader(on_device.device, on_device.pinned)
    yield made
    made.close()
    client.unwatch_mappings(on_device.pinned)


@pytest.fixture
def cache(client: Client) -> NamespaceHandle:
    handle = opened(client)
    assert handle.put(prompt(1), content(1)).n_stored == N
    return handle


class Gather:
    """A kernel on a stream that reads blocks at their addresses; ``result`` waits for it."""

    def __init__(self, on_device: Scene, pointers: Pointers) -> None:
        device = on_device.device
        self._scene, self.there, self.stream = on_device, device.malloc(N * BLOCK_BYTES), device.stream()
        to = self.there + np.arange(N) * BLOCK_BYTES
        zero = np.zeros(1, np.uint64)
        table = table_of_runs(zero, zero, to, pointers.addresses.view(np.int64), pointers.sizes)
        self._words = PinnedBuffer(device, table.words.nbytes)
        self._words.array[:] = table.words.view(np.uint8)
        copy(device, table, self._words.device_address, self.stream)

    def event(self) -> int:
        event = int(self._scene.device.event())
        self._scene.device.record(event, self.stream)
        return event

    def result(self) -> Bytes:
        self._scene.device.sync_stream(self.stream)
        self._words.close()
        return self._scene.download(self.there, N * BLOCK_BYTES).reshape(N, BLOCK_BYTES)


def test_a_kernel_reads_the_blocks_where_they_lie(
    on_device: Scene, reader: ZeroCopyReader, cache: NamespaceHandle
) -> None:
    with cache.lease(prompt(1)) as lease:
        with reader.open(lease) as pointers:
            assert len(pointers) == N
            assert (pointers.addresses != lease.addresses).all(), "kernels see them elsewhere"
            assert (Gather(on_device, pointers).result() == content(1)).all()
            assert pointers.unchanged()
        assert not lease.loans


def test_a_lease_can_not_be_released_under_a_reader(
    on_device: Scene, reader: ZeroCopyReader, cache: NamespaceHandle
) -> None:
    lease = cache.lease(prompt(1))
    pointers = reader.open(lease)
    with pytest.raises(BadInputError, match="still read from by a device"):
        lease.release()
    assert lease.valid
    gather = Gather(on_device, pointers)
    flood(cache)
    assert (gather.result() == content(1)).all()
    pointers.close()
    lease.release()
    with pytest.raises(EndedError, match="closed"):
        _ = pointers.addresses
    with pytest.raises(EndedError):
        reader.open(lease)


def test_a_lease_over_a_family_can_not_be_released_under_a_reader_of_a_shard(
    on_device: Scene, client: Client, reader: ZeroCopyReader
) -> None:
    spec = KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES)
    family = client.open_family([Namespace("family", spec, shard=Shard(rank, 2)) for rank in range(2)])
    for rank, shard in enumerate(family.shards):
        assert shard.put(prompt(1), content(rank)).n_stored == N
    lease = family.lease(prompt(1))
    pointers = reader.open(lease.shard(1))
    with pytest.raises(BadInputError, match="still read from by a device"):
        lease.release()
    assert (Gather(on_device, pointers).result() == content(1)).all()
    pointers.close()
    lease.release()


def test_pointers_closed_after_an_event_hold_the_lease_until_it_is_over(
    on_device: Scene, reader: ZeroCopyReader, cache: NamespaceHandle, wait_until: WaitUntil
) -> None:
    lease = cache.lease(prompt(1))
    pointers = reader.open(lease)
    gather = Gather(on_device, pointers)
    pointers.close(gather.event())
    assert not pointers.unchanged()
    wait_until(lambda: not lease.loans, "the event is over")
    lease.release()
    flood(cache)
    assert (gather.result() == content(1)).all()


def test_what_is_no_event_closes_nothing(on_device: Scene, reader: ZeroCopyReader, cache: NamespaceHandle) -> None:
    lease = cache.lease(prompt(1))
    pointers = reader.open(lease)
    freed = Gather(on_device, pointers).event()
    on_device.device.free_event(freed)
    with pytest.raises(BadInputError):
        pointers.close(freed)
    assert pointers.unchanged()
    with pytest.raises(BadInputError, match="still read from by a device"):
        lease.release()
    pointers.close()
    lease.release()


def test_a_right_that_ends_under_a_reader_frees_nothing(
    on_device: Scene, reader: ZeroCopyReader, cache: NamespaceHandle, wait_until: WaitUntil
) -> None:
    lease = cache.lease(prompt(1), ttl_s=0.3)
    with reader.open(lease) as pointers:
        gather = Gather(on_device, pointers)
        wait_until(lambda: not lease.valid, "its time is up")
        flood(cache)
        assert (gather.result() == content(1)).all()
        assert not pointers.unchanged(), "and the reader is told that it does not count"
    lease.release()


def test_a_view_is_a_reader(reader: ZeroCopyReader, cache: NamespaceHandle) -> None:
    lease = cache.lease(prompt(1))
    pointers = reader.open(lease)
    view = pointers.view(-1)
    interface = view.__cuda_array_interface__
    assert (interface["data"][0], interface["shape"]) == (int(pointers.addresses[-1]), (BLOCK_BYTES,))
    with pytest.raises(BadInputError, match="1 views of these blocks are alive"):
        pointers.close()
    with pytest.raises(IndexError):
        pointers.view(N)
    del view
    pointers.close()
    pointers.close()
    lease.release()


def test_an_error_inside_is_what_is_raised_and_the_blocks_stay(
    on_device: Scene, reader: ZeroCopyReader, cache: NamespaceHandle
) -> None:
    kept: list[Any] = []
    opened_pointers: list[Pointers] = []

    def fail() -> None:
        with cache.lease(prompt(1)) as lease, reader.open(lease) as pointers:
            opened_pointers.append(pointers)
            kept.append(pointers.view(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    (pointers,) = opened_pointers
    flood(cache)
    assert (Gather(on_device, pointers).result() == content(1)).all()
    kept.clear()
    pointers.close()


def test_what_is_closed_is_let_go_of(reader: ZeroCopyReader, cache: NamespaceHandle) -> None:
    lease = cache.lease(prompt(1))
    pointers = reader.open(lease)
    view = weakref.ref(lease[0].base)
    pointers.close()
    lease.release()
    del pointers, lease
    gc.collect()
    assert view() is None


def test_blocks_that_the_device_can_not_reach_are_an_error(on_device: Scene, cache: NamespaceHandle) -> None:
    blind = ZeroCopyReader(on_device.device, on_device.pinned)  # whom nobody told of the client's mappings
    with cache.lease(prompt(1)) as lease:
        with pytest.raises(DeviceError, match="4 of 4 blocks can't be read by the device in place"):
            blind.open(lease, timeout_s=0.1)
        assert not lease.loans


def test_torch_and_cupy_look_at_gpus_only(reader: ZeroCopyReader, cache: NamespaceHandle) -> None:
    with cache.lease(prompt(1)) as lease, reader.open(lease) as pointers:
        for look, library in ((pointers.tensor, "torch"), (pointers.array, "cupy")):
            with pytest.raises(DeviceError, match=f"{library} can't look into the memory of a simulated device"):
                look(0)
