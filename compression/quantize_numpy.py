"""Rows rounded to few bits and back in numpy: the reference of docs/FORMAT.md, and what works where there is no C.

Every operation is one in fp32 and rounds once, in the order of ``kvstore/native/quantize_rows.h``, which gives the same
bytes. Arrays are [heads, count, dim] of one page group.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvstore.compression.rotation import rotate, rotate_back
from kvstore.native.mapping import bytes_at
from kvstore.native.quantize import GROUP_ROWS, Addresses, Rows, Scheme, Tokens

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

VALUE_MAX = np.float32(65504)
"""The largest fp16; nothing beyond it is stored."""

FP8_MAX = np.float32(448)
_FP8_LEAST_NORMAL = np.float32(2**-6)


def quantize(
    rows: Rows, kv: Addresses, codes: Addresses, numbers: Addresses, tokens: Tokens | None
) -> NDArray[np.bool_]:
    """As ``kvstore.native.quantize.quantize``, page group by page group, with Python's lock for parts of it."""
    lost = np.zeros(len(kv), np.bool_)
    for i, (kv_at, codes_at, numbers_at) in enumerate(zip(kv.tolist(), codes.tolist(), numbers.tolist(), strict=True)):
        values = to_floats(take(rows, kv_at, _of(tokens, i)), rows.dtype)
        q, found, lost[i] = encode_rows(values, rows.scheme, rows.bits)
        bytes_at(codes_at, rows.codes_bytes)[:] = q.ravel()
        bytes_at(numbers_at, rows.numbers_bytes)[:] = found.astype("<f2").view(np.uint8).ravel()
    return lost


