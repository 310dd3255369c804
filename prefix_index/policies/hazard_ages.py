"""Ages in buckets: how long ago blocks were used, three buckets to the octave."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

N_AGES = 54
_FIRST_S = 0.5
_PER_OCTAVE = 3

EDGES_S: Floats = np.concatenate(([0.0], _FIRST_S * 2.0 ** (np.arange(N_AGES) / _PER_OCTAVE)))
"""Where buckets begin and end, [N_AGES + 1]; the last one ends after about a day and stands for all beyond, too."""
WIDTHS_S: Floats = np.diff(EDGES_S)
MIDDLES_S: Floats = np.sqrt(np.maximum(EDGES_S[:-1], _FIRST_S / 2) * EDGES_S[1:])


def age_buckets(ages_s: Floats) -> Ints:
    """The bucket of each age, int64 of the same shape; negative ages count as 0."""
    steps = np.maximum(ages_s, _FIRST_S / 2)
    steps /= _FIRST_S
    np.log2(steps, out=steps)
    steps *= _PER_OCTAVE
    np.floor(steps, out=steps)
    steps += 1
    np.maximum(steps, 0, out=steps)
    buckets: Ints = np.minimum(steps, N_AGES - 1, out=steps).astype(np.int64)
    return buckets


def time_within(ages_s: Floats, buckets: Ints) -> Floats:
    """How much of its own bucket each age has gone through, in seconds."""
    within: Floats = np.clip(ages_s - EDGES_S[buckets], 0.0, WIDTHS_S[buckets])
    return within
