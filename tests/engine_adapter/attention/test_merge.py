"""Parts put together: in torch and numpy, for every way to cut, against attention over everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvstore.engine_adapter.attention import Part, merge
from kvstore.errors import BadInputError
from tests.engine_adapter.attention.scenes import Floats, attend

HEADS, DIM = 4, 8


def random_kv(seed: int, n_tokens: int) -> tuple[Floats, Floats, Floats]:
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((HEADS, DIM)),
        rng.standard_normal((n_tokens, 2, DIM)) * 3,
        rng.standard_normal((n_tokens, 2, DIM)),
    )


@pytest.mark.parametrize("as_array", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("seed", range(5))
def test_parts_make_the_whole(seed: int, as_array: Any) -> None:
    n_tokens = 60
    q, keys, values = random_kv(seed, n_tokens)
    rng = np.random.default_rng(seed + 100)
    part_of = rng.integers(0, 1 + seed, n_tokens)
    found = [attend(q, keys, values, part_of == part) for part in range(2 + seed)]  # the last one has no tokens
    merged = merge([as_array(output) for output, _ in found], [as_array(lse) for _, lse in found])
    output, lse = attend(q, keys, values, np.ones(n_tokens, bool))
    np.testing.assert_allclose(np.asarray(merged.output), output, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.asarray(merged.lse), lse, rtol=1e-12)
    assert type(merged.output) is type(as_array(output))


def test_merging_is_associative() -> None:
    q, keys, values = random_kv(7, 30)
    a, b, c = (Part(*attend(q, keys, values, np.arange(30) % 3 == part)) for part in range(3))
    left = merge(*zip(merge(*zip(a, b, strict=True)), c, strict=True))
    right = merge(*zip(a, merge(*zip(b, c, strict=True)), strict=True))
    np.testing.assert_allclose(left.output, right.output, rtol=1e-12)
    np.testing.assert_allclose(left.lse, right.lse, rtol=1e-12)


def test_logits_as_large_as_floats_go() -> None:
    outputs = list(np.array([[[1.0]], [[3.0]]], np.float32))
    merged = merge(outputs, list(np.array([[1e38], [1e38]], np.float32)))
    assert merged.output.tolist() == [[2.0]]
    assert merge(outputs, list(np.array([[-1e38], [1e38]], np.float32))).output.tolist() == [[3.0]]


@pytest.mark.parametrize("as_array", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_nothing_merged_with_nothing_is_nothing(as_array: Any) -> None:
    merged = merge([as_array([[0.0, 0.0]])] * 2, [as_array([-np.inf])] * 2)
    assert merged.output.tolist() == [[0.0, 0.0]]
    assert merged.lse.tolist() == [-np.inf]


@pytest.mark.parametrize("as_array", [np.asarray, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_what_weighs_nothing_leaves_nothing(as_array: Any, lost: float) -> None:
    merged = merge([as_array([[lost, lost]]), as_array([[1.0, 2.0]])], [as_array([-np.inf]), as_array([0.5])])
    assert merged.output.tolist() == [[1.0, 2.0]]
    assert merged.lse.tolist() == [0.5]
    assert np.isnan(np.asarray(merge([as_array([[lost]])] * 2, [as_array([np.nan])] * 2).output)).all()


def test_a_learned_sink_takes_weight_and_gives_no_value() -> None:
    q, keys, values = random_kv(9, 20)
    output, lse = attend(q, keys, values, np.ones(20, bool))
    sink = np.array([0.5, -1.0, 2.0, 0.0])
    merged = merge([output, np.zeros_like(output)], [lse, sink])
    logits = np.stack([keys[:, head // 2] @ q[head] / np.sqrt(DIM) for head in range(HEADS)])
    weights = np.exp(logits) / (np.exp(logits).sum(1) + np.exp(sink))[:, None]
    expected = np.stack([weights[head] @ values[:, head // 2] for head in range(HEADS)])
    np.testing.assert_allclose(merged.output, expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("outputs", "lses"),
    [
        ([], []),
        ([np.zeros((2, 3))], [np.zeros(2), np.zeros(2)]),
        ([np.zeros((2, 3)), np.zeros((3, 3))], [np.zeros(2), np.zeros(3)]),
        ([np.zeros((2, 3))], [np.zeros((2, 3))]),
    ],
)
def test_parts_that_do_not_fit(outputs: list[Floats], lses: list[Floats]) -> None:
    with pytest.raises(BadInputError, match=r"part|outputs"):
        merge(outputs, lses)
