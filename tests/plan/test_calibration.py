"""Rates that follow what real transfers take."""

from __future__ import annotations

import math
import random

import pytest

from kvstore.clock import ManualClock
from kvstore.plan.bandwidth import BandwidthTable, make_curve
from kvstore.plan.calibration import CONTENDED_OBSERVED, HALF_LIFE_S, Calibration
from kvstore.plan.ways import Direction, Way

KIB, MIB = 1 << 10, 1 << 20
LOAD, STORE = Direction.LOAD, Direction.STORE


def calibration(clock: ManualClock) -> Calibration:
    table = BandwidthTable(
        {
            (LOAD, Way.BATCH): make_curve([16 * KIB, MIB], [10.0, 40.0], 1e-5),
            (LOAD, Way.KERNEL): make_curve([16 * KIB, MIB], [30.0, 30.0], 1e-5),
            (STORE, Way.BATCH): make_curve([16 * KIB, MIB], [10.0, 40.0], 1e-5),
        }
    )
    return Calibration(table, clock)


def feed(rates: Calibration, clock: ManualClock, way: Way, share: float, n: int, every_s: float = 0.01) -> None:
    """``n`` transfers at a share of the measured rate."""
    dice = random.Random(5)
    for _ in range(n):
        size, pieces = dice.choice([16 * KIB, 128 * KIB, MIB]), dice.randrange(8, 64)
        curve = rates.table.curve(LOAD, way)
        assert curve is not None
        rates.observe(LOAD, way, size, pieces, curve.expected_s(size, pieces) / share)
        clock.advance(every_s)


def test_before_anything_was_observed_it_is_the_table() -> None:
    rates = calibration(ManualClock())
    assert rates.rate(LOAD, Way.BATCH, MIB) == pytest.approx(40.0)
    assert rates.expected_s(LOAD, Way.BATCH, MIB, 10) == pytest.approx(1e-5 + 10 * MIB / 40e9)
    assert rates.expected_s(LOAD, Way.BATCH, MIB, 0) == 0.0
    assert rates.contention(LOAD) is None


def test_a_way_that_was_not_measured_has_no_rate_and_takes_for_ever() -> None:
    rates = calibration(ManualClock())
    assert rates.rate(STORE, Way.KERNEL, MIB) == 0.0
    assert rates.expected_s(STORE, Way.KERNEL, MIB, 1) == math.inf
    rates.observe(STORE, Way.KERNEL, MIB, 1, 1.0)
    assert not rates.knows(STORE, Way.KERNEL)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.5])
def test_rates_become_what_transfers_reach(share: float) -> None:
    clock = ManualClock()
    rates = calibration(clock)
    feed(rates, clock, Way.BATCH, share, 60)
    assert rates.rate(LOAD, Way.BATCH, MIB) == pytest.approx(40.0 * share, rel=0.05)
    assert rates.rate(STORE, Way.BATCH, MIB) == pytest.approx(40.0), "the other direction is another matter"


def test_a_slow_link_makes_every_way_slow_and_is_told() -> None:
    clock = ManualClock()
    rates = calibration(clock)
    for _ in range(40):
        feed(rates, clock, Way.BATCH, 0.4, 1)
        feed(rates, clock, Way.KERNEL, 0.4, 1)
    assert rates.rate(LOAD, Way.KERNEL, MIB) == pytest.approx(12.0, rel=0.1)
    assert rates.rate(LOAD, Way.BATCH, MIB) == pytest.approx(16.0, rel=0.1)
    slow = rates.contention(LOAD)
    assert slow is not None
    assert slow.ratio == pytest.approx(0.4, rel=0.15)
    assert f"{slow.ratio:.0%}" in slow.reason
    assert rates.contention(STORE) is None


def test_one_way_that_the_table_flatters_is_no_contention_once_another_is_seen_to_be_fast() -> None:
    clock = ManualClock()
    rates = calibration(clock)
    for _ in range(60):
        feed(rates, clock, Way.BATCH, 0.3, 1)
        feed(rates, clock, Way.KERNEL, 1.0, 1)
    assert rates.contention(LOAD) is None
    assert rates.rate(LOAD, Way.BATCH, MIB) == pytest.approx(12.0, rel=0.1)
    assert rates.rate(LOAD, Way.KERNEL, MIB) == pytest.approx(30.0, rel=0.1)


def test_the_only_way_in_use_being_slow_is_contention() -> None:
    clock = ManualClock()
    rates = calibration(clock)
    feed(rates, clock, Way.BATCH, 0.4, 60)
    slow = rates.contention(LOAD)
    assert slow is not None
    assert slow.ratio == pytest.approx(0.4, rel=0.15)


def test_few_transfers_are_no_contention() -> None:
    clock = ManualClock()
    rates = calibration(clock)
    feed(rates, clock, Way.BATCH, 0.01, int(CONTENDED_OBSERVED) - 1)
    assert rates.contention(LOAD) is None


def test_what_was_observed_is_forgotten_so_that_a_bad_way_is_tried_again() -> None:
    clock = ManualClock()
    rates = calibration(clock)
    feed(rates, clock, Way.BATCH, 0.25, 60)
    clock.advance(HALF_LIFE_S)
    assert rates.rate(LOAD, Way.BATCH, MIB) == pytest.approx(20.0, rel=0.05)
    clock.advance(20 * HALF_LIFE_S)
    assert rates.rate(LOAD, Way.BATCH, MIB) == pytest.approx(40.0, rel=0.01)
    assert rates.contention(LOAD) is None


def test_one_stall_does_not_pass_for_the_link() -> None:
    clock = ManualClock()
    rates = calibration(clock)
    feed(rates, clock, Way.BATCH, 1.0, 20)
    rates.observe(LOAD, Way.BATCH, MIB, 10, 3600.0)
    assert rates.rate(LOAD, Way.BATCH, MIB) > 40.0 * 0.3
    feed(rates, clock, Way.BATCH, 1.0, 20)
    assert rates.rate(LOAD, Way.BATCH, MIB) == pytest.approx(40.0, rel=0.1)


@pytest.mark.parametrize("took_s", [0.0, -1.0, math.nan, math.inf])
def test_times_that_say_nothing_are_ignored(took_s: float) -> None:
    rates = calibration(ManualClock())
    rates.observe(LOAD, Way.BATCH, MIB, 10, took_s)
    rates.observe(LOAD, Way.BATCH, MIB, 0, 1.0)
    rates.observe(LOAD, Way.BATCH, 0, 10, 1.0)
    assert rates.rate(LOAD, Way.BATCH, MIB) == pytest.approx(40.0)
