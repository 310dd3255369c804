"""Copies by kernel: tables of runs on their way to the device, one launch each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.device.copy_kernels import COPY_BLOCKS, copy, table_of_runs
from kvstore.device.seam import Device
from kvstore.engine_adapter.gpu.rings import DeviceRing, HostRing
from kvstore.plan.bandwidth import kernel_ends
from kvstore.plan.ways import Pieces

Addresses = NDArray[np.uint64]

_RUN_WORDS = 6
"""Three a run; twice that, as long ones are cut to what is usual in the table, at most to as many again."""
_PLANE_WORDS = 2
_ABSOLUTE = np.zeros(1, np.uint64)
SPREAD_BLOCKS = 64
"""Inside of device memory more threads are needed than over a link."""


class KernelCopies:
    """``tables`` launches of up to ``runs_max`` runs may be under way; memory for them is had when first needed.

    For one thread at a time. Also a context.
    """

    def __init__(self, device: Device, runs_max: int, tables: int) -> None:
        self._device = device
        self._table_bytes = 8 * (_PLANE_WORDS + _RUN_WORDS * runs_max)
        self._tables = tables
        self._rings: tuple[HostRing, DeviceRing] | None = None

    def open(self) -> tuple[HostRing, DeviceRing]:
        """Have the memory for tables by now, on the host and on the device.

        Raises DeviceMemoryError where there is no room, DeviceError where none can be registered; may be tried again.
        """
        if self._rings is None:
            with ExitStack() as made:
                host = HostRing(self._device, self._table_bytes, self._tables)
                made.callback(host.close)
                device = DeviceRing(self._device, self._table_bytes, self._tables)
                made.pop_all()
            self._rings = host, device
        return self._rings

    def copy(self, to: Addresses, come_from: Addresses, sizes: Addresses, stream: int, *, blocks: int) -> None:
        """Give one launch to a stream: runs of ``sizes`` bytes between addresses for kernels, uint64 [n] each.

        Blocks while all tables are under way. Raises what ``open`` does.
        """
        host, device = self.open()
        table = table_of_runs(_ABSOLUTE, _ABSOLUTE, to.view(np.int64), come_from.view(np.int64), sizes)
        here, there = host.take_for_host(), device.take(stream)
        n_bytes = table.words.nbytes
        host.buffer.array[here.start : here.start + n_bytes] = table.words.view(np.uint8)
        self._device.copy(there.address, here.address, n_bytes, stream)
        copy(self._device, table, there.device_address, stream, blocks)
        host.used(here, stream)
        device.used(there, stream)

    def close(self) -> None:
        """Give the memory back; waits for the device."""
        rings, self._rings = self._rings, None
        for ring in rings or ():
            ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def move_pieces(kernels: KernelCopies, pieces: Pieces, stream: int, blocks: int = COPY_BLOCKS) -> None:
    """A ``plan.ways.Mover``, with its tables."""
    to, come_from = kernel_ends(pieces)
    sizes = np.full(len(to), pieces.piece_bytes, np.uint64)
    kernels.copy(to, come_from, sizes, stream, blocks=blocks)


def read_in_place(kernels: KernelCopies, pieces: Pieces, stream: int) -> None:
    """As ``move_pieces``, but as kernels that work on mapped memory read it: with many threads."""
    to, come_from = kernel_ends(pieces)
    sizes = np.full(len(to), pieces.piece_bytes, np.uint64)
    kernels.copy(to, come_from, sizes, stream, blocks=SPREAD_BLOCKS)


def measure_spread(device: Device, kernels: KernelCopies, piece_bytes: int, total_bytes: int, repeats: int) -> float:
    """GB/s at which a kernel moves small pieces inside of device memory, of which twice ``total_bytes`` are used."""
    memory = device.malloc(2 * total_bytes)
    try:
        come_from = memory + total_bytes
        return measure_pieces(device, kernels, memory, come_from, piece_bytes, total_bytes, repeats, (SPREAD_BLOCKS,))[
            0
        ]
    finally:
        device.free(memory)


def measure_pieces(
    device: Device,
    kernels: KernelCopies,
    to: int,
    come_from: int,
    piece_bytes: int,
    total_bytes: int,
    repeats: int,
    block_counts: Sequence[int],
) -> list[float]:
    """GB/s at which a kernel brings small pieces from all over ``come_from``, by each of these counts of thread blocks.

    Medians of ``repeats``; the numbers take turns. Blocks meanwhile.
    """
    n = total_bytes // piece_bytes
    sizes = np.full(n, piece_bytes, np.uint64)
    in_order = np.arange(n, dtype=np.uint64) * np.uint64(piece_bytes)
    dsts, srcs = np.uint64(to) + in_order, np.uint64(come_from) + np.random.default_rng(0).permutation(in_order)
    took_s: list[list[float]] = [[] for _ in block_counts]
    stream = device.stream()
    try:
        for _ in range(repeats + 1):
            for blocks, seconds in zip(block_counts, took_s, strict=True):
                begun_s = time.perf_counter()
                kernels.copy(dsts, srcs, sizes, stream, blocks=blocks)
                device.sync_stream(stream)
                seconds.append(time.perf_counter() - begun_s)
    finally:
        device.free_stream(stream)
    return [n * piece_bytes / float(np.median(seconds[1:])) / 1e9 for seconds in took_s]
