"""The text formats: what the reference implementation reads from them is what was written."""

from __future__ import annotations

import math
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from kvstore.http.exports import COUNTER, GAUGE
from kvstore.http.text_format import HISTOGRAM, INFO, Family, labelled, number, write

AWKWARD = 'a "quote", a \\ and\na line'
FAMILIES = [
    Family("one", COUNTER, AWKWARD, [(labelled("one_total", {"why": AWKWARD}), 3), ("one_total", 1e20)]),
    Family("two", GAUGE, "Second.", [("two", -0.25)]),
    Family("three", INFO, "Third.", [(labelled("three_info", {"version": "1", "note": AWKWARD}), 1.0)]),
    Family(
        "four", HISTOGRAM, "Fourth.",
        [(labelled("four_bucket", {"le": number(bound)}), n) for bound, n in ((2e-05, 1), (math.inf, 2))]
        + [("four_count", 2), ("four_sum", 7.5)],
    ),
]  # fmt: skip


@pytest.mark.parametrize("openmetrics", [False, True])
def test_what_is_read_is_what_was_written(openmetrics: bool) -> None:
    text = write(FAMILIES, openmetrics=openmetrics).decode()
    read: dict[str, Any] = {family.name: family for family in (parse_openmetrics if openmetrics else parse)(text)}
    samples = {
        (sample.name, *sample.labels.items()): sample.value for family in read.values() for sample in family.samples
    }
    assert samples == {
        ("one_total", ("why", AWKWARD)): 3,
        ("one_total",): 1e20,
        ("two",): -0.25,
        ("three_info", ("version", "1"), ("note", AWKWARD)): 1,
        ("four_bucket", ("le", "2e-05")): 1,
        ("four_bucket", ("le", "+Inf")): 2,
        ("four_count",): 2,
        ("four_sum",): 7.5,
    }
    info = "three" if openmetrics else "three_info"
    assert {name: family.type for name, family in read.items()} == {
        "one": "counter", "two": "gauge", info: "info" if openmetrics else "gauge", "four": "histogram",
    }  # fmt: skip
    assert read["one"].documentation == AWKWARD
    assert text.endswith("# EOF\n") == openmetrics


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (True, "1.0"), (3, "3.0")]
)
def test_numbers_are_written_as_both_formats_have_them(value: float, text: str) -> None:
    assert number(value) == text
