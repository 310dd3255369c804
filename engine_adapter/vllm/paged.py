"""Copies between blocks of the store and the engine's paged KV: parts of one layer at a time.

A copy is a batch of runs, made by the processor or by the GPU (see ``engine_adapter.gpu``). On devices that can't be
opened so, torch gathers the pages there, and they go through one pinned piece of host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore import native
from kvstore.client import Client
from kvstore.device.choose import open_device
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.choice import measure, unmeasured
from kvstore.engine_adapter.gpu.mover import DeviceMover
from kvstore.engine_adapter.moving import Copy, HostMover, HostMoves, Mover, Moves
from kvstore.engine_adapter.runs import Pages, Strides, plan_runs
from kvstore.engine_adapter.vllm.guard import logger
from kvstore.engine_adapter.vllm.shapes import LayerPages
from kvstore.errors import DeviceError, IntegrityError

PIECE_BYTES = 8 << 20

MEASURED_SIZES = (4 << 10, 64 << 10, 1 << 20)
MEASURED_BYTES = 16 << 20

Going = Callable[[], bool]

Slots = NDArray[np.int64]
"""Addresses of blocks of the store in this process, [n]."""


class Paged(Protocol):
    """``ids`` int64 [n] are the engine's blocks, ``slots`` int64 [n] the store's. What ``load`` and ``save`` give to a
    device is over when the job's ``moves`` are settled."""

    def loading(self) -> Moves:
        """On the engine's thread: what makes a job's copies, after what the engine has been doing with its blocks."""

    def saving(self) -> Moves:
        """As ``loading``, the other way."""

    def stream(self) -> int | None:
        """On the engine's thread: the stream it computes on; None where loads are complete when they say so."""

    def load(self, layer: int, slots: Slots, ids: NDArray[np.int64], moves: Moves, going: Going) -> bool:
        """From the store into the engine's pages; False if ``going`` ended it."""

    def save(self, layer: int, slots: Slots, ids: NDArray[np.int64], moves: Moves, going: Going) -> bool:
        """From the engine's pages into the store; False if ``going`` ended it."""


def paged(layers: list[LayerPages], layout: BlockLayout, threads: int, mover: DeviceMover | None) -> Paged:
    """What copies for these layers, wherever they lie; with ``mover``, which their device needs, by it."""
    if mover is not None:
        return MoverPaged(layers, layout, mover, partial(_current_stream, layers[0].tensor.device))
    if layers[0].tensor.device.type == "cpu":
        return MoverPaged(layers, layout, HostMover(threads), lambda: None)
    return DevicePaged(layers, layout, threads)


def device_mover(tensor: torch.Tensor, clients: Sequence[Client], counters: SharedCounters) -> DeviceMover | None:
    """What copies to and from the GPU of this tensor; None for other memory and, logged, for a GPU that can't be had.

    Blocks for a second: the link is measured.
    """
    if tensor.device.type != "cuda":
        return None
    try:
        device = open_device(f"cuda:{tensor.device.index or 0}")
    except DeviceError as error:
        logger.warning("kvstore: blocks are copied by torch, through host memory: %s", error)
        return None
    try:
        choice = measure(device, sizes=MEASURED_SIZES, total_bytes=MEASURED_BYTES, repeats=3)
    except (DeviceError, IntegrityError) as error:
        logger.warning("kvstore: the link to the GPU was not measured, published rates count: %s", error)
        choice = unmeasured()
    return DeviceMover(device, *clients, choice=choice, counters=counters)


class MoverPaged:
    """Runs between pages and blocks, planned like every other copy between layouts."""

    def __init__(
        self, layers: list[LayerPages], layout: BlockLayout, mover: Mover, stream: Callable[[], int | None]
    ) -> None:
        self._layers, self._layout, self._mover, self.stream = layers, layout, mover, stream

    def loading(self) -> Moves:
        return self._after_the_engine(self._mover.loading())

    def saving(self) -> Moves:
        return self._after_the_engine(self._mover.storing())

    def load(self, layer: int, slots: Slots, ids: NDArray[np.int64], moves: Moves, going: Going) -> bool:
        pages, (offset,) = self._layers[layer], self._layout.layers[layer].planes
        runs = plan_runs(_engine(pages, ids), self._layout.pages(layer, slots, 0), len(ids), 1, pages.page_bytes)
        return moves.copy([Copy(runs, pages.address, offset)], going)

    def save(self, layer: int, slots: Slots, ids: NDArray[np.int64], moves: Moves, going: Going) -> bool:
        pages, (offset,) = self._layers[layer], self._layout.layers[layer].planes
        runs = plan_runs(self._layout.pages(layer, slots, 0), _engine(pages, ids), len(ids), 1, pages.page_bytes)
        return moves.copy([Copy(runs, offset, pages.address)], going)

    def _after_the_engine(self, moves: Moves) -> Moves:
        moves.after(self.stream())
        return moves


