"""With how many thread blocks a kernel copies over a link: as few as keep it busy, found by measuring."""

from __future__ import annotations

from kvstore.device.copy_kernels import COPY_BLOCKS
from kvstore.device.pinned import PinnedBuffer
from kvstore.device.seam import Device
from kvstore.engine_adapter.gpu.kernel_copies import KernelCopies, measure_pieces

BLOCK_COUNTS = (COPY_BLOCKS, 4, 8, 16, 32)
"""Two keep 128 KiB on their way, which is enough for PCIe 5; chip-to-chip links have more in flight."""
ENOUGH = 0.95
"""Of the best rate: the multiprocessors that more blocks take are the engine's."""


def measure_blocks(
    device: Device, kernels: KernelCopies, piece_bytes: int, total_bytes: int, repeats: int
) -> dict[int, float]:
    """GB/s by number of blocks, of small pieces that a kernel brings from mapped host memory; see ``measure_pieces``.

    ``total_bytes`` are used on either side.
    """
    memory = device.malloc(total_bytes)
    try:
        with PinnedBuffer(device, total_bytes) as host:
            rates = measure_pieces(
                device, kernels, memory, host.device_address, piece_bytes, total_bytes, repeats, BLOCK_COUNTS
            )
    finally:
        device.free(memory)
    return dict(zip(BLOCK_COUNTS, rates, strict=True))


def fewest_blocks(gb_per_s: dict[int, float]) -> int:
    """The fewest blocks that reach nearly what the best do."""
    enough = ENOUGH * max(gb_per_s.values())
    return min(blocks for blocks, rate in gb_per_s.items() if rate >= enough)
