"""Host memory of one's own for copies."""

from __future__ import annotations

import mmap

import pytest

from kvstore.device import Device, PinnedBuffer
from kvstore.errors import BadInputError


def test_a_buffer_is_whole_pages_of_zeros(device: Device) -> None:
    with PinnedBuffer(device, mmap.PAGESIZE + 1) as buffer:
        assert buffer.array.tolist() == [0] * (mmap.PAGESIZE + 1)
        assert buffer.address == buffer.array.ctypes.data
        assert buffer.address % mmap.PAGESIZE == 0
        assert buffer.size_bytes == buffer.array.nbytes
        with pytest.raises(BadInputError):
            device.host_register(buffer.address + mmap.PAGESIZE, mmap.PAGESIZE)


def test_a_closed_buffer_is_not_registered_any_more(device: Device) -> None:
    buffer = PinnedBuffer(device, 10)
    buffer.close()
    buffer.close()
    with pytest.raises(BadInputError):
        device.host_unregister(buffer.address)


def test_a_buffer_of_nothing_is_refused(device: Device) -> None:
    for size_bytes in (0, -1):
        with pytest.raises(BadInputError, match="size_bytes"):
            PinnedBuffer(device, size_bytes)
