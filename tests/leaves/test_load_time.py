"""What moves take is learnt from what they took."""

from __future__ import annotations

import math
import random

import pytest

from kvstore.load_time import ERROR_OF_GUESS, LoadTime

KIB, MIB = 1 << 10, 1 << 20


def took_s(n_bytes: int, start_s: float, bytes_per_s: float) -> float:
    return start_s + n_bytes / bytes_per_s


def test_before_any_move_it_is_the_guess_and_says_so() -> None:
    guess = LoadTime(1e-3, 1e9)
    assert guess.expected_s(0) == 0
    assert guess.expected_s(MIB) == pytest.approx(1e-3 + MIB / 1e9)
    assert guess.error == pytest.approx(ERROR_OF_GUESS)
    assert guess.n_observed == 0


@pytest.mark.parametrize(("start_s", "bytes_per_s"), [(1e-4, 3e9), (2e-2, 1e8), (1e-3, 1e9), (5e-6, 2e10)])
def test_start_and_rate_are_found_from_moves_of_many_sizes(start_s: float, bytes_per_s: float) -> None:
    learnt, dice = LoadTime(1e-3, 1e9), random.Random(1)
    for _ in range(300):
        n_bytes = int(64 * KIB * 2 ** dice.uniform(0, 12))
        learnt.observe(n_bytes, took_s(n_bytes, start_s, bytes_per_s))
    for n_bytes in (64 * KIB, MIB, 16 * MIB, 256 * MIB):
        assert learnt.expected_s(n_bytes) == pytest.approx(took_s(n_bytes, start_s, bytes_per_s), rel=0.1)
    assert learnt.bytes_per_s == pytest.approx(bytes_per_s, rel=0.1)
    assert learnt.error < 1.1


def test_moves_of_one_size_are_expected_right_whatever_they_say_of_others() -> None:
    learnt = LoadTime(1e-3, 1e9)
    for _ in range(20):
        learnt.observe(8 * MIB, 0.080)
    assert learnt.expected_s(8 * MIB) == pytest.approx(0.080, rel=0.05)
    assert learnt.expected_s(16 * MIB) > learnt.expected_s(8 * MIB) > learnt.expected_s(KIB) > 0


def test_a_disk_that_gets_slower_is_noticed_within_some_twenty_moves() -> None:
    learnt = LoadTime(1e-3, 1e9)
    for _ in range(50):
        learnt.observe(32 * MIB, 0.010)
    assert learnt.expected_s(32 * MIB) == pytest.approx(0.010, rel=0.02)
    learnt.observe(32 * MIB, 0.100)
    assert learnt.error > 1.2
    for _ in range(20):
        learnt.observe(32 * MIB, 0.100)
    assert learnt.expected_s(32 * MIB) == pytest.approx(0.100, rel=0.05)


def test_a_stall_counts_as_one_move_and_the_error_says_how_moves_scatter() -> None:
    learnt, dice = LoadTime(1e-3, 1e9), random.Random(2)
    for _ in range(400):
        learnt.observe(MIB, 0.010 * math.exp(dice.gauss(0, 0.5)))
    assert 1.2 < learnt.error < 2.0
    before_s = learnt.expected_s(MIB)
    learnt.observe(MIB, 1000.0)
    assert learnt.expected_s(MIB) < 2 * before_s


@pytest.mark.parametrize("took", [-1.0, math.nan, math.inf])
def test_times_that_can_not_be_teach_nothing(took: float) -> None:
    learnt = LoadTime(1e-3, 1e9)
    learnt.observe(MIB, took)
    learnt.observe(0, 1.0)
    assert learnt.n_observed == 0
    assert learnt.expected_s(MIB) == pytest.approx(1e-3 + MIB / 1e9)


def test_whatever_comes_expectations_stay_positive_and_finite() -> None:
    learnt, dice = LoadTime(1e-3, 1e9), random.Random(3)
    for _ in range(2000):
        learnt.observe(dice.choice([1, KIB, MIB, 1 << 40]), dice.choice([0.0, 1e-9, 1e-3, 1e6]))
        for n_bytes in (1, MIB, 1 << 40):
            assert 0 < learnt.expected_s(n_bytes) < math.inf
        assert 1 <= learnt.error < math.inf
