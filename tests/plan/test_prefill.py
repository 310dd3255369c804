"""Load or compute again: the closed formulas, and that they agree with sums over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.errors import BadInputError
from kvstore.plan.prefill import Prefill, break_even_tokens, load_or_recompute
from kvstore.recompute import LEAST_DOUBLING_TOKENS

LLAMA_8B = {"n_parameters": 8.03e9, "layers": 32, "query_heads": 32, "head_dim": 128}
FAST = Prefill.of_flops(flops_per_s=4e14, **LLAMA_8B)  # type: ignore[arg-type]

parameters, layers = st.floats(1e8, 1e12), st.integers(1, 128)
query_heads, head_dims = st.integers(1, 128), st.integers(32, 256)
flops = st.floats(1e12, 1e16)
prefills = st.builds(Prefill, first_token_s=st.floats(1e-7, 1e-2), doubling_tokens=st.floats(1e3, 1e6))


@given(parameters, layers, query_heads, head_dims, flops, st.integers(0, 1000), st.integers(0, 300))
def test_a_range_takes_what_its_tokens_take_as_published(
    n: float, n_layers: int, heads: int, dim: int, rate: float, start: int, tokens: int
) -> None:
    """[2N + 4 L Hq dh p] / (F MFU) a token, here at the middle of its position."""
    assume(2 * n >= LEAST_DOUBLING_TOKENS * 4 * n_layers * heads * dim)
    prefill = Prefill.of_flops(n, n_layers, heads, dim, rate)
    summed = math.fsum((2 * n + 4 * n_layers * heads * dim * (p + 0.5)) / rate for p in range(start, start + tokens))
    assert prefill.expected_s(start, start + tokens) == pytest.approx(summed, rel=1e-9)


@given(prefills, st.floats(0.01, 0.99))
def test_tokens_are_loaded_as_fast_as_computed_at_the_break_even_and_prefixes_at_twice_it(
    prefill: Prefill, kappa: float
) -> None:
    load_token_s = prefill.first_token_s / kappa
    verdict = load_or_recompute(prefill, load_token_s, 0, 1)
    assert verdict.kappa == pytest.approx(kappa)
    assert verdict.pays_from_token == pytest.approx(prefill.doubling_tokens * (1 / kappa - 1))
    at = verdict.pays_from_token
    assert prefill.first_token_s * (1 + at / prefill.doubling_tokens) == pytest.approx(load_token_s)
    length = verdict.pays_from_prefix_tokens
    assert length == pytest.approx(2 * at)
    assert prefill.expected_s(0, length) == pytest.approx(load_token_s * length)
    longer, shorter = math.ceil(length * 1.01) + 1, math.floor(length * 0.99) - 1
    assert load_or_recompute(prefill, load_token_s, 0, longer).load
    if shorter > 0:
        assert not load_or_recompute(prefill, load_token_s, 0, shorter).load


@given(prefills, st.floats(1e-9, 1e-2), st.integers(0, 100_000), st.integers(1, 100_000), st.floats(1.0, 100.0))
def test_a_faster_link_never_speaks_for_computing(
    prefill: Prefill, load_token_s: float, start: int, tokens: int, faster: float
) -> None:
    slow = load_or_recompute(prefill, load_token_s, start, start + tokens)
    fast = load_or_recompute(prefill, load_token_s / faster, start, start + tokens)
    assert fast.load >= slow.load
    assert fast.pays_from_token <= slow.pays_from_token


@given(prefills, st.floats(1e-9, 1e-2), st.integers(0, 100_000), st.integers(1, 10_000), st.integers(1, 100_000))
def test_a_later_range_never_speaks_for_computing(
    prefill: Prefill, load_token_s: float, start: int, tokens: int, later: int
) -> None:
    early = load_or_recompute(prefill, load_token_s, start, start + tokens)
    late = load_or_recompute(prefill, load_token_s, start + later, start + later + tokens)
    assert late.load >= early.load


def test_a_known_model_over_a_known_link() -> None:
    """Llama-3.1-8B at 400 TFLOP/s, 128 KiB a token over 25 GB/s: computing the first token takes 7.7 times as long."""
    verdict = load_or_recompute(FAST, 131072 / 25e9, 0, 8192)
    assert verdict.kappa == pytest.approx(2 * 8.03e9 / 4e14 / (131072 / 25e9))
    assert verdict.kappa == pytest.approx(7.66, abs=0.01)
    assert (verdict.load, verdict.pays_from_token, verdict.pays_from_prefix_tokens) == (True, 0, 0)
    assert FAST.doubling_tokens == pytest.approx(30_632, abs=1)
    assert "7.66 times as fast" in verdict.reason


def test_over_a_slow_link_it_says_from_which_prefix_on_loading_pays() -> None:
    verdict = load_or_recompute(FAST, 131072 / 2e9, 0, 8192)
    assert not verdict.load
    assert verdict.pays_from_prefix_tokens == pytest.approx(2 * 30_632 * (1 / verdict.kappa - 1), rel=1e-4)
    assert f"from a prefix of {verdict.pays_from_prefix_tokens:,.0f} tokens on" in verdict.reason


def test_few_tokens_are_not_worth_a_transfer_however_fast_the_link() -> None:
    verdict = load_or_recompute(FAST, 1e-7, 0, 10, load_start_s=0.1)
    assert (verdict.load, verdict.kappa > 1) == (False, True)
    assert "not worth a transfer" in verdict.reason


def test_a_measured_prefill_gives_its_own_time_back() -> None:
    measured = Prefill.measured(30_000.0, tokens=4096, took_s=0.25, start=1024)
    assert measured.expected_s(1024, 5120) == pytest.approx(0.25)
    assert measured.expected_s(0, 1024) < measured.expected_s(1024, 2048)


def test_where_nothing_is_loaded_loading_never_pays() -> None:
    assert break_even_tokens(1000.0, 0.0) == math.inf
    verdict = load_or_recompute(FAST, math.inf, 0, 100)
    assert (verdict.load, verdict.pays_from_token) == (False, math.inf)
    assert "never pays" in verdict.reason


def test_where_all_positions_cost_the_same_a_slow_link_never_pays() -> None:
    flat = Prefill.measured(0.0, tokens=1000, took_s=1.0)
    assert flat.expected_s(5000, 6000) == pytest.approx(1.0)
    assert load_or_recompute(flat, 2e-3, 0, 10**6).pays_from_token == math.inf
    assert load_or_recompute(flat, 0.5e-3, 0, 1000).load


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Prefill(0.0),
        lambda: Prefill(math.nan),
        lambda: Prefill(1e-3, -1.0),
        lambda: Prefill.measured(0.0, 0, 1.0),
        lambda: Prefill.measured(0.0, 10, 0.0),
        lambda: Prefill.of_flops(0.0, 1, 1, 1, 1e14),
        lambda: Prefill.of_flops(1e9, 1, 1, 1, math.inf),
        lambda: load_or_recompute(FAST, -1.0, 0, 1),
        lambda: load_or_recompute(FAST, math.nan, 0, 1),
        lambda: load_or_recompute(FAST, 1.0, 5, 1),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(BadInputError):
        wrong()
