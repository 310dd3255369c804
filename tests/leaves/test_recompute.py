"""What computing KV again costs, by position."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvstore.errors import BadInputError
from kvstore.recompute import (
    LEAST_DOUBLING_TOKENS,
    checked_doubling_tokens,
    doubling_tokens_of,
    mean_cost,
    prefill_cost,
)


def test_the_cost_of_a_prompt_is_the_sum_over_its_tokens() -> None:
    doubling, n = 1000.0, 5000
    tokens = 1 + (np.arange(n) + 0.5) / doubling
    assert prefill_cost(n, doubling) == pytest.approx(tokens.sum())
    assert mean_cost(700, 900, doubling) == pytest.approx(tokens[700:900].mean())
    assert prefill_cost(900, doubling) - prefill_cost(700, doubling) == pytest.approx(tokens[700:900].sum())
    many = mean_cost(np.array([0, 700]), np.array([100, 900]), doubling)
    assert many.tolist() == [mean_cost(0, 100, doubling), mean_cost(700, 900, doubling)]


def test_where_nothing_is_known_all_tokens_cost_the_same() -> None:
    assert prefill_cost(123, 0.0) == 123
    assert mean_cost(0, np.array([5, 7]), 0.0).tolist() == [1.0, 1.0]


def test_attention_doubles_the_cost_where_llamas_shapes_say() -> None:
    assert doubling_tokens_of(8.0e9, 32, 32, 128) == pytest.approx(30_500, rel=0.01)
    assert doubling_tokens_of(70.6e9, 80, 64, 128) == pytest.approx(53_900, rel=0.01)
    assert doubling_tokens_of(0, 32, 32, 128) == doubling_tokens_of(8e9, 0, 32, 128) == 0
    assert doubling_tokens_of(1e5, 2, 4, 16) == LEAST_DOUBLING_TOKENS == checked_doubling_tokens(1000), "a toy"


@pytest.mark.parametrize("value", [-1, 0.5, 1, 999, math.nan, math.inf, 1e13, True, "30000", None])
def test_what_is_no_position_is_refused(value: object) -> None:
    with pytest.raises(BadInputError, match="attention_doubling_tokens is"):
        checked_doubling_tokens(value)
    assert checked_doubling_tokens(0) == 0
    assert checked_doubling_tokens(30_500) == 30_500
