"""Copies between blocks of the store and the engine's paged KV: parts of one layer at a time.

In host memory a copy is a batch of runs, planned like every other copy between layouts. On a device the pages are
gathered there and go through one pinned piece of host memory.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore import native
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.runs import Pages, Strides, copy_runs, plan_runs
from kvstore.engine_adapter.vllm.shapes import LayerPages

PIECE_BYTES = 8 << 20

Slots = NDArray[np.int64]
"""Addresses of blocks of the store in this process, [n]."""


class Paged(Protocol):
    """``ids`` int64 [n] are the engine's blocks, ``slots`` int64 [n] the store's. Both calls block for the copy."""

    def load(self, layer: int, slots: Slots, ids: NDArray[np.int64]) -> None:
        """From the store into the engine's pages."""

    def save(self, layer: int, slots: Slots, ids: NDArray[np.int64]) -> None:
        """From the engine's pages into the store."""

    def mark(self) -> Any:
        """On the engine's thread: a point in the device's work, None where there is no device."""

    def wait(self, mark: Any) -> None:
        """On a thread that saves: let what it copies come after that point."""


def paged(layers: list[LayerPages], layout: BlockLayout, threads: int) -> Paged:
    """What copies for these layers, wherever they lie."""
    if layers[0].tensor.device.type == "cpu":
        return HostPaged(layers, layout, threads)
    return DevicePaged(layers, layout, threads)


class HostPaged:
    """The engine's pages are memory of this process."""

    def __init__(self, layers: list[LayerPages], layout: BlockLayout, threads: int) -> None:
        self._layers, self._layout, self._threads = layers, layout, threads

    def load(self, layer: int, slots: Slots, ids: NDArray[np.int64]) -> None:
        pages, (offset,) = self._layers[layer], self._layout.layers[layer].planes
        runs = plan_runs(_engine(pages, ids), self._layout.pages(layer, slots, 0), len(ids), 1, pages.page_bytes)
        copy_runs(runs, pages.address, offset, self._threads)

    def save(self, layer: int, slots: Slots, ids: NDArray[np.int64]) -> None:
        pages, (offset,) = self._layers[layer], self._layout.layers[layer].planes
        runs = plan_runs(self._layout.pages(layer, slots, 0), _engine(pages, ids), len(ids), 1, pages.page_bytes)
        copy_runs(runs, offset, pages.address, self._threads)

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        """What the engine computed is there when it says so."""


class DevicePaged:
    """The engine's pages are on a device: gathered there, staged in host memory."""

    def __init__(self, layers: list[LayerPages], layout: BlockLayout, threads: int) -> None:
        self._layers, self._layout, self._threads = layers, layout, threads
        self._bytes = [_as_bytes(pages) for pages in layers]
        self._on_cuda = layers[0].tensor.device.type == "cuda"

    def load(self, layer: int, slots: Slots, ids: NDArray[np.int64]) -> None:
        pages, (offset,) = self._layers[layer], self._layout.layers[layer].planes
        staged = torch.empty((len(ids), pages.page_bytes), dtype=torch.uint8, pin_memory=self._on_cuda)
        native.copy_batch(_rows(staged), (slots + offset).view(np.uint64), pages.page_bytes, threads=self._threads)
        memory = self._bytes[layer]
        memory.index_copy_(0, torch.from_numpy(ids).to(memory.device), staged.to(memory.device))
        self._finish()

    def save(self, layer: int, slots: Slots, ids: NDArray[np.int64]) -> None:
        pages, (offset,) = self._layers[layer], self._layout.layers[layer].planes
        memory = self._bytes[layer]
        staged = memory.index_select(0, torch.from_numpy(ids).to(memory.device)).cpu()
        native.copy_batch((slots + offset).view(np.uint64), _rows(staged), pages.page_bytes, threads=self._threads)

    def mark(self) -> Any:
        return torch.cuda.current_stream().record_event() if self._on_cuda else None

    def wait(self, mark: Any) -> None:
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def _finish(self) -> None:
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()


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
