"""Which route copies take: by their sizes, by what was measured, by what lately happened."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.engine_adapter.gpu.block_counts import BLOCK_COUNTS, fewest_blocks
from kvstore.engine_adapter.gpu.choice import Choice, Route, measure, unmeasured
from kvstore.engine_adapter.moving import Copy
from kvstore.plan.bandwidth import BandwidthTable, make_curve
from kvstore.plan.calibration import Calibration
from kvstore.plan.ways import Direction, Way
from tests.engine_adapter.gpu.scene import Scene, one, region, runs_of

MIB = 1 << 20


@pytest.mark.parametrize("direction", list(Direction))
def test_large_runs_go_directly_small_ones_by_kernel_or_staged(direction: Direction) -> None:
    choice = unmeasured()
    assert choice.routes(direction, 64 * MIB, 64, 64)[0] is Route.DIRECT
    assert choice.routes(direction, 64 * MIB, 16384, 16384)[0] is Route.KERNEL
    # Small runs of large spans: the copy engine moves those, and the device takes them apart.
    assert choice.routes(direction, 64 * MIB, 1 << 18, 64)[0] is Route.STAGED


def test_what_is_observed_changes_the_route() -> None:
    clock = ManualClock()
    curves = {
        (direction, way): make_curve((4096, MIB), rates)
        for direction in Direction
        for way, rates in ((Way.BATCH, (10.0, 20.0)), (Way.KERNEL, (12.0, 18.0)))
    }
    choice = Choice(Calibration(BandwidthTable(curves), clock), only=(Route.DIRECT, Route.KERNEL))
    assert choice.routes(Direction.LOAD, MIB, 1, 1)[0] is Route.DIRECT
    for _ in range(20):
        choice.observe(Route.DIRECT, Direction.LOAD, MIB, 1, MIB / 5e9)
        choice.observe(Route.KERNEL, Direction.LOAD, MIB, 1, MIB / 18e9)
    assert choice.routes(Direction.LOAD, MIB, 1, 1)[0] is Route.KERNEL
    assert choice.routes(Direction.STORE, MIB, 1, 1)[0] is Route.DIRECT, "the other direction is another link"


def test_a_device_can_be_measured(on_device: Scene) -> None:
    choice = measure(on_device.device, sizes=(4096, 16384), total_bytes=32768, repeats=1)
    assert choice.copy_blocks in BLOCK_COUNTS
    for direction in Direction:
        for route in Route:
            assert 0 < choice.expected_s(route, direction, 32768, 8, 2) < 60
    before = on_device.device._memory._used_bytes
    assert before == 0, "nothing is left behind"


def test_as_few_blocks_as_keep_the_link_busy() -> None:
    assert fewest_blocks({2: 24.0, 4: 25.0, 8: 24.9}) == 2
    assert fewest_blocks({2: 60.0, 4: 118.0, 8: 230.0, 16: 330.0, 32: 340.0}) == 16
    assert fewest_blocks({2: 60.0, 32: 50.0}) == 2


@pytest.mark.parametrize("blocks", [2, 16])
def test_kernels_copy_with_as_many_blocks_as_were_chosen(
    on_device: Scene, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    grids: list[int] = []
    launch = on_device.device.launch

    def noted(kernel: str, grid: tuple[int, int, int], *more: object) -> None:
        grids.append(grid[0])
        launch(kernel, grid, *more)

    monkeypatch.setattr(on_device.device, "launch", noted)
    mapping = on_device.registered(region(4 * MIB))
    there = on_device.device.malloc(4 * MIB)
    costs = unmeasured().calibration
    moves = on_device.reader(Choice(costs, only=(Route.KERNEL,), copy_blocks=blocks)).begin()
    offsets = np.arange(16) << 18
    moves.copy([Copy(runs_of(offsets, offsets, [1 << 18] * 16), there, mapping.address)])
    moves.settle()
    assert grids
    assert max(grids) == blocks


def test_reads_tell_the_calibration_what_they_took(on_device: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(Calibration, "observe", lambda _, *facts: seen.append(facts))
    mapping = on_device.registered(region(MIB))
    there = on_device.device.malloc(MIB)
    reader = on_device.reader(Route.DIRECT)

    def read(after: int | None = None) -> None:
        moves = reader.begin()
        moves.after(after)
        offsets = np.arange(4) << 18
        moves.copy([Copy(runs_of(offsets, offsets, [1 << 18] * 4), there, mapping.address)])
        moves.settle()

    read()
    ((direction, way, piece_bytes, n, took_s),) = seen
    assert (direction, way, piece_bytes, n) == (Direction.LOAD, Way.BATCH, 1 << 18, 4)
    assert isinstance(took_s, float)
    assert took_s > 0
    # What had to wait for the engine says nothing about the link; nor does one of two that share a lane.
    engine = on_device.device.stream()
    pages = on_device.upload(np.zeros(8192, np.uint8))
    on_device.device.copy(pages, pages + 4096, 4096, engine)
    on_device.device.copy(pages, pages + 4096, 4096, engine)
    read(engine)
    both = [reader.begin(), reader.begin()]
    for moves in both:
        moves.copy(one(there, mapping.address, 4096))
    for moves in both:
        moves.settle()
    assert len(seen) == 1