def dequantize(rows: Rows, kv: Addresses, codes: Addresses, numbers: Addresses, tokens: Tokens | None) -> None:
    """As ``kvstore.native.quantize.dequantize``."""
    shape = (rows.heads, rows.count, rows.dim * rows.bits // 8)
    for i, (kv_at, codes_at, numbers_at) in enumerate(zip(kv.tolist(), codes.tolist(), numbers.tolist(), strict=True)):
        q = bytes_at(codes_at, rows.codes_bytes).reshape(shape)
        found = bytes_at(numbers_at, rows.numbers_bytes).copy().view("<f2").reshape(rows.heads, -1)
        values = decode_rows(q, found, rows.scheme, rows.bits)
        put(rows, kv_at, _of(tokens, i), from_floats(values, rows.dtype))


def copy_rows(rows: Rows, kv: Addresses, flat: Addresses, tokens: Tokens | None, *, to_flat: bool) -> None:
    """As ``kvstore.native.quantize.copy_rows``."""
    element = _element(rows.dtype)
    n_bytes = rows.heads * rows.count * rows.dim * element.itemsize
    for i, (kv_at, flat_at) in enumerate(zip(kv.tolist(), flat.tolist(), strict=True)):
        there = bytes_at(flat_at, n_bytes)
        if to_flat:
            there[:] = take(rows, kv_at, _of(tokens, i)).view(np.uint8).ravel()
        else:
            put(rows, kv_at, _of(tokens, i), there.copy().view(element).reshape(rows.heads, rows.count, rows.dim))


def encode_rows(values: Floats, scheme: Scheme, bits: int) -> tuple[Bytes, NDArray[np.float16], bool]:
    """Codes uint8 [heads, count, dim * bits / 8], numbers as they are stored, and whether a value did not survive."""
    values, lost = _cleaned(values)
    if scheme is Scheme.ROTATED:
        values, lost_too = _cleaned(rotate(values))
        lost |= lost_too
    heads, count, dim = values.shape
    if scheme is Scheme.FP8:
        scale16 = (np.abs(values).max(axis=2) / FP8_MAX).astype(np.float16)
        scaled = np.clip(values * _inverse(scale16)[..., None], -FP8_MAX, FP8_MAX)
        return to_fp8(scaled), scale16.reshape(heads, -1), lost
    if scheme is not Scheme.CHANNEL:
        low16, scale16 = _numbers(values.min(axis=2), values.max(axis=2), bits)
        q = _rounded(values, low16[..., None], scale16[..., None], bits)
        # Of a head all batches lie one behind the other, so minima and scales are two runs.
        return packed(q, bits), np.concatenate((low16, scale16), axis=1), lost
    q, found = np.empty(values.shape, np.uint8), []
    for start in range(0, count, GROUP_ROWS):
        part = values[:, start : start + GROUP_ROWS]
        low16, scale16 = _numbers(part.min(axis=1), part.max(axis=1), bits)
        q[:, start : start + GROUP_ROWS] = _rounded(part, low16[:, None], scale16[:, None], bits)
        found.append(np.stack((low16, scale16), axis=1))
    return packed(q, bits), np.stack(found, axis=1).reshape(heads, -1, dim), lost


def decode_rows(codes: Bytes, numbers: NDArray[np.float16], scheme: Scheme, bits: int) -> Floats:
    """fp32 [heads, count, dim] of any codes and numbers; numbers that are not finite count as 0."""
    heads, count, code_bytes = codes.shape
    known = np.where(np.isfinite(numbers), numbers, np.float16(0)).astype(np.float32)
    if scheme is Scheme.FP8:
        return _fp8_table()[codes] * known[..., None]
    q = unpacked(codes, bits).astype(np.float32)
    if scheme is Scheme.CHANNEL:
        pairs = known.reshape(heads, -1, 2, code_bytes * 8 // bits).repeat(GROUP_ROWS, axis=1)[:, :count]
        low, scale = pairs[:, :, 0], pairs[:, :, 1]
    else:
        low, scale = known[:, :count, None], known[:, count:, None]
    values: Floats = q * scale + low
    return rotate_back(values) if scheme is Scheme.ROTATED else values


def packed(q: Bytes, bits: int) -> Bytes:
    """Codes [..., dim] as [..., dim * bits / 8], the first in the lowest bits of a byte."""
    out: Bytes = q[..., :: 8 // bits].copy()
    for i in range(1, 8 // bits):
        out |= q[..., i :: 8 // bits] << np.uint8(i * bits)
    return out


def unpacked(codes: Bytes, bits: int) -> Bytes:
    """The way back of ``packed``."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    apart = codes[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return apart.reshape(*codes.shape[:-1], -1)


def to_fp8(values: Floats) -> Bytes:
    """e4m3 of values up to 448, to the nearest, ties to even."""
    magnitude = np.abs(values)
    bits = magnitude.view(np.uint32)
    normal = (bits + np.uint32(0x7FFFF) + (bits >> 20 & 1) >> 20) - np.uint32(120 << 3)
    small = np.rint(magnitude * np.float32(2**9)).astype(np.uint32)
    code = np.where(magnitude < _FP8_LEAST_NORMAL, small, normal).astype(np.uint8)
    signs = (values.view(np.uint32) >> 24 & 0x80).astype(np.uint8)
    signed: Bytes = code | signs
    return signed


@cache
def _fp8_table() -> Floats:
    """e4m3 by code; 0x7f and 0xff, which are not written, as 480 and -480."""
    code = np.arange(128)
    exponent, fraction = code >> 3, code & 7
    half = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10))
    return np.concatenate((half, -half)).astype(np.float32)


def to_floats(elements: NDArray[np.generic], dtype: str) -> Floats:
    """Elements as they lie in memory (uint16 for bfloat16) as fp32, exactly."""
    if dtype == "bfloat16":
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return elements.astype(np.float32)


def from_floats(values: Floats, dtype: str) -> NDArray[np.generic]:
    """fp32 as elements, to the nearest, ties to even; fp16 stops at its largest."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return (bits + np.uint32(0x7FFF) + (bits >> 16 & 1) >> 16).astype(np.uint16)
    if dtype == "float16":
        return np.clip(values, -VALUE_MAX, VALUE_MAX).astype(np.float16)
    return values


def take(rows: Rows, address: int, tokens: Tokens | None) -> NDArray[np.generic]:
    """The rows of the page group at an address, a new array."""
    token, head = _where(rows, tokens)
    return _view(rows, address, tokens)[token // rows.page_tokens, token % rows.page_tokens, head]


def put(rows: Rows, address: int, tokens: Tokens | None, elements: NDArray[np.generic]) -> None:
    """The rows of the page group at an address, replaced."""
    token, head = _where(rows, tokens)
    _view(rows, address, tokens)[token // rows.page_tokens, token % rows.page_tokens, head] = elements


def _element(dtype: str) -> np.dtype[np.generic]:
    return np.dtype({"bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}[dtype])


def _of(tokens: Tokens | None, i: int) -> Tokens | None:
    return None if tokens is None else tokens[i]


def _where(rows: Rows, tokens: Tokens | None) -> tuple[Tokens, NDArray[np.int64]]:
    """Token and head of each row; both broadcast to [heads, count]."""
    plain = np.arange(rows.first, rows.first + rows.count, dtype=np.int32)[None]
    return (plain if tokens is None else tokens), np.arange(rows.heads)[:, None]


def _view(rows: Rows, address: int, tokens: Tokens | None) -> NDArray[np.generic]:
    """[pages, page_tokens, heads, dim], as far as rows are asked for; writes through."""
    last = rows.first + rows.count - 1 if tokens is None else int(tokens.max(initial=0))
    pages = last // rows.page_tokens + 1
    element = _element(rows.dtype)
    n_bytes = (
        (pages - 1) * rows.page_stride
        + (rows.page_tokens - 1) * rows.token_stride
        + (rows.heads - 1) * rows.head_stride
        + rows.dim * element.itemsize
    )
    memory = bytes_at(address, n_bytes)[: element.itemsize].view(element)
    strides = (rows.page_stride, rows.token_stride, rows.head_stride, element.itemsize)
    return as_strided(memory, (pages, rows.page_tokens, rows.heads, rows.dim), strides)


def _cleaned(values: Floats) -> tuple[Floats, bool]:
    with np.errstate(invalid="ignore"):
        strange = ~(np.abs(values) <= VALUE_MAX)
    if not strange.any():
        return values, False
    return np.clip(np.where(np.isnan(values), np.float32(0), values), -VALUE_MAX, VALUE_MAX), True


def _numbers(least: Floats, most: Floats, bits: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Minimum and scale in fp16; neither is a negative zero for a minimum of zero."""
    low16 = (least + np.float32(0)).astype(np.float16)
    reach = most - low16.astype(np.float32)
    scale = np.where(reach > 0, reach, np.float32(0)) / np.float32((1 << bits) - 1)
    return low16, scale.astype(np.float16)


def _inverse(scale16: NDArray[np.float16]) -> Floats:
    scale = scale16.astype(np.float32)
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)


def _rounded(values: Floats, low16: NDArray[np.float16], scale16: NDArray[np.float16], bits: int) -> Bytes:
    nearest = (values - low16.astype(np.float32)) * _inverse(scale16) + np.float32(0.5)
    q: Bytes = np.clip(nearest, 0, (1 << bits) - 1).astype(np.uint8)
    return q
