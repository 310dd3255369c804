"""Host memory of one's own for copies."""

from __future__ import annotations

import gc
import mmap

import pytest

from kvstore.device import Device, PinnedBuffer, pinned
from kvstore.errors import BadInputError
from tests.device.memory import read_back


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


def test_a_buffer_that_is_dropped_stays_mapped_as_it_is_registered(device: Device) -> None:
    """Else the device would take for it what is mapped there next."""
    buffer = PinnedBuffer(device, mmap.PAGESIZE)
    address, there = buffer.address, device.malloc(mmap.PAGESIZE)
    buffer.array[:] = 7
    del buffer
    gc.collect()
    stream = device.stream()
    device.copy(there, address, mmap.PAGESIZE, stream)
    device.sync_stream(stream)
    assert set(read_back(device, there, mmap.PAGESIZE).tolist()) == {7}
    device.host_unregister(address)
    pinned._REGISTERED.clear()


def test_a_closed_buffer_is_let_go_of(device: Device) -> None:
    buffer = PinnedBuffer(device, 10)
    assert buffer._memory in pinned._REGISTERED
    buffer.close()
    assert buffer._memory not in pinned._REGISTERED
