"""What the default policy knows of a run of blocks, as small numbers: its stratum, and one value of each feature.

The values of a run are packed into one number, four bits each, so that a run's are copied, compared and kept as one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ages import Ints

_BITS = 4
N_VALUES = 1 << _BITS
"""Values of a feature; 0 says that it is not known or does not apply."""

TURN, OUTPUT, LATER_OUTPUT, INPUT, UNSEEN, GAP, TYPE, REUSE, DEPTH, INTERVAL = range(10)
"""Which request of a conversation used the blocks last; what it generated; the same if it was not the first; its
prompt; how many of its blocks were new; how long after the request that it continues; what kind it said it was; how
much reuse it said to expect; where in the prompt the blocks begin; the mean time between their uses."""
N_FEATURES = 10
N_OF_REQUEST = DEPTH
"""The first so many are equal for all runs of a request."""
OFFSETS: Ints = np.arange(N_FEATURES, dtype=np.int64) * N_VALUES
"""Where the betas of each feature begin."""
_SHIFTS: NDArray[np.uint64] = np.arange(N_FEATURES, dtype=np.uint64) * np.uint64(_BITS)
_OUTPUT_MASK = (N_VALUES - 1) << _BITS * OUTPUT
_OF_RUN_MASK = ((1 << _BITS * N_FEATURES) - 1) ^ ((1 << _BITS * N_OF_REQUEST) - 1)

N_STRATA = 8
PARTIAL, NEW = 0, 1
_TURN_MOST = 12
STRATUM_OF_USES = (NEW, NEW, 2, 3, 4, 5, 6, 6, 6, 6, 6, 6, 7)
"""The stratum of blocks that have been used so often, the last one for all beyond."""
USES_TOLD_APART = len(STRATUM_OF_USES) - 1
"""From so many uses on, more make no difference."""

Packed = NDArray[np.uint64]


@dataclass(slots=True)
class RequestFacts:
    """What is known of a request: lengths in tokens, 0 if unknown; ``gap_s`` is negative if it continues nothing;
    ``kind`` and ``reuse`` are values of TYPE and REUSE."""

    turn: int
    gap_s: float
    n_unseen: int
    n_tokens: int = 0
    output_tokens: int = 0
    kind: int = 0
    reuse: int = 0


def of_request(facts: RequestFacts) -> int:
    """The values that all runs of a request have, packed."""
    output = log2_value(facts.output_tokens) if facts.output_tokens > 0 else 0
    return (
        min(facts.turn, _TURN_MOST) << _BITS * TURN
        | output << _BITS * OUTPUT
        | (output if facts.turn > 1 else 0) << _BITS * LATER_OUTPUT
        | (log2_value(facts.n_tokens / 16) if facts.n_tokens > 0 else 0) << _BITS * INPUT
        | log2_value(facts.n_unseen + 1) << _BITS * UNSEEN
        | (log2_value(4 * facts.gap_s + 2.0) if facts.gap_s >= 0 else 0) << _BITS * GAP
        | facts.kind << _BITS * TYPE
        | facts.reuse << _BITS * REUSE
    )


def of_run(depth: int, uses: int, life_s: float) -> int:
    """The values of a run's own, packed. ``life_s``: time from the first use to this one."""
    interval = log2_value(2 * life_s / (uses - 1) + 1.0) if uses > 1 else 0
    return min((depth + 1).bit_length(), N_VALUES - 1) << _BITS * DEPTH | interval << _BITS * INTERVAL


def with_request(packed: int, of_request: int) -> int:
    """A run's values, those of its request replaced."""
    return packed & _OF_RUN_MASK | of_request


def has_output(packed: int) -> bool:
    """Whether it is known what the request generated."""
    return packed & _OUTPUT_MASK != 0


def with_output(packed: int, turn: int, tokens: int) -> int:
    """A run's values, now that it is known what its request generated."""
    value = log2_value(tokens)
    return packed | value << _BITS * OUTPUT | (value if turn > 1 else 0) << _BITS * LATER_OUTPUT


def unpacked(packed: Packed) -> Ints:
    """Places of betas, int64 [n, N_FEATURES]: the values with ``OFFSETS`` added."""
    values = (packed[:, None] >> _SHIFTS) & np.uint64(N_VALUES - 1)
    places: Ints = values.astype(np.int64) + OFFSETS
    return places


def log2_value(x: float) -> int:
    """1 for what is below 2, one more for each doubling, as far as values go."""
    return min(int(math.log2(x)) + 1, N_VALUES - 1) if x >= 1 else 1
