"""With how many thread blocks a kernel copies over a link: as few as keep it busy, found by measuring."""

from __future__ import annotations

import time

import numpy as np

from kvstore.device.copy_kernels import COPY_BLOCKS
from kvstore.device.pinned import PinnedBuffer
from kvstore.device.seam import Device
from kvstore.engine_adapter.gpu.kernel_copies import KernelCopies

BLOCK_COUNTS = (COPY_BLOCKS, 4, 8, 16, 32)
"""Two keep 128 KiB on their way, which is enough for PCIe 5; chip-to-chip links have more in flight."""
ENOUGH = 0.95
"""Of the best rate: the multiprocessors that more blocks take are the engine's."""


def measure_blocks(
    device: Device, kernels: KernelCopies, piece_bytes: int, total_bytes: int, repeats: int
) -> dict[int, float]:
    """GB/s by number of blocks, of small pieces that a kernel brings from mapped host memory. Blocks meanwhile.

    Medians; the counts take turns. ``total_bytes`` are used on either side.
    """
    n = total_bytes // piece_bytes
    sizes = np.full(n, piece_bytes, np.uint64)
    in_order = np.arange(n, dtype=np.uint64) * np.uint64(piece_bytes)
    mixed = np.random.default_rng(0).permutation(in_order)
    stream = device.stream()
    try:
        memory = device.malloc(total_bytes)
        try:
            with PinnedBuffer(device, total_bytes) as host:
                to, come_from = np.uint64(memory) + in_order, np.uint64(host.device_address) + mixed
                seconds: dict[int, list[float]] = {blocks: [] for blocks in BLOCK_COUNTS}
                for _ in range(repeats + 1):
                    for blocks, took_s in seconds.items():
                        begun_s = time.perf_counter()
                        kernels.copy(to, come_from, sizes, stream, blocks=blocks)
                        device.sync_stream(stream)
                        took_s.append(time.perf_counter() - begun_s)
        finally:
            device.free(memory)
    finally:
        device.free_stream(stream)
    return {blocks: n * piece_bytes / float(np.median(took_s[1:])) / 1e9 for blocks, took_s in seconds.items()}


def fewest_blocks(gb_per_s: dict[int, float]) -> int:
    """The fewest blocks that reach nearly what the best do."""
    enough = ENOUGH * max(gb_per_s.values())
    return min(blocks for blocks, rate in gb_per_s.items() if rate >= enough)
