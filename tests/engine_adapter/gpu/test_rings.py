"""Bounded memory that could not be had as a whole: nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.device.simulated import SimulatedDevice
from kvstore.engine_adapter.gpu.kernel_copies import KernelCopies
from kvstore.engine_adapter.gpu.rings import DeviceRing, HostRing, Ring
from kvstore.errors import DeviceError, DeviceMemoryError
from tests.engine_adapter.gpu.scene import Scene, scene

TOTAL_BYTES = 1 << 20


def left(device: SimulatedDevice) -> tuple[int, int]:
    """Ranges that the device knows of, and events."""
    return len(device._memory._sorted), len(device._streams._events)


def test_tables_of_kernels_can_be_had_later_on_a_device_that_was_full() -> None:
    with scene(total_bytes=TOTAL_BYTES) as on_device:
        device = on_device.device
        kernels = KernelCopies(device, 4096, 2)
        hog = device.malloc(TOTAL_BYTES - 4096)
        before = left(device)
        for _ in range(3):
            with pytest.raises(DeviceMemoryError):
                kernels.open()
            assert left(device) == before
        device.free(hog)
        values = np.arange(4096, dtype=np.uint16).view(np.uint8)
        there, stream = on_device.upload(np.zeros(8192, np.uint8)), device.stream()
        to, come_from, sizes = np.array([[there], [on_device.upload(values)], [8192]], np.uint64)
        kernels.copy(to, come_from, sizes, stream, blocks=2)
        device.sync_stream(stream)
        assert (on_device.download(there, 8192) == values).all()
        kernels.close()


@pytest.mark.parametrize("kind", [DeviceRing, HostRing])
def test_a_ring_whose_events_can_not_be_had_leaves_nothing(
    on_device: Scene, monkeypatch: pytest.MonkeyPatch, kind: Callable[[SimulatedDevice, int, int], Ring]
) -> None:
    device = on_device.device
    event, made = device.event, list[int]()
    before = left(device)

    def fails() -> int:
        if len(made) == 2:
            raise DeviceError("no more events")
        made.append(event())
        return int(made[-1])

    monkeypatch.setattr(device, "event", fails)
    with pytest.raises(DeviceError, match="no more events"):
        kind(device, 4096, 3)
    assert left(device) == before
