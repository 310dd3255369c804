"""What it costs to compute KV again: attention makes a token dearer the further on in its prompt it is."""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_DOUBLING_TOKENS = 1000.0
"""No model that serves prompts comes near; less would make the ends of prompts dearer than anything else."""
_MOST = 1e12


def doubling_tokens_of(n_parameters: float, layers: int, query_heads: int, head_dim: int) -> float:
    """The position at which attention to all tokens before costs as much as everything else of a token, D.

    2 N / (4 L H d): a token takes 2 N operations for N parameters that it is multiplied with, and in each of L layers
    4 H d more for every token before it. 30,500 for Llama-3-8B, 53,400 for its 70B. No less than
    ``LEAST_DOUBLING_TOKENS``, which toys would be; 0, for unknown, if a factor is.
    """
    per_position = 4.0 * layers * query_heads * head_dim
    if n_parameters <= 0 or per_position <= 0:
        return 0.0
    return max(2.0 * n_parameters / per_position, LEAST_DOUBLING_TOKENS)


def checked_doubling_tokens(value: object) -> float:
    """As a number. Raises BadInputError unless it is 0, for unknown, or may be such a position."""
    if isinstance(value, int | float) and value is not True and (not value or LEAST_DOUBLING_TOKENS <= value <= _MOST):
        return float(value)
    raise BadInputError(
        f"attention_doubling_tokens is {value!r:.80}; it must be 0, if it isn't known, or a number of tokens from "
        f"{LEAST_DOUBLING_TOKENS:.0f} to {_MOST:.0e}"
    )


@overload
def mean_cost(first: float, end: float, doubling_tokens: float) -> float: ...
@overload
def mean_cost(first: float | Ints, end: Ints, doubling_tokens: float) -> Floats: ...
def mean_cost(first: float | Ints, end: float | Ints, doubling_tokens: float) -> float | Floats:
    """What a token costs on average over positions ``first`` to ``end - 1``, in units of a prompt's very first.

    1 + p / D at position p; 1 everywhere where ``doubling_tokens`` is 0."""
    if isinstance(end, np.ndarray):
        many = np.ones(len(end)) if not doubling_tokens else 1 + (first + end) / (2 * doubling_tokens)
        return np.asarray(many, np.float64)
    return 1 + (float(first) + end) / (2 * doubling_tokens) if doubling_tokens else 1.0


@overload
def prefill_cost(n_tokens: float, doubling_tokens: float) -> float: ...
@overload
def prefill_cost(n_tokens: Ints, doubling_tokens: float) -> Floats: ...
def prefill_cost(n_tokens: float | Ints, doubling_tokens: float) -> float | Floats:
    """What computing a prompt's first tokens costs, in units of the very first."""
    if isinstance(n_tokens, np.ndarray):
        return np.asarray(n_tokens * mean_cost(0, n_tokens, doubling_tokens), np.float64)
    return n_tokens * mean_cost(0, n_tokens, doubling_tokens)
