"""What ``kvstore top`` makes of two looks at a daemon, and how ``kvstore warm`` keeps to a rate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvstore.cli.top import RATES, Look, bar, hit_ratio, looks, rates, view_dict
from kvstore.cli.warm import Pace
from kvstore.errors import UnavailableError


def look(at_s: float, epoch: str = "1", **counters: float) -> Look:
    gauges: dict[str, float | str] = {
        "epoch": epoch, "sessions": 1.0, "leases": 0.0, "blocks": 0.0, "loop_lag_s_max": 0.0,
        "dram_used_bytes": 1.0, "dram_capacity_bytes": 2.0,
    }  # fmt: skip
    return Look(at_s, {**gauges, **counters}, [])


def test_rates_are_what_was_counted_between_two_looks() -> None:
    before = look(10.0, lookups=5.0, lookup_blocks=100.0, hit_blocks=50.0)
    now = look(12.0, lookups=9.0, lookup_blocks=140.0, hit_blocks=80.0, evicted_blocks=6.0)
    per_s = rates(before, now)
    assert (per_s["lookups_per_s"], per_s["hit_blocks_per_s"], per_s["evicted_blocks_per_s"]) == (2.0, 15.0, 3.0)
    assert per_s.keys() == RATES.keys()
    assert hit_ratio(before, now) == 0.75
    assert hit_ratio(now, now) is None


def test_after_a_restart_the_new_daemon_s_counts_count() -> None:
    per_s = rates(look(10.0, lookups=500.0), look(12.0, epoch="2", lookups=4.0))
    assert per_s["lookups_per_s"] == 2.0


def test_one_line_of_json_has_the_tiers_there_are() -> None:
    line = view_dict(look(1.0), look(2.0))
    assert line["tiers"] == {"dram": {"used_bytes": 1.0, "capacity_bytes": 2.0}}
    assert (line["interval_s"], line["nvme_health"], line["queues"]) == (1.0, None, {})


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "░░░░"), (0.01, "█░░░"), (0.5, "██░░"), (1.0, "████"), (1.3, "████")]
)
def test_a_bar_shows_how_full_a_tier_is(share: float, text: str) -> None:
    assert bar(share, 4) == text


def test_a_daemon_that_is_away_for_a_moment_is_waited_for() -> None:
    answers: Iterator[Look | Exception] = iter([look(1.0), UnavailableError("away"), look(3.0), look(4.0)])
    slept: list[float] = []

    def ask() -> Look:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    pairs = [(a.at_s, b.at_s) for a, b in itertools.islice(looks(ask, 0.5, slept.append), 2)]
    assert pairs == [(1.0, 3.0), (3.0, 4.0)]
    assert slept == [0.5] * 3


def test_a_daemon_that_was_never_there_is_an_error() -> None:
    def ask() -> Look:
        raise UnavailableError("nobody")

    with pytest.raises(UnavailableError):
        next(looks(ask, 0.5, lambda _: None))


def test_a_rate_is_kept_on_average() -> None:
    now_s = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    pace = Pace(1000.0, lambda: now_s, sleep)
    for n_bytes in (500, 0, 1500, 2000):
        pace.spend(n_bytes)
    assert now_s == pytest.approx(104.0)
    now_s += 50.0  # idle time is not saved up
    pace.spend(1000)
    assert now_s == pytest.approx(155.0)


def test_without_a_rate_nothing_waits() -> None:
    Pace(0, lambda: 0.0, lambda _: pytest.fail("slept")).spend(1 << 40)
