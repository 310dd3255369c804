"""Loads from blocks that the device has in its own memory: copied there, never through the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, NamespaceHandle
from kvstore.device.pinned import PinnedBuffer
from kvstore.engine_adapter.gpu.choice import Route
from kvstore.engine_adapter.gpu.either_way import BlockReader, Room
from kvstore.engine_adapter.gpu.mover import DeviceMover
from kvstore.engine_adapter.gpu.zero_copy import ZeroCopyReader
from kvstore.engine_adapter.paged import PagedStore, RowRequest
from kvstore.errors import BadInputError
from tests.client.hbm_scene import BLOCK_BYTES, HBM, N, WaitUntil, churn, content, in_hbm, opened, promoted, prompt
from tests.conftest import DaemonThread
from tests.engine_adapter.gpu.scene import one
from tests.engine_adapter.paged_engines import (
    DENSE,
    DIM,
    HEADS,
    LAYERS,
    Engine,
    far,
    handle_for,
    save_rows,
    table_for,
)
from tests.engine_adapter.places import DevicePlace, only

ROW = np.arange(41)
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 4


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonThread], nvme: dict[str, Any]) -> DaemonThread:
    return start_daemon(hbm=HBM, **nvme)


@pytest.fixture
def client(daemon: DaemonThread) -> Iterator[Client]:
    with Client(daemon.config.socket_path, timeout_s=5.0) as connected:
        yield connected


@pytest.fixture
def gpu(client: Client) -> Iterator[DevicePlace]:
    made = DevicePlace(client, only(Route.STAGED), registered=True, seed=None)
    client.use_hbm(made.device)
    yield made
    made.close()


class Rows:
    """A stored row, and an engine that has yet to get it."""

    def __init__(self, client: Client, gpu: DevicePlace) -> None:
        self.gpu = gpu
        self.handle = handle_for(client, DENSE)
        assert isinstance(self.handle, NamespaceHandle)
        self._first, self._second = (Engine("2PTHD", 4, seed, place=gpu) for seed in (1, 2))
        self.table = table_for(self._first, [len(ROW)], 1)
        writing = gpu.store(self.handle, self._first.kv)
        save_rows(writing, [ROW], self.table, chunk=len(ROW))
        writing.close()
        self.store: PagedStore = gpu.store(self.handle, self._second.kv)

    def close(self) -> None:
        self.store.close()

    def count(self, name: str) -> float:
        return self.gpu.mover.counters.snapshot().get(name, 0.0)

    def same(self, n_tokens: int) -> bool:
        """Whether so many tokens have come, every byte of them."""
        pages = self.table.row(0)
        return all(
            np.array_equal(
                self._second.tokens(layer, p, pages, n_tokens), self._first.tokens(layer, p, pages, n_tokens)
            )
            for layer in range(LAYERS)
            for p in range(2)
        )

    def load(self) -> tuple[Any, Any]:
        found = self.store.find([RowRequest(ROW)])
        return found[0], self.store.load(found, self.table, deadline_s=far())


@pytest.fixture
def rows(client: Client, gpu: DevicePlace) -> Iterator[Rows]:
    made = Rows(client, gpu)
    yield made
    made.close()


def test_a_row_in_hbm_is_loaded_from_there(rows: Rows, wait_until: WaitUntil) -> None:
    in_hbm(rows.handle, ROW[:40], 5, wait_until).release()
    prefix, job = rows.load()
    assert job.wait(far()), job.reason
    assert prefix.n_tokens == 40
    assert rows.same(40)
    assert rows.count("load_hbm_bytes") == 40 * TOKEN_BYTES
    assert rows.count("load_staged_bytes") == rows.count("load_bounced_bytes") == 0


def test_a_row_partly_in_hbm_comes_from_both(rows: Rows, wait_until: WaitUntil) -> None:
    in_hbm(rows.handle, ROW[:16], 2, wait_until).release()
    prefix, job = rows.load()
    assert job.wait(far()), job.reason
    assert [len(held) for held in prefix.hbm] == [2]
    assert rows.same(40)
    assert rows.count("load_hbm_bytes") == 16 * TOKEN_BYTES
    assert rows.count("load_staged_bytes") + rows.count("load_bounced_bytes") >= 24 * TOKEN_BYTES


def out_of_dram(client: Client, wait_until: WaitUntil) -> None:
    """Others need all of DRAM, which holds 512 of their blocks."""
    other = opened(client)
    for seed in range(1000, 1160):
        other.put(prompt(seed), content(seed))


def test_a_row_in_hbm_and_on_nvme_only_is_loaded_and_can_be_continued(
    rows: Rows, client: Client, wait_until: WaitUntil
) -> None:
    """Its last block is needed in part only: the bytes of that come up from NVMe, for the writer."""
    assert rows.handle.persist(ROW[:40], wait_s=5.0).n_durable == 5
    in_hbm(rows.handle, ROW[:40], 5, wait_until).release()
    out_of_dram(client, wait_until)
    with rows.handle.lease(ROW[:36], hbm=True) as lease:
        assert (lease.slots.addresses == 0).all(), "none of it is in DRAM"
    found = rows.store.find([RowRequest(ROW[:36])])
    assert found[0].n_tokens == 35
    assert rows.store.writer(RowRequest(ROW[:36]), found[0]).n_tokens == 35
    tails = found[0].last_blocks()
    with rows.handle.lease(ROW[:40], first_block=4) as lease:
        assert tails is not None
        assert [tail.tobytes() for tail in tails] == [lease[0].tobytes()]
    job = rows.store.load(found, rows.table, deadline_s=far())
    assert job.wait(far()), job.reason
    assert rows.same(35)
    assert rows.count("load_hbm_bytes") >= 32 * TOKEN_BYTES


def test_blocks_that_another_device_opened_are_loaded_from_dram(
    rows: Rows, client: Client, wait_until: WaitUntil
) -> None:
    lease = in_hbm(rows.handle, ROW[:40], 5, wait_until)
    other = DevicePlace(client, only(Route.STAGED), registered=False, seed=None)
    assert not other.mover.reads_hbm(rows.handle.hbm_device)
    moves = other.mover.loading()
    with pytest.raises(BadInputError, match="another device"):
        moves.hold(lease)
    lease.release()
    engine = Engine("2PTHD", 4, 3, place=other)
    store = other.store(rows.handle, engine.kv)
    found = store.find([RowRequest(ROW)])
    job = store.load(found, rows.table, deadline_s=far())
    assert job.wait(far()), job.reason
    assert not found[0].hbm
    assert np.array_equal(engine.tokens(1, 1, rows.table.row(0), 40), rows._first.tokens(1, 1, rows.table.row(0), 40))
    store.close()
    other.close()


def test_a_load_whose_daemon_ends_meanwhile_failed(rows: Rows, daemon: DaemonThread, wait_until: WaitUntil) -> None:
    """On a GPU its memory is gone with it, and nobody knows what was read."""
    in_hbm(rows.handle, ROW[:40], 5, wait_until).release()
    found = rows.store.find([RowRequest(ROW)])
    assert found[0].hbm
    daemon.stop()
    job = rows.store.load(found, rows.table, deadline_s=far())
    assert not job.wait(far())
    assert "HBM ended" in job.reason
    assert job.failed_rows() == [0]


def given(mover: DeviceMover, lease: Any, there: int) -> Any:
    """The blocks of a lease in HBM on their way; not one byte has moved yet."""
    moves = mover.loading()
    moves.hold(lease)
    for at, address in zip(lease.hbm.at.tolist(), lease.hbm.addresses.tolist(), strict=True):
        moves.copy(one(there + at * BLOCK_BYTES, address, BLOCK_BYTES))
    return moves


def came(gpu: DevicePlace, there: int) -> Any:
    with PinnedBuffer(gpu.device, N * BLOCK_BYTES) as buffer:
        gpu._copy(buffer.address, there, N * BLOCK_BYTES)
        return buffer.array.copy().reshape(N, BLOCK_BYTES)


def test_a_copy_that_is_evicted_while_it_is_read_stays_until_it_was(
    client: Client, gpu: DevicePlace, wait_until: WaitUntil
) -> None:
    """Nothing moves before somebody waits for it: by then HBM has been used for others all over."""
    cache = opened(client)
    there = gpu.device.malloc(N * BLOCK_BYTES)
    lease = promoted(cache, 1, wait_until)
    moves = gpu.mover.loading()
    moves.keep_hbm(lease.hold_hbm())
    for i, address in enumerate(lease.hbm.addresses.tolist()):
        moves.copy(one(there + i * BLOCK_BYTES, address, BLOCK_BYTES))
    lease.release()
    churn(cache, wait_until)
    assert moves.finish() == ""
    assert (came(gpu, there) == content(1)).all(), "the slots were held"


@pytest.mark.parametrize("has_room", [True, False])
def test_leased_blocks_come_by_kernel_or_by_copies(
    client: Client, gpu: DevicePlace, wait_until: WaitUntil, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = gpu.device.malloc(N * BLOCK_BYTES)
    if not has_room:
        monkeypatch.setattr("kvstore.engine_adapter.gpu.lane.Lane._has_room", lambda *_: False)
    with promoted(opened(client), 1, wait_until) as lease:
        assert given(gpu.mover, lease, there).finish() == ""
    assert (came(gpu, there) == content(1)).all()
    assert gpu.mover.counters.snapshot()["load_hbm_bytes"] == N * BLOCK_BYTES


def test_kernels_are_given_the_address_in_hbm(client: Client, gpu: DevicePlace, wait_until: WaitUntil) -> None:
    reader = ZeroCopyReader(gpu.device, gpu.mover.pinned)
    lease = promoted(opened(client), 1, wait_until)
    with reader.open(lease) as pointers:
        assert (pointers.addresses == lease.hbm.addresses).all()
        assert (pointers.sizes == BLOCK_BYTES).all()
        with pytest.raises(BadInputError, match="still read from"):
            lease.release()
        there = gpu.device.malloc(N * BLOCK_BYTES)
        for i, address in enumerate(pointers.addresses.tolist()):
            gpu._copy(there + i * BLOCK_BYTES, address, BLOCK_BYTES)
        assert (came(gpu, there) == content(1)).all()
        assert pointers.unchanged()
    lease.release()
    reader.close()


def test_kernels_are_given_what_is_in_either_memory(client: Client, gpu: DevicePlace, wait_until: WaitUntil) -> None:
    cache = opened(client)
    cache.put(prompt(1), content(1))
    in_hbm(cache, prompt(1)[:32], 2, wait_until).release()
    reader = ZeroCopyReader(gpu.device, gpu.mover.pinned)
    with cache.lease(prompt(1), hbm=True) as lease, reader.open(lease) as pointers:
        assert lease.hbm.at.tolist() == [0, 1]
        assert (pointers.addresses[:2] == lease.hbm.addresses).all()
        assert (pointers.addresses[2:] != lease.addresses[2:]).all(), "as the device sees registered memory"
        assert pointers.addresses.all()
    reader.close()


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_in_hbm_is_brought_only_with_blocks_that_are_not(
    client: Client, gpu: DevicePlace, wait_until: WaitUntil, whole: bool
) -> None:
    cache = opened(client)
    cache.put(prompt(1), content(1))
    promoted(cache, 1, wait_until).release() if whole else in_hbm(cache, prompt(1)[:32], 2, wait_until).release()
    reader = BlockReader(gpu.mover)
    room = Room(gpu.device.malloc(N * BLOCK_BYTES), N * BLOCK_BYTES)
    with cache.lease(prompt(1), hbm=True) as lease:
        blocks = reader.open(lease, reads_per_byte=100, room=room)
        assert (blocks.addresses.tolist() == lease.hbm.addresses.tolist()) == whole
        there = gpu.device.malloc(N * BLOCK_BYTES)
        stream = gpu.device.stream()
        blocks.let_wait(stream)
        for i, address in enumerate(blocks.addresses.tolist()):
            gpu.device.copy(there + i * BLOCK_BYTES, address, BLOCK_BYTES, stream)
        gpu.device.sync_stream(stream)
        assert (came(gpu, there) == content(1)).all()
        assert blocks.unchanged()
        blocks.close()
    reader.close()
