"""What it costs to compute KV again: attention makes a token dearer the further on in its prompt it is."""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DOUBLING_TOKENS_MAX = 1e12


def attention_doubling_tokens(n_parameters: float, layers: int, query_heads: int, head_dim: int) -> float:
    """The position at which attention to all tokens before costs as much as everything else of a token.

    That is 2 N / (4 L H d): a token takes 2 N operations for N parameters that it is multiplied with, and 4 H d more
    in each of L layers for every token before it. 30,500 for Llama-3-8B, 53,000 for its 70B. 0, for unknown, if a
    factor is.
    """
    per_position = 4.0 * layers * query_heads * head_dim
    return 2.0 * n_parameters / per_position if n_parameters > 0 and per_position > 0 else 0.0


@overload
def prefill_cost(n_tokens: float, doubling_tokens: float) -> float: ...
@overload
def prefill_cost(n_tokens: Ints, doubling_tokens: float) -> Floats: ...
def prefill_cost(n_tokens: float | Ints, doubling_tokens: float) -> float | Floats:
    """Cost of computing a prompt's first tokens, in units of its very first: n + n**2 / (2 D). Where ``doubling_tokens``
    is 0, every token costs the same."""
    return n_tokens * mean_cost(0, n_tokens, doubling_tokens)


@overload
def mean_cost(first: float, end: float, doubling_tokens: float) -> float: ...
@overload
def mean_cost(first: float | Ints, end: Ints, doubling_tokens: float) -> Floats: ...
def mean_cost(first: float | Ints, end: float | Ints, doubling_tokens: float) -> float | Floats:
    """Cost of a token on average over positions ``first`` to ``end - 1``: 1 + p / D at position p."""
    return 1 + (first + end) / (2 * doubling_tokens) if doubling_tokens else 0.0 * end + 1.0