class DevicePaged:
    """The engine's pages are on a device that torch alone knows: gathered there, staged in host memory."""

    def __init__(self, layers: list[LayerPages], layout: BlockLayout, threads: int) -> None:
        self._layers, self._layout, self._threads = layers, layout, threads
        self._bytes = [_as_bytes(pages) for pages in layers]
        self._device = layers[0].tensor.device
        self._on_cuda = self._device.type == "cuda"

    def loading(self) -> Moves:
        return _TorchMoves(self._mark())

    def saving(self) -> Moves:
        return _TorchMoves(self._mark())

    def stream(self) -> int | None:
        return None

    def load(self, layer: int, slots: Slots, ids: NDArray[np.int64], moves: Moves, going: Going) -> bool:  # noqa: ARG002
        pages, (offset,) = self._layers[layer], self._layout.layers[layer].planes
        with self._on_device():
            staged = torch.empty((len(ids), pages.page_bytes), dtype=torch.uint8, pin_memory=self._on_cuda)
            native.copy_batch(_rows(staged), (slots + offset).view(np.uint64), pages.page_bytes, threads=self._threads)
            self._wait(moves)
            memory = self._bytes[layer]
            memory.index_copy_(0, torch.from_numpy(ids).to(memory.device), staged.to(memory.device))
            self._finish()
        return True

    def save(self, layer: int, slots: Slots, ids: NDArray[np.int64], moves: Moves, going: Going) -> bool:  # noqa: ARG002
        pages, (offset,) = self._layers[layer], self._layout.layers[layer].planes
        with self._on_device():
            self._wait(moves)
            memory = self._bytes[layer]
            staged = memory.index_select(0, torch.from_numpy(ids).to(memory.device)).cpu()
        native.copy_batch((slots + offset).view(np.uint64), _rows(staged), pages.page_bytes, threads=self._threads)
        return True

    def _on_device(self) -> AbstractContextManager[Any]:
        """This thread has the layers' device meanwhile: one of our own begins with number 0."""
        return torch.cuda.device(self._device) if self._on_cuda else nullcontext()

    def _mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event() if self._on_cuda else None

    def _wait(self, moves: Moves) -> None:
        if isinstance(moves, _TorchMoves) and moves.event is not None:
            torch.cuda.current_stream(self._device).wait_event(moves.event)

    def _finish(self) -> None:
        if self._on_cuda:
            torch.cuda.current_stream(self._device).synchronize()


class _TorchMoves(HostMoves):
    """Copies that are over when they were made; ``event``, torch's, comes before them."""

    def __init__(self, event: Any) -> None:
        super().__init__()
        self.event = event


def _current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _engine(pages: LayerPages, ids: NDArray[np.int64]) -> Pages:
    return Pages(ids * pages.stride_bytes, 1, Strides(pages.page_bytes, pages.page_bytes))


def _as_bytes(pages: LayerPages) -> torch.Tensor:
    """The layer as uint8 [blocks, page_bytes] over the same memory, in the order in which it lies there."""
    tensor = pages.tensor
    unit = tensor.element_size()
    n_blocks = tensor.shape[0] * tensor.stride(0) * unit // pages.stride_bytes
    flat = tensor.as_strided(
        (n_blocks, pages.page_bytes // unit), (pages.stride_bytes // unit, 1), tensor.storage_offset()
    )
    return flat.view(torch.uint8)


def _rows(staged: torch.Tensor) -> NDArray[np.uint64]:
    rows: NDArray[np.uint64] = np.uint64(staged.data_ptr()) + np.arange(len(staged), dtype=np.uint64) * np.uint64(
        staged.stride(0)
    )
    return rows
