"""The hazard model learns rates that episodes were drawn from, and what blocks are worth follows from it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ages import EDGES_S, N_AGES, WIDTHS_S, age_buckets, time_within
from kvstore.prefix_index.policies.hazard_features import INPUT, N_FEATURES, N_VALUES, NEW
from kvstore.prefix_index.policies.hazard_model import Episodes, Model, first_model, fit
from kvstore.prefix_index.policies.hazard_worth import worth_table

Floats = NDArray[np.float64]


def episodes(uses_s: Floats, seen_until_s: Floats, values: NDArray[np.int64] | None = None) -> Episodes:
    """Runs that are used at ``uses_s``, if that is before they are seen no more. ``values``: of one feature."""
    n = len(uses_s)
    features = np.zeros(n, np.uint64) if values is None else values.astype(np.uint64) << np.uint64(4 * INPUT)
    return Episodes(
        np.full(n, NEW, np.uint8), features, np.minimum(uses_s, seen_until_s), np.full(n, 8.0),
        uses_s <= seen_until_s,
    )  # fmt: skip


def learnt(seen: Episodes) -> Model:
    model = first_model()
    for _ in range(6):
        model = fit(model, seen)
    return model


def rate_between(model: Model, first_s: float, last_s: float, value: int = 0) -> float:
    """The mean rate over ages of runs with this value of INPUT."""
    thetas = [sums[0] for sums in model.thetas(np.array([value << 4 * INPUT], np.uint64))]
    rates = model.rates[NEW] * np.exp(np.where(np.arange(N_AGES) <= model.split, thetas[0], thetas[1]))
    at = slice(int(age_buckets(np.array([first_s]))[0]), int(age_buckets(np.array([last_s]))[0]))
    return float((rates[at] * WIDTHS_S[at]).sum() / WIDTHS_S[at].sum())


def test_buckets_hold_every_age_once() -> None:
    ages_s = np.concatenate((EDGES_S[:-1] * 1.0001, EDGES_S[1:] * 0.9999, [-1.0, 1e9]))
    buckets = age_buckets(ages_s)
    assert buckets.tolist() == [*range(N_AGES), *range(N_AGES), 0, N_AGES - 1]
    assert ((time_within(ages_s, buckets) >= 0) & (time_within(ages_s, buckets) <= WIDTHS_S[buckets])).all()


def test_what_was_seen_for_a_while_without_use_lowers_the_rate() -> None:
    """Uses come at 1/1000 a second, most runs are seen for 100 s only. Who takes the uses seen for all that there is
    finds a rate some twenty times too high."""
    dice = np.random.default_rng(1)
    n = 6000
    model = learnt(episodes(dice.exponential(1000.0, n), dice.uniform(50.0, 150.0, n)))
    assert 0.7e-3 < rate_between(model, 10.0, 100.0) < 1.4e-3


def test_a_feature_that_tells_is_learnt() -> None:
    dice = np.random.default_rng(2)
    n = 6000
    values = dice.integers(1, 3, n)
    uses_s = np.where(values == 1, dice.exponential(50.0, n), dice.exponential(2000.0, n))
    model = learnt(episodes(uses_s, np.full(n, 200.0), values))
    rates = [rate_between(model, 10.0, 100.0, value) for value in (1, 2)]
    assert rates[0] > 8 * rates[1]


def test_nothing_seen_changes_nothing() -> None:
    model = first_model()
    none = episodes(np.zeros(0), np.zeros(0))
    assert fit(model, none) is model
    assert fit(model, episodes(np.full(9, 100.0), np.full(9, 50.0))) is model


def test_worth_only_falls_with_age_and_sees_a_rise_that_is_to_come() -> None:
    rates = np.full((first_model().rates.shape), 1e-5)
    soon = int(age_buckets(np.array([60.0]))[0])
    rates[NEW, soon] = 0.05
    logs = worth_table(Model(rates, np.zeros((2, N_FEATURES * N_VALUES)), N_AGES // 2)).logs
    assert (np.diff(logs, axis=3) <= 1e-6).all()
    middle = logs.shape[1] // 2
    new, other = np.exp(logs[NEW, middle, middle]), np.exp(logs[NEW + 1, middle, middle])
    assert new[0] > 100 * other[0], "worth keeping for what comes in a minute"
    assert new[soon + 1] < 2 * other[soon + 1], "not any more once it has passed"
