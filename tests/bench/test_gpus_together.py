"""Devices that load at once."""

from __future__ import annotations

import threading

import pytest

from kvstore.bench.gpus_together import Together, measure_together
from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import BadInputError


def test_devices_that_share_their_link_are_found_out() -> None:
    """These two take turns at one lock: at once they get nothing done that they would not one by one."""
    link = threading.Lock()

    class Sharing(SimulatedDevice):
        def sync_stream(self, stream: int) -> None:
            with link:
                super().sync_stream(stream)

    devices = [Sharing(number, total_bytes=32 << 20) for number in range(2)]
    shared = measure_together(devices, 16 << 20, repeats=5)
    assert shared.share < 0.75
    assert "2 GPUs that load at once" in shared.note
    for device in devices:
        device.free(device.malloc(32 << 20))
        device.close()


def test_only_what_is_left_of_the_sum_counts() -> None:
    assert Together((20.0, 20.0), 40.0).note == ""
    assert Together((20.0, 20.0), 20.0).share == pytest.approx(0.5)
    assert "50%" in Together((20.0, 20.0), 20.0).note


def test_one_device_is_never_together() -> None:
    with pytest.raises(BadInputError, match="two or more"):
        measure_together([SimulatedDevice(total_bytes=1 << 20)], 4096, 1)
