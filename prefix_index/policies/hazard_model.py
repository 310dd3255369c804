"""When blocks are used again: a hazard rate over their age, learnt from what became of runs of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ages import (
    MIDDLES_S,
    N_AGES,
    WIDTHS_S,
    Floats,
    Ints,
    age_buckets,
    time_within,
)
from kvstore.prefix_index.policies.hazard_features import (
    N_FEATURES,
    N_STRATA,
    N_VALUES,
    OFFSETS,
    Packed,
    unpacked,
)

_START_RATE, _START_AGE_S = 0.3, 30.0
_FALL_OF_RATE = 1.5
_POOLED_STRENGTH, _STRATUM_STRENGTH, _BETA_STRENGTH = 10.0, 20.0, 50.0
_SWEEPS, _DAMPING, _BETA_MOST = 4, 0.9, 3.0
_N_BETAS = N_FEATURES * N_VALUES
_BLOCKS_OF_RUN = 25.0


@dataclass(frozen=True, slots=True)
class Episodes:
    """What became of runs of blocks, n of them: their stratum uint8 [n], packed features uint64 [n], age in seconds at
    the end float64 [n], blocks float64 [n], and whether they were used then, bool [n]; else they were only seen until
    then, which says that they had not been used by that age."""

    strata: NDArray[np.uint8]
    features: Packed
    ages_s: Floats
    blocks: Floats
    hits: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ages_s)


@dataclass(frozen=True, slots=True)
class Model:
    """The rate of use at an age is ``rates[stratum, bucket] * exp(sum of betas of the features)``, per second.

    ``rates``: float64 [N_STRATA, N_AGES]; ``betas``: float64 [2, N_FEATURES * N_VALUES], the first for buckets up to
    ``split``, the second for those beyond.
    """

    rates: Floats
    betas: Floats
    split: int

    def thetas(self, features: Packed) -> tuple[Floats, Floats]:
        """Sums of betas, two of float64 [n]."""
        sums = self.sums(unpacked(features))
        return sums[0], sums[1]

    def sums(self, places: Ints) -> Floats:
        """The same, float64 [2, n], of ``unpacked`` features."""
        sums: Floats = np.zeros((2, len(places)))
        for feature in range(N_FEATURES):
            sums += self.betas[:, places[:, feature]]
        return sums


def first_model() -> Model:
    """Before anything is known: the longer ago, the less likely."""
    rates = _START_RATE / (MIDDLES_S + _START_AGE_S)
    return Model(np.tile(rates, (N_STRATA, 1)), np.zeros((2, _N_BETAS)), N_AGES // 2)


def fit(before: Model, seen: Episodes) -> Model:
    """The model after ``seen``, beginning from ``before``. Pure; its time grows with the episodes."""
    if not len(seen) or not seen.hits.any():
        return before
    strata, features = seen.strata.astype(np.int64), unpacked(seen.features)
    # Blocks of a run share its fate: how many they are says how much it matters, not how much is known.
    weights = seen.blocks * (_BLOCKS_OF_RUN * len(seen) / seen.blocks.sum())
    buckets = age_buckets(seen.ages_s)
    within_s = time_within(seen.ages_s, buckets)
    used = weights * seen.hits
    cells = strata * N_AGES + buckets
    uses = _per_cell(cells, used)
    running = np.cumsum(uses.sum(axis=0))
    split = int(np.searchsorted(running, running[-1] / 2))
    is_early = buckets <= split
    observed = np.stack([_per_value(features, np.where(early, used, 0.0)) for early in (is_early, ~is_early)])
    betas = before.betas.copy()
    model = Model(before.rates, betas, split)
    for _ in range(_SWEEPS):
        thetas = model.sums(features)
        exposure = np.where(
            np.arange(N_AGES) <= split,
            _exposure(cells, within_s, weights * np.exp(thetas[0])),
            _exposure(cells, within_s, weights * np.exp(thetas[1])),
        )
        rates = _rates(uses, exposure)
        model = Model(rates, betas, split)
        _fit_betas(betas, thetas, _accumulated(rates, split, strata, buckets, within_s) * weights, features, observed)
    return model


def _per_cell(cells: Ints, values: Floats) -> Floats:
    return np.asarray(np.bincount(cells, values, N_STRATA * N_AGES).reshape(N_STRATA, N_AGES), np.float64)


def _per_value(features: Ints, values: Floats) -> Floats:
    return np.asarray(np.bincount(features.ravel(), np.repeat(values, N_FEATURES), _N_BETAS), np.float64)


def _exposure(cells: Ints, within_s: Floats, weights: Floats) -> Floats:
    """Time spent in each bucket of each stratum, weighted."""
    ended = _per_cell(cells, weights)
    beyond = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
    return beyond * WIDTHS_S + _per_cell(cells, weights * within_s)


def _rates(uses: Floats, exposure: Floats) -> Floats:
    """Rates where little was seen lean on the bucket before, and on all strata together."""
    pooled_uses, pooled_exposure = uses.sum(axis=0), exposure.sum(axis=0)
    pooled = np.empty(N_AGES)
    expected = _START_RATE / _START_AGE_S
    for age in range(N_AGES):
        if age:
            expected = pooled[age - 1] * (MIDDLES_S[age] / MIDDLES_S[age - 1]) ** -_FALL_OF_RATE
        pooled[age] = (pooled_uses[age] + _POOLED_STRENGTH) / (pooled_exposure[age] + _POOLED_STRENGTH / expected)
    own = (uses + _STRATUM_STRENGTH) / (exposure + _STRATUM_STRENGTH / pooled)
    smooth: Floats = own.copy()
    smooth[:, 1:-1] = own[:, :-2] / 4 + own[:, 1:-1] / 2 + own[:, 2:] / 4
    return smooth


def _accumulated(rates: Floats, split: int, strata: Ints, buckets: Ints, within_s: Floats) -> Floats:
    """The rate integrated over each episode, before and after the split, float64 [2, n]."""
    until = np.concatenate((np.zeros((N_STRATA, 1)), np.cumsum(rates * WIDTHS_S, axis=1)), axis=1)
    whole = until[strata, buckets] + rates[strata, buckets] * within_s
    at_split = until[strata, split + 1]
    return np.stack((np.minimum(whole, at_split), np.maximum(whole - at_split, 0.0)))


def _fit_betas(betas: Floats, thetas: Floats, base: Floats, features: Ints, observed: Floats) -> None:
    """One pass over all features, each in view of those before it."""
    for feature in range(N_FEATURES):
        values = features[:, feature] - OFFSETS[feature]
        if (values == values[0]).all():
            continue  # it tells nobody apart
        span = slice(OFFSETS[feature], OFFSETS[feature] + N_VALUES)
        for part in range(2):
            expected = np.bincount(values, base[part] * np.exp(thetas[part]), N_VALUES)
            old = betas[part, span]
            step = np.log((observed[part, span] + _BETA_STRENGTH) / (expected + _BETA_STRENGTH))
            new = np.clip(_DAMPING * (old + step), -_BETA_MOST, _BETA_MOST)
            thetas[part] += (new - old)[values]
            betas[part, span] = new
