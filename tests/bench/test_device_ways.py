"""All ways of moving bytes, measured over a device."""

from __future__ import annotations

import pytest

from kvstore.bench.device_ways import SMALL, effort_for, figures, measure_own_gb_per_s, measure_ways
from kvstore.device import simulated
from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import DeviceError
from kvstore.plan.ways import Direction, Way


def test_every_way_is_measured_and_compared_with_the_largest_copies() -> None:
    device = SimulatedDevice(total_bytes=1 << 20)
    assert effort_for(device) is SMALL
    table = measure_ways(device, SMALL)
    if table.absent:
        pytest.skip(next(iter(table.absent.values())))
    assert set(table.curves) == {(direction, way) for direction in Direction for way in Way}
    rows = figures(table)
    assert len(rows) == len(Direction) * len(Way) * len(SMALL.sizes)
    for direction in Direction:
        copies = [row for row in rows if row["direction"] == direction and row["way"] in ("copy", "batch")]
        assert max(row["share_of_link"] for row in copies) == pytest.approx(1.0)
        assert max(row["gb_per_s"] for row in copies) == pytest.approx(table.link_gb_per_s(direction))
    assert measure_own_gb_per_s(device, SMALL) > 0
    device.free(device.malloc(1 << 20))
    device.close()


def test_without_kernels_the_copies_are_measured_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise DeviceError("no compiler: install g++")

    monkeypatch.setattr(simulated, "_kernels_on_cpu", none)
    device = SimulatedDevice(total_bytes=1 << 20)
    table = measure_ways(device, SMALL)
    assert {way for _, way in table.curves} == {Way.COPY, Way.BATCH}
    assert table.absent == {
        (direction, way): "no compiler: install g++" for direction in Direction for way in (Way.KERNEL, Way.ZERO_COPY)
    }
    device.close()
