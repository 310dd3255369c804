"""What the default policy knows of a run of blocks, as small numbers: its stratum, and one value of each feature."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ages import Floats, Ints

N_VALUES = 16
"""Values of a feature; 0 says that it is not known or does not apply."""

TURN, OUTPUT, LATER_OUTPUT, INPUT, UNSEEN, GAP, DEPTH, INTERVAL = range(8)
"""Which request of a conversation used the blocks last; what it generated; the same if it was not the first; its
prompt; how many of its blocks were new; how long after the request that it continues; where in the prompt the blocks
begin; the mean time between their uses."""
N_FEATURES = 8
OFFSETS: Ints = np.arange(N_FEATURES, dtype=np.int64) * N_VALUES

N_STRATA = 8
PARTIAL, NEW = 0, 1
_TURN_MOST = 12
_STRATUM_OF_USES: Ints = np.array([NEW, NEW, 2, 3, 4, 5, 6, 6, 6, 6, 6, 6, 7], np.int64)
USES_TOLD_APART = len(_STRATUM_OF_USES) - 1
"""From so many uses on, more make no difference."""


@dataclass(slots=True)
class RequestFacts:
    """What is known of a request: lengths in tokens, 0 if unknown; ``gap_s`` is negative if it continues nothing."""

    turn: int
    gap_s: float
    n_unseen: int
    n_tokens: int = 0
    output_tokens: int = 0


def strata(uses: Ints) -> Ints:
    """The stratum of blocks that have been used so often."""
    return _STRATUM_OF_USES[np.minimum(uses, USES_TOLD_APART)]


def features(request: RequestFacts, depths: Ints, uses: Ints, lives_s: Floats) -> Ints:
    """Values, int64 [n, N_FEATURES], with ``OFFSETS`` added. ``lives_s``: time from the first use to this one."""
    values = np.empty((len(depths), N_FEATURES), np.int64)
    _fill_request(values, request)
    values[:, DEPTH] = _log2_value(np.asarray(depths + 1, np.float64))
    between_s = lives_s / np.maximum(uses - 1, 1)
    values[:, INTERVAL] = np.where(uses > 1, _log2_value(2 * between_s + 1.0), 0)
    return values + OFFSETS


def set_request(rows: Ints, request: RequestFacts) -> None:
    """Write into rows of ``features`` what is known of their request now."""
    rows -= OFFSETS
    _fill_request(rows, request)
    rows += OFFSETS


def output_value(tokens: int) -> int:
    """The value of OUTPUT for so many tokens."""
    return _log2_of(tokens) if tokens > 0 else 0


def _fill_request(values: Ints, request: RequestFacts) -> None:
    output = output_value(request.output_tokens)
    values[:, TURN] = min(request.turn, _TURN_MOST)
    values[:, OUTPUT] = output
    values[:, LATER_OUTPUT] = output if request.turn > 1 else 0
    values[:, INPUT] = _log2_of(request.n_tokens / 16) if request.n_tokens > 0 else 0
    values[:, UNSEEN] = _log2_of(request.n_unseen + 1)
    values[:, GAP] = _log2_of(4 * request.gap_s + 2.0) if request.gap_s >= 0 else 0


def _log2_of(x: float) -> int:
    return min(int(math.log2(x)) + 1, N_VALUES - 1) if x >= 1 else 1


def _log2_value(x: Floats) -> NDArray[np.int64]:
    values: Ints = np.clip(np.log2(np.maximum(x, 1.0)).astype(np.int64) + 1, 1, N_VALUES - 1)
    return values
