"""The rotation against a matrix written down, and its way back."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.compression.rotation import norm_of, rotate, rotate_back, run_of, signs_of


def matrix(dim: int) -> NDArray[np.float64]:
    """Rows are turned by its product: entry (i, j) of a run is (-1) to the number of bits that i and j share."""
    run = dim & -dim
    within = np.array([[(-1.0) ** (i & j).bit_count() for j in range(run)] for i in range(run)])
    blocks = np.kron(np.eye(dim // run), within) / np.sqrt(run)
    return np.asarray(np.diag(np.where(signs_of(dim) > 0, -1.0, 1.0)) @ blocks)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256, 576])
def test_it_is_the_product_with_a_rotation(dim: int) -> None:
    rows = np.random.default_rng(dim).standard_normal((3, 2, dim)).astype(np.float32)
    turned = matrix(dim)
    np.testing.assert_allclose(turned @ turned.T, np.eye(dim), atol=1e-12)
    np.testing.assert_allclose(rotate(rows), rows.astype(np.float64) @ turned, atol=1e-5)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256, 576])
def test_the_way_back_undoes_it(dim: int) -> None:
    rows = np.random.default_rng(dim).standard_normal((40, dim)).astype(np.float32)
    np.testing.assert_allclose(rotate_back(rotate(rows)), rows, atol=1e-5)


def test_an_outlier_is_spread_over_its_run() -> None:
    row = np.zeros((1, 80), np.float32)
    row[0, 20] = 64
    turned = np.abs(rotate(row)[0])
    assert (turned[16:32] == 16).all()
    assert not turned[:16].any()
    assert not turned[32:].any()


def test_runs_and_signs_are_part_of_the_format() -> None:
    assert [run_of(dim) for dim in (64, 80, 128, 576)] == [64, 16, 128, 64]
    assert norm_of(64) == 0.125
    first = 0xE220A8397B1DCDAF  # the first number of SplitMix64 seeded with 0
    assert [int(sign) >> 31 for sign in signs_of(64)] == [first >> d & 1 for d in range(64)]
    assert (signs_of(128)[64:] != signs_of(128)[:64]).any()
