"""The randomised Hadamard rotation along the head dim: outliers of one channel are spread over all.

A row is multiplied by a diagonal of signs, then by the Hadamard matrix of each run of ``run_of(dim)`` elements, then by
1 / sqrt(run). Both factors undo themselves, so the way back is the same in the other order. Sums are taken at distance
1, 2, 4, ...: (a, b) becomes (a + b, a - b), each rounded to fp32, and the product with the norm comes last; in that
order every implementation gives the same bits. (QuaRot, Ashkboos et al. 2024, rotates whole models so.)
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def run_of(dim: int) -> int:
    """The largest power of two that divides ``dim``: 64 of 64, but 16 of 80, which is rotated in 5 runs."""
    return dim & -dim


def norm_of(dim: int) -> float:
    """1 / sqrt(run), as fp32."""
    return float(np.float32(run_of(dim) ** -0.5))


@cache
def signs_of(dim: int) -> NDArray[np.uint32]:
    """The signs of a row, uint32 [dim]: the sign bit or 0.

    Of element ``d`` bit ``d % 64`` of SplitMix64 number ``d // 64`` says which. The same for all rows,
    part of the format. Read-only.
    """
    bits = [(_split_mix(d // 64) >> d % 64) & 1 for d in range(dim)]
    signs = np.array(bits, np.uint32) << np.uint32(31)
    signs.flags.writeable = False
    return signs


def rotate(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows [..., dim] rotated; a new array."""
    return _hadamard((rows.view(np.uint32) ^ signs_of(rows.shape[-1])).view(np.float32))


def rotate_back(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """What ``rotate`` has rotated, up to rounding; a new array."""
    turned = _hadamard(rows)
    return (turned.view(np.uint32) ^ signs_of(rows.shape[-1])).view(np.float32)


def _hadamard(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    shape, dim = rows.shape, rows.shape[-1]
    apart = 1
    while apart < run_of(dim):
        pairs = rows.reshape(-1, 2, apart)
        a, b = pairs[:, 0], pairs[:, 1]
        rows = np.stack((a + b, a - b), axis=1)
        apart *= 2
    return rows.reshape(shape) * np.float32(norm_of(dim))


def _split_mix(n: int) -> int:
    """Output number ``n``, from 0, of SplitMix64 seeded with 0."""
    z = (n + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31
