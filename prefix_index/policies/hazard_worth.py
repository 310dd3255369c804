"""What a block is worth at its age: the most uses per second of room that keeping it for some time may bring."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ages import N_AGES, WIDTHS_S, Floats, Ints
from kvstore.prefix_index.policies.hazard_features import N_STRATA
from kvstore.prefix_index.policies.hazard_model import Model, first_model

_STEP = 0.5
_HALF = 8
N_THETAS = 2 * _HALF + 1
TABLE_SHAPE = (N_STRATA, N_THETAS, N_THETAS, N_AGES)
_LEAST = 1e-300


def place(stratum: int, young: float, old: float) -> tuple[int, float, float]:
    """Where in a table's ``logs``, flat, the run of age 0 stands whose sums of betas are ``young`` up to the split and
    ``old`` beyond; and what they have beyond the table's steps, or its last one, which counts as a factor."""
    young_step = min(max(round(young / _STEP), -_HALF), _HALF)
    old_step = min(max(round(old / _STEP), -_HALF), _HALF)
    cell = ((stratum * N_THETAS + young_step + _HALF) * N_THETAS + old_step + _HALF) * N_AGES
    return cell, young - young_step * _STEP, old - old_step * _STEP


def places(strata: NDArray[np.uint8], young: Floats, old: Floats) -> tuple[Ints, Floats, Floats]:
    """``place`` of n runs."""
    young_steps = np.clip(np.rint(young / _STEP), -_HALF, _HALF)
    old_steps = np.clip(np.rint(old / _STEP), -_HALF, _HALF)
    thetas = (young_steps + _HALF) * N_THETAS + old_steps + _HALF
    cells: Ints = (strata.astype(np.int64) * N_THETAS**2 + thetas.astype(np.int64)) * N_AGES
    return cells, young - young_steps * _STEP, old - old_steps * _STEP


@dataclass(frozen=True, slots=True)
class WorthTable:
    """Logarithms of worth, float32 ``TABLE_SHAPE``: by stratum, both thetas in steps, and bucket of age."""

    logs: NDArray[np.float32]
    split: int

    def look_up(self, cells: Ints, young: Floats, old: Floats, buckets: Ints) -> Floats:
        """Logarithms of the worth of n runs at their ``places``, in these buckets of age."""
        logs: Floats = self.logs.reshape(-1)[cells + buckets] + np.where(buckets <= self.split, young, old)
        return logs

    def look_up_new(self, cell: int, young: float) -> float:
        """The same for one run of age 0."""
        return self.logs.item(cell) + young


@cache
def first_model_and_worth() -> tuple[Model, WorthTable]:
    """What a policy begins with. Nobody writes to it."""
    model = first_model()
    return model, worth_table(model)


def worth_table(model: Model) -> WorthTable:
    """The Gittins index of ``model``'s hazard: of all times that one might still wait, the best ratio of the chance of
    a use to the room taken until then; with age it only falls."""
    factors = np.exp((np.arange(N_THETAS) - _HALF) * _STEP)
    is_early = np.arange(N_AGES) <= model.split
    logs = np.empty(TABLE_SHAPE, np.float32)
    for stratum in range(N_STRATA):
        rates = model.rates[stratum]
        rates = np.where(is_early, rates * factors[:, None, None], rates * factors[None, :, None])
        grown = rates * WIDTHS_S
        unused = np.ones((N_THETAS, N_THETAS, N_AGES + 1))
        unused[..., 1:] = np.exp(-np.cumsum(grown, axis=2))
        room = np.zeros_like(unused)
        room[..., 1:] = np.cumsum(unused[..., :-1] * -np.expm1(-grown) / rates, axis=2)
        best = np.zeros_like(rates)
        for end in range(1, N_AGES + 1):
            used = unused[..., :end] - unused[..., end : end + 1]
            taken = np.maximum(room[..., end : end + 1] - room[..., :end], _LEAST)
            np.maximum(best[..., :end], used / taken, out=best[..., :end])
        logs[stratum] = np.log(np.maximum(np.minimum.accumulate(best, axis=2), _LEAST))
    return WorthTable(logs, model.split)
