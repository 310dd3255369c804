"""Looking at device memory from tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.device import Device, PinnedBuffer

MIB = 1 << 20


def read_back(device: Device, address: int, size_bytes: int) -> NDArray[np.uint8]:
    """Device memory as it is now, by a stream of its own; uint8 ``[size_bytes]``."""
    stream = device.stream()
    with PinnedBuffer(device, size_bytes) as buffer:
        device.copy(buffer.address, address, size_bytes, stream)
        device.sync_stream(stream)
        device.free_stream(stream)
        return buffer.array.copy()


def write_to(device: Device, address: int, data: NDArray[np.uint8]) -> None:
    """Set device memory, and wait for it."""
    stream = device.stream()
    with PinnedBuffer(device, data.nbytes) as buffer:
        buffer.array[:] = data
        device.copy(address, buffer.address, data.nbytes, stream)
        device.sync_stream(stream)
        device.free_stream(stream)
