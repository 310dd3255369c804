"""Curves of rates, and measuring them over a device."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import BadInputError, IntegrityError
from kvstore.plan.bandwidth import BandwidthTable, copy_movers, make_curve, measure
from kvstore.plan.ways import Direction, Pieces, Way

KIB, MIB = 1 << 10, 1 << 20

measured_rates = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=13)
sizes = st.floats(1, 1e9)


def sizes_for(rates: list[float]) -> list[int]:
    return [4096 << step for step in range(len(rates))]


@given(measured_rates, sizes, st.floats(1.0, 1e3))
def test_a_rate_never_falls_with_the_size_of_a_piece(rates: list[float], size: float, larger: float) -> None:
    curve = make_curve(sizes_for(rates), rates)
    assert all(low <= high for low, high in itertools.pairwise(curve.gb_per_s))
    assert curve.rate(size) <= curve.rate(size * larger) * (1 + 1e-9)


@given(measured_rates)
def test_smoothing_keeps_what_never_falls_and_stays_within_what_was_measured(rates: list[float]) -> None:
    rising = sorted(rates)
    assert make_curve(sizes_for(rising), rising).gb_per_s == pytest.approx(rising)
    smooth = make_curve(sizes_for(rates), rates).gb_per_s
    assert min(rates) * (1 - 1e-9) <= smooth[0] <= smooth[-1] <= max(rates) * (1 + 1e-9)
    assert math.prod(smooth) == pytest.approx(math.prod(rates), rel=1e-6)


def test_a_dip_is_levelled_with_its_neighbours() -> None:
    curve = make_curve([4096, 8192, 16384], [2.0, 8.0, 2.0])
    assert curve.gb_per_s == pytest.approx([2.0, 4.0, 4.0])
    assert curve.measured_gb_per_s == (2.0, 8.0, 2.0)


def test_between_sizes_and_beyond_them() -> None:
    curve = make_curve([4 * KIB, 64 * KIB], [1.0, 4.0], start_s=1e-5)
    assert curve.rate(4 * KIB) == pytest.approx(1.0)
    assert curve.rate(16 * KIB) == pytest.approx(2.0)
    assert curve.rate(MIB) == pytest.approx(4.0)
    assert curve.rate(KIB) == pytest.approx(0.25), "a small piece costs as much as the smallest that was measured"
    assert curve.expected_s(64 * KIB, 10) == pytest.approx(1e-5 + 640 * KIB / 4e9)
    with pytest.raises(BadInputError, match="positive"):
        curve.rate(0)


@pytest.mark.parametrize(
    ("piece_bytes", "rates", "start_s"),
    [
        ([], [], 0.0),
        ([4096], [1.0, 2.0], 0.0),
        ([4096, 4096], [1.0, 2.0], 0.0),
        ([8192, 4096], [1.0, 2.0], 0.0),
        ([4096], [0.0], 0.0),
        ([4096], [math.inf], 0.0),
        ([4096], [math.nan], 0.0),
        ([4096], [1.0], -1.0),
        ([4096], [1.0], math.nan),
    ],
)
def test_rates_that_cannot_be_are_refused(piece_bytes: list[int], rates: list[float], start_s: float) -> None:
    with pytest.raises(BadInputError):
        make_curve(piece_bytes, rates, start_s)


def test_a_table_comes_back_from_json() -> None:
    curve = make_curve([4096, 8192], [2.0, 1.0], 1e-6)
    table = BandwidthTable({(Direction.LOAD, Way.BATCH): curve}, {(Direction.LOAD, Way.KERNEL): "no compiler"})
    again = BandwidthTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again.curves == table.curves
    assert again.absent == table.absent
    assert again.link_gb_per_s(Direction.LOAD) == 2.0
    assert again.link_gb_per_s(Direction.STORE) == 0
    wrongs: list[dict[str, object]] = [
        {},
        {"curves": [{}]},
        {"curves": [{"direction": "up", "way": "copy"}]},
        {"curves": 3},
    ]
    for wrong in wrongs:
        with pytest.raises(BadInputError, match="measure again"):
            BandwidthTable.from_dict(wrong)


def test_every_size_way_and_direction_is_measured_and_memory_given_back() -> None:
    device = SimulatedDevice(total_bytes=4 * MIB)
    table = measure(
        device, copy_movers(device), sizes=(4 * KIB, 64 * KIB, MIB), total_bytes=2 * MIB, repeats=2,
        absent={Way.KERNEL: "not asked for"},
    )  # fmt: skip
    assert set(table.curves) == {(direction, way) for direction in Direction for way in (Way.COPY, Way.BATCH)}
    assert table.absent == {(direction, Way.KERNEL): "not asked for" for direction in Direction}
    for curve in table.curves.values():
        assert curve.piece_bytes == (4 * KIB, 64 * KIB, MIB)
        assert curve.start_s >= 0
    # All of it can be had again.
    device.free(device.malloc(4 * MIB))
    device.close()


def test_seconds_and_bytes_make_the_rate() -> None:
    """Every timing takes 2 s of this timer's time."""
    ticks = itertools.count(0.0, 2.0)
    device = SimulatedDevice(total_bytes=MIB)
    table = measure(
        device, copy_movers(device), sizes=(64 * KIB,), total_bytes=MIB, repeats=3, timer=lambda: next(ticks)
    )
    curve = table.curves[Direction.LOAD, Way.BATCH]
    assert curve.measured_gb_per_s == pytest.approx((MIB / 2 / 1e9,))
    assert curve.start_s == pytest.approx(2 - 64 * KIB / (MIB / 2))
    device.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_way_that_moves_wrong_bytes_is_caught(direction: Direction) -> None:
    device = SimulatedDevice(total_bytes=MIB)
    right = copy_movers(device)[Way.BATCH]

    def off_by_a_piece(pieces: Pieces, stream: int) -> None:
        if pieces.direction is direction:
            rolled = np.roll(pieces.host, 1)
            pieces = Pieces(pieces.direction, rolled, pieces.mapped, pieces.device, pieces.piece_bytes)
        right(pieces, stream)

    with pytest.raises(IntegrityError, match=f"{direction}.*came wrong"):
        measure(device, {Way.BATCH: off_by_a_piece}, sizes=(4 * KIB,), total_bytes=64 * KIB, repeats=1)
    device.close()


def test_a_way_that_moves_nothing_is_caught() -> None:
    device = SimulatedDevice(total_bytes=MIB)
    with pytest.raises(IntegrityError, match="came wrong"):
        measure(device, {Way.KERNEL: lambda *_: None}, sizes=(4 * KIB,), total_bytes=64 * KIB, repeats=1)
    device.close()


def test_pieces_must_fit() -> None:
    device = SimulatedDevice(total_bytes=MIB)
    with pytest.raises(BadInputError, match="need at least as much"):
        measure(device, copy_movers(device), sizes=(MIB,), total_bytes=4096)
    device.close()
