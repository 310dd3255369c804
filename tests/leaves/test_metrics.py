"""Counters and histograms."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.metrics import LATENCY_BOUNDS_S, Counters, Histogram, Histograms

BOUNDS = (1.0, 2.0, 5.0)


def test_a_counter_that_was_never_raised_is_zero_and_absent() -> None:
    counters = Counters()
    counters.add("a")
    counters.add("a", 2.5)
    assert counters["a"] == 3.5
    assert counters["b"] == 0
    assert counters.snapshot() == {"a": 3.5}


@given(st.lists(st.floats(0, 10)))
def test_a_histogram_counts_values_up_to_and_with_each_bound(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    held = histogram.snapshot()
    assert held.cumulative() == [sum(value <= bound for value in values) for bound in (*BOUNDS, float("inf"))]
    assert held.n == len(values)
    assert abs(held.total - sum(values)) < 1e-6


def test_a_snapshot_does_not_change_any_more() -> None:
    histograms: Histograms[str] = Histograms(BOUNDS)
    histograms.observe("x", 1.0)
    held = histograms.snapshot()
    histograms.observe("x", 1.0)
    histograms.observe("y", 9.0)
    assert held["x"].n == 1
    assert "y" not in held
    assert histograms.snapshot()["y"].counts == (0, 0, 0, 1)


def test_bounds_of_times_rise() -> None:
    assert list(LATENCY_BOUNDS_S) == sorted(set(LATENCY_BOUNDS_S))


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_stands_for(values: list[float], share: float) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    found = histogram.snapshot().quantile(share)
    meant = sorted(values)[math.ceil(share * len(values)) - 1]
    bucket = bisect_left(BOUNDS, meant)
    low, high = (0.0, *BOUNDS)[bucket], (*BOUNDS, math.inf)[bucket]
    assert low <= found <= high
    assert math.isnan(Histogram(BOUNDS).snapshot().quantile(share))


def test_what_has_come_since() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(BOUNDS[0])
    before = histogram.snapshot()
    histogram.observe(BOUNDS[1])
    now = histogram.snapshot()
    assert now.since(before).counts == (0, 1, *[0] * (len(BOUNDS) - 1))
    assert now.since(before).total == pytest.approx(BOUNDS[1])
    assert now.since(None) == now
    assert before.since(now) == before, "another daemon's: all of it is new"
