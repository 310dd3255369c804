"""Every way of moving bytes between host memory and a device, measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvstore.device.copy_kernels import COPY_BLOCKS
from kvstore.device.seam import Device
from kvstore.engine_adapter.gpu.block_counts import measure_blocks
from kvstore.engine_adapter.gpu.kernel_copies import KernelCopies, move_pieces, read_in_place
from kvstore.errors import DeviceError
from kvstore.plan.bandwidth import REPEATS, SIZES, TOTAL_BYTES, BandwidthTable, copy_movers, measure
from kvstore.plan.ways import Mover, Way

_TABLES = 2
_OWN_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: sizes of pieces, bytes a timing moves, timings."""

    sizes: Sequence[int] = SIZES
    total_bytes: int = TOTAL_BYTES
    repeats: int = REPEATS


SMALL = Effort((4096, 16 << 10, 64 << 10), 128 << 10, 3)
"""For a simulated device, whose kernels run at some MB/s."""


def effort_for(device: Device) -> Effort:
    """As much as takes some seconds."""
    return Effort() if device.facts.kind == "cuda" else SMALL


def measure_block_counts(device: Device, effort: Effort) -> dict[int, float]:
    """GB/s of small pieces by a kernel's number of thread blocks; empty where kernels can't be had. Blocks."""
    if _kernels_missing(device):
        return {}
    piece_bytes = min(effort.sizes)
    with KernelCopies(device, effort.total_bytes // piece_bytes, _TABLES) as kernels:
        return measure_blocks(device, kernels, piece_bytes, effort.total_bytes, effort.repeats)


def measure_ways(device: Device, effort: Effort, blocks: int = COPY_BLOCKS) -> BandwidthTable:
    """The table of a device by all ways; those with kernels are absent where kernels can't be had. Blocks.

    ``blocks``: with so many thread blocks a kernel stages.
    """
    absent = {way: why for way in (Way.KERNEL, Way.ZERO_COPY) if (why := _kernels_missing(device))}
    with _movers(device, effort, blocks if not absent else 0) as movers:
        return measure(
            device, movers, sizes=effort.sizes, total_bytes=effort.total_bytes, repeats=effort.repeats, absent=absent
        )


def measure_own_gb_per_s(device: Device, effort: Effort) -> float:
    """How fast the device reads its own memory: twice what a copy inside of it reaches, which reads and writes."""
    n_bytes = (
        min(_OWN_BYTES, device.facts.total_bytes // 8) if effort.total_bytes >= TOTAL_BYTES else effort.total_bytes
    )
    stream, memory = device.stream(), device.malloc(2 * n_bytes)
    try:
        device.fill(memory + n_bytes, 1, n_bytes, stream)
        device.sync_stream(stream)
        seconds = []
        for _ in range(effort.repeats + 1):
            begun_s = time.perf_counter()
            device.copy(memory, memory + n_bytes, n_bytes, stream)
            device.sync_stream(stream)
            seconds.append(time.perf_counter() - begun_s)
    finally:
        device.free(memory)
        device.free_stream(stream)
    return 2 * n_bytes / float(np.median(seconds[1:])) / 1e9


def figures(table: BandwidthTable) -> list[dict[str, Any]]:
    """One row for each way, direction and size: GB/s, and the share of the best that was measured that way round."""
    return [
        {
            "direction": str(direction),
            "way": str(way),
            "piece_bytes": size,
            "gb_per_s": rate,
            "share_of_link": rate / table.link_gb_per_s(direction),
        }
        for (direction, way), curve in table.curves.items()
        for size, rate in zip(curve.piece_bytes, curve.measured_gb_per_s, strict=True)
    ]


def _kernels_missing(device: Device) -> str:
    """Why kernels can't be had, or empty: tried with one that copies 16 bytes."""
    stream = device.stream()
    memory = device.malloc(32)
    try:
        with KernelCopies(device, 1, 1) as kernels:
            device.fill(memory, 1, 32, stream)
            to, come_from = (np.array([address], np.uint64) for address in (memory, memory + 16))
            kernels.copy(to, come_from, np.array([16], np.uint64), stream, blocks=1)
            device.sync_stream(stream)
    except DeviceError as error:
        return str(error)
    finally:
        device.free(memory)
        device.free_stream(stream)
    return ""


@contextmanager
def _movers(device: Device, effort: Effort, blocks: int) -> Iterator[dict[Way, Mover]]:
    """Without kernels if these have no blocks."""
    found = copy_movers(device)
    with KernelCopies(device, effort.total_bytes // min(effort.sizes), _TABLES) as kernels:
        if blocks:
            staged = partial(move_pieces, kernels, blocks=blocks)
            found |= {Way.KERNEL: staged, Way.ZERO_COPY: partial(read_in_place, kernels)}
        yield found
