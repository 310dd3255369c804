"""A paged engine on a device with a stream of its own: what it computes is stored, what it reads is loaded first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, WriteReservation
from kvstore.device.pinned import PinnedBuffer
from kvstore.engine_adapter.engine_layout import EngineKV
from kvstore.engine_adapter.gpu.choice import Route
from kvstore.engine_adapter.gpu.staged import StagedMoves
from kvstore.engine_adapter.moving import Copy
from kvstore.engine_adapter.page_table import PageTable
from kvstore.engine_adapter.paged import PagedStore, RowRequest
from kvstore.errors import BadInputError
from tests.engine_adapter.paged_engines import DENSE, LAYERS, PAGES, Engine, far, handle_for, save_rows, table_for
from tests.engine_adapter.places import HERE, DevicePlace, OnDevice, only

ROW = np.arange(20)
WaitUntil = Callable[[Callable[[], bool], str], None]


@pytest.fixture(params=list(Route))
def gpu(request: pytest.FixtureRequest, client: Client) -> Iterator[DevicePlace]:
    made = DevicePlace(client, only(request.param), registered=True, seed=None)
    yield made
    made.close()


@pytest.fixture
def closing(gpu: DevicePlace) -> Iterator[list[PagedStore]]:
    stores: list[PagedStore] = []
    yield stores
    for store in stores:
        store.close()


def made(client: Client, gpu: DevicePlace, closing: list[PagedStore]) -> tuple[Engine, PagedStore, PageTable]:
    engine = Engine("2PTHD", 4, 1, place=gpu)
    store = gpu.store(handle_for(client, DENSE), engine.kv)
    closing.append(store)
    return engine, store, table_for(engine, [len(ROW)], 1)


class Compute:
    """The engine's stream: writes a layer's memory, or reads it, when its turn comes."""

    def __init__(self, gpu: DevicePlace) -> None:
        self.gpu, self.stream = gpu, gpu.device.stream()
        self._buffers: list[PinnedBuffer] = []

    def writes(self, layer: int, value: int) -> None:
        array, address = self.gpu._held[layer]
        self.gpu.device.fill(address, value, array.nbytes, self.stream)

    def reads(self, layer: int) -> PinnedBuffer:
        array, address = self.gpu._held[layer]
        self._buffers.append(PinnedBuffer(self.gpu.device, array.nbytes))
        self.gpu.device.copy(self._buffers[-1].address, address, array.nbytes, self.stream)
        return self._buffers[-1]


@pytest.mark.parametrize("says_stream", [True, False])
def test_a_layer_is_stored_after_the_engines_stream_computed_it(
    client: Client, gpu: DevicePlace, closing: list[PagedStore], says_stream: bool
) -> None:
    """The planted bug: the layer is said to be ready without the stream on which that will be so."""
    _, store, table = made(client, gpu, closing)
    compute = Compute(gpu)
    for layer in range(LAYERS):
        gpu.device.fill(gpu._held[layer][1], 0, gpu._held[layer][0].nbytes, compute.stream)
    gpu.device.sync_stream(compute.stream)
    request = RowRequest(ROW)
    writer = store.writer(request, store.find([request])[0])
    job = store.save([writer], [ROW], table, deadline_s=far())
    for layer in range(LAYERS):
        compute.writes(layer, layer + 1)
        job.layer_ready(layer, compute.stream if says_stream else None)
    assert job.wait(far())
    with store._handle.lease(ROW) as lease:
        for layer, place in enumerate(store.layout.layers):
            block = lease[0][place.planes[0] : place.planes[0] + place.unit_bytes]
            assert (block == layer + 1).all() == says_stream
    gpu.device.sync_stream(compute.stream)


def test_what_an_engines_stream_reads_after_it_was_let_wait_is_loaded(
    client: Client, gpu: DevicePlace, closing: list[PagedStore]
) -> None:
    engine, store, table = made(client, gpu, closing)
    save_rows(store, [ROW], table, chunk=20)
    stored = [[plane.copy() for plane in layer] for layer in engine.logical]
    compute = Compute(gpu)
    for layer in range(LAYERS):
        compute.writes(layer, 7)
    before = [compute.reads(layer) for layer in range(LAYERS)]
    # All of that is yet to happen, and has to before the load.
    job = store.load(store.find([RowRequest(ROW)]), table, deadline_s=far(), stream=compute.stream)
    seen = []
    for layer in range(LAYERS):
        assert job.let_wait(layer, compute.stream, far())
        seen.append(compute.reads(layer))
    gpu.device.sync_stream(compute.stream)
    assert job.wait(far())
    for layer in range(LAYERS):
        assert (before[layer].array == 7).all()
        came = seen[layer].array.view(np.float32).reshape(stored[layer][0].shape[0] * 2, *stored[layer][0].shape[1:])
        pages = table.row(0)[:4]  # of which 19 tokens came, so that these are whole
        for plane in range(2):
            assert (came[plane * PAGES + pages] == stored[layer][plane][pages]).all()
    assert job.let_wait(LAYERS - 1, compute.stream, far()), "there is nothing left to wait for"


@pytest.mark.parametrize("registered", [True, False])
def test_nothing_is_committed_before_the_device_is_done(
    client: Client, monkeypatch: pytest.MonkeyPatch, registered: bool
) -> None:
    """Nor before the processor has copied what came through memory of our own."""
    gpu = DevicePlace(client, only(Route.DIRECT), registered=registered)
    under_way: list[int] = []
    commit = WriteReservation.commit

    def commits(reservation: WriteReservation, *n_blocks: int) -> tuple[int, int]:
        under_way.append(len(gpu.mover.writer.unsettled))
        return commit(reservation, *n_blocks)

    monkeypatch.setattr(WriteReservation, "commit", commits)
    store = gpu.store(handle_for(client, DENSE), (engine := Engine("2PTHD", 4, 1, place=gpu)).kv)
    save_rows(store, [ROW, ROW + 100], table_for(engine, [len(ROW)] * 2, 1), chunk=8)
    store.close()
    gpu.close()
    assert len(under_way) >= 4
    assert not any(under_way)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_load_cancelled_at_any_layer_is_over_when_the_cancel_returns(
    client: Client, gpu: DevicePlace, closing: list[PagedStore], monkeypatch: pytest.MonkeyPatch, layer: int,
    wait_until: WaitUntil,
) -> None:  # fmt: skip
    engine, store, table = made(client, gpu, closing)
    save_rows(store, [ROW], table, chunk=20)
    there, go = threading.Event(), threading.Event()
    calls: list[int] = []
    copy = StagedMoves.copy

    def stops(moves: StagedMoves, copies: Sequence[Copy], *going: Any) -> bool:
        calls.append(1)
        if len(calls) == layer + 1:
            there.set()
            assert go.wait(30)
        return copy(moves, copies, *going)

    monkeypatch.setattr(StagedMoves, "copy", stops)
    job = store.load(store.find([RowRequest(ROW)]), table, deadline_s=far())
    assert there.wait(30)
    cancelling = threading.Thread(target=job.cancel)
    cancelling.start()
    wait_until(lambda: job.ending, "the cancel is under way")
    go.set()
    cancelling.join(30)
    assert (job.over, job.reason, job.failed_rows()) == (True, "it was cancelled", [0])
    assert not gpu.mover.reader.unsettled, "the device has done all that it was given"
    # The pages are the engine's again: what it writes stays.
    compute = Compute(gpu)
    for each in range(LAYERS):
        compute.writes(each, 9)
    gpu.device.sync_stream(compute.stream)
    store.close()
    assert all((np.ascontiguousarray(p).view(np.uint8) == 9).all() for planes in engine.logical for p in planes)


def test_what_was_found_is_loaded_though_the_daemon_is_gone(
    daemon: Any, client: Client, gpu: DevicePlace, closing: list[PagedStore]
) -> None:
    engine, store, table = made(client, gpu, closing)
    save_rows(store, [ROW], table, chunk=20)
    expected = engine.tokens(1, 0, table.row(0), 19)
    found = store.find([RowRequest(ROW)])
    compute = Compute(gpu)
    for layer in range(LAYERS):
        compute.writes(layer, 0)
    daemon.stop()
    assert store.load(found, table, deadline_s=far(), stream=compute.stream).wait(far())
    assert (engine.tokens(1, 0, table.row(0), 19) == expected).all()
    assert store.find([RowRequest(ROW)])[0].n_tokens == 0


def test_tensors_of_devices_say_where_they_lie() -> None:
    packed = OnDevice(np.empty((2, PAGES, 4, 2, 8), np.float32), 4096)
    kv = EngineKV.of([packed], "2PTHD")
    assert kv.on_device
    first, second = kv.layers[0].planes
    assert (first.address, second.address) == (4096, 4096 + PAGES * 4 * 2 * 8 * 4)
    assert (first.page_bytes, first.strides) == (4 * 2 * 8 * 4, (2 * 8 * 4, 8 * 4))
    other = OnDevice(np.empty((PAGES, 2, 4, 8), np.float32), 4096)
    other.__cuda_array_interface__["strides"] = (8192, 8 * 4, 2 * 8 * 4, 4)
    (plane,) = EngineKV.of([other], "PHTD").layers[0].planes
    assert (plane.page_bytes, plane.strides) == (8192, (2 * 8 * 4, 8 * 4))
    with pytest.raises(BadInputError, match="some tensors lie in host memory, some on a device"):
        EngineKV.of([packed, np.empty((2, PAGES, 4, 2, 8), np.float32)], "2PTHD")


def test_tensors_must_be_where_the_mover_copies(client: Client, gpu: DevicePlace) -> None:
    handle = handle_for(client, DENSE)
    with pytest.raises(BadInputError, match="tensors are in a device's memory, the mover copies to host memory"):
        PagedStore(handle, Engine("2PTHD", 4, 1, place=gpu).kv)
    with pytest.raises(BadInputError, match="tensors are in host memory, the mover copies to a device's memory"):
        PagedStore(handle, Engine("2PTHD", 4, 1, place=HERE).kv, mover=gpu.mover)
