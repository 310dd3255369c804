"""What the kernels should compute, written down again with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bits = NDArray[Any]

BITS: dict[str, type[np.unsignedinteger[Any]]] = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32}
"""Values as their bits: numpy has no bfloat16."""


def to_float(bits: Bits, dtype: str) -> Floats:
    """Bits of a dtype as float32."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    values: Floats = bits.view(dtype).astype(np.float32)
    return values


def to_bits(values: Floats, dtype: str) -> Bits:
    """float32 rounded to the nearest of a dtype, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype).view(BITS[dtype])


def _to_bfloat16(values: Floats) -> Bits:
    """The nearer of the two around a value, of two as near the even one; float64 has both distances exactly."""
    below = values.view(np.uint32) >> 16
    down, up = ((bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for bits in (below, below + 1))
    up = np.where(np.isinf(up), np.copysign(2.0**128, up), up)
    further = np.abs(values.astype(np.float64) - down) - np.abs(up - values.astype(np.float64))
    goes_up = np.isfinite(values) & ((further > 0) | ((further == 0) & (below % 2 == 1)))
    return np.where(np.isnan(values), 0x7FC0, below + goes_up).astype(np.uint16)


def summaries(keys: Floats, rows: NDArray[np.uint32]) -> tuple[Floats, Floats, Floats]:
    """(low, high, mean) [page, head, dim] of keys [page, token, head, dim]; NaN for a page without rows.

    Of equal values (two zeros) the first is meant, and a NaN only where there is nothing else.
    """
    shape = (keys.shape[0], *keys.shape[2:])
    low, high, mean = (np.full(shape, np.nan, np.float32) for _ in range(3))
    for page, n_rows in enumerate(rows.tolist()):
        total = np.zeros(shape[1:], np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            for number, row in enumerate(keys[page, :n_rows]):
                low[page] = np.where((row < low[page]) | np.isnan(low[page]), row, low[page])
                high[page] = np.where((row > high[page]) | np.isnan(high[page]), row, high[page])
                total = row if number == 0 else total + row
            if n_rows:
                mean[page] = total / np.float32(n_rows)
    return low, high, mean


def scores(queries: Floats, low: Floats, high: Floats, *, add: bool) -> Floats:
    """[head, page] of queries [head, group, dim] and summaries [page, head, dim], in the kernel's order of sums."""
    q, dim = queries[:, None], queries.shape[-1]
    bounds = np.maximum(q * low.transpose(1, 0, 2)[:, :, None], q * high.transpose(1, 0, 2)[:, :, None])
    lanes = np.zeros((*bounds.shape[:-1], 32), np.float32)
    for first in range(0, dim, 32):
        part = bounds[..., first : first + 32]
        lanes[..., : part.shape[-1]] += part
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    each = lanes[..., 0]
    result = each[..., 0].copy()
    for query in range(1, each.shape[-1]):
        result = result + each[..., query] if add else np.maximum(result, each[..., query])
    return result.astype(np.float32)


def scores_exactly(queries: Doubles, low: Doubles, high: Doubles, *, add: bool) -> Doubles:
    """The same in float64, by the formula."""
    by_low = np.einsum("hgd,phd->hpgd", queries, low)
    by_high = np.einsum("hgd,phd->hpgd", queries, high)
    each = np.maximum(by_low, by_high).sum(-1)
    result: Doubles = each.sum(-1) if add else each.max(-1)
    return result
