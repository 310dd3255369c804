"""Rows of K or V rounded to few bits and back, in one call into C for a batch of page groups.

What each scheme does is in docs/FORMAT.md; ``compression/quantize_numpy.py`` gives the same bytes without C.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.native.library import library

Addresses = NDArray[np.uint64]
Tokens = NDArray[np.int32]

LEVELS = ("portable", "avx2", "avx512")
"""What the C part may be told to use, the plainest first."""

GROUP_ROWS = 32
"""Rows that share the numbers of a channel."""

DIM_STEP, DIM_MAX = 16, 1024
"""A row's elements are a multiple of the first, and no more than the second."""

_STREAM_ELEMENTS = 1 << 20
"""What a batch decodes to is written past the cache from this on: it is more than a core's cache holds."""

_DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
DTYPES = frozenset(_DTYPES)


class Scheme(IntEnum):
    """What shares a scale and a minimum."""

    TOKEN = 0
    """The elements of one row."""
    ROTATED = 1
    """The same, of the row rotated."""
    CHANNEL = 2
    """One element of up to ``GROUP_ROWS`` rows."""
    FP8 = 3
    """A row, which has a scale only; codes are e4m3."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which rows of a page group are meant, and what is done with them.

    Row ``r`` of head ``h`` is that of token ``first + r``, or of a list's ``[h, r]``, at byte
    ``token // page_tokens * page_stride + token % page_tokens * token_stride + h * head_stride`` of the page group.
    ``signs``: uint32 [dim], 0 or the sign bit, and ``rotated_run``: see ``compression/rotation.py``.
    """

    dtype: str
    scheme: Scheme
    bits: int
    heads: int
    dim: int
    count: int
    first: int
    page_tokens: int
    page_stride: int
    token_stride: int
    head_stride: int
    signs: NDArray[np.uint32]
    rotated_run: int
    norm: float

    @property
    def codes_bytes(self) -> int:
        """Codes of all heads: [heads, count, dim * bits / 8] bytes."""
        return self.heads * self.count * self.dim * self.bits // 8

    @property
    def numbers_bytes(self) -> int:
        """Scales and minima of all heads, 2 bytes each."""
        if self.scheme is Scheme.CHANNEL:
            return self.heads * -(-self.count // GROUP_ROWS) * self.dim * 4
        return self.heads * self.count * (2 if self.scheme is Scheme.FP8 else 4)


class _Job(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "scheme", "bits", "heads", "dim", "count", "first")),
        ("page_tokens", ctypes.c_int32),
        ("streams", ctypes.c_int32),
        ("rotated_run", ctypes.c_int32),
        ("norm", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("page_stride", "token_stride", "head_stride")),
        ("signs", ctypes.c_void_p),
    )


def _load() -> Any:
    loaded = library("_quantize")
    if loaded is None:
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    loaded.kv_quantize.argtypes = (pointer, size, *(pointer,) * 5, number, number)
    loaded.kv_dequantize.argtypes = (pointer, size, *(pointer,) * 4, number, number)
    loaded.kv_copy_rows.argtypes = (pointer, size, *(pointer,) * 3, number)
    for function in (loaded.kv_quantize, loaded.kv_dequantize, loaded.kv_copy_rows):
        function.restype = None
    return loaded


_native = _load()


def levels() -> tuple[str, ...]:
    """The levels of C that run here, the best last; empty where there is no C part."""
    return LEVELS[: int(_native.kv_quantize_level()) + 1] if _native is not None else ()


def quantize(
    rows: Rows, kv: Addresses, codes: Addresses, numbers: Addresses, tokens: Tokens | None, level: str, threads: int
) -> NDArray[np.bool_]:
    """Round rows of ``n`` page groups; bool [n], where a value was no number or beyond fp16 and did not survive.

    ``kv``, ``codes``, ``numbers``: uint64 [n], where page groups lie, and where ``codes_bytes`` and ``numbers_bytes``
    go. ``tokens``: int32 [n, heads, count]. Blocks, without Python's lock; ``threads`` OS threads share the heads. The
    caller answers for all memory.
    """
    lost = np.zeros((len(kv), rows.heads), np.bool_)
    job = _job(rows)
    _native.kv_quantize(
        ctypes.byref(job), len(kv), *_pointers(kv, codes, numbers, tokens, lost), LEVELS.index(level), threads
    )
    any_lost: NDArray[np.bool_] = lost.max(axis=1, initial=False)
    return any_lost


def dequantize(
    rows: Rows, kv: Addresses, codes: Addresses, numbers: Addresses, tokens: Tokens | None, level: str, threads: int
) -> None:
    """The way back, into the page groups at ``kv``. Codes and numbers may be any bytes; else as for ``quantize``."""
    job = _job(rows, streams=len(kv) * rows.heads * rows.count * rows.dim >= _STREAM_ELEMENTS)
    _native.kv_dequantize(
        ctypes.byref(job), len(kv), *_pointers(kv, codes, numbers, tokens), LEVELS.index(level), threads
    )


def copy_rows(rows: Rows, kv: Addresses, flat: Addresses, tokens: Tokens | None, *, to_flat: bool) -> None:
    """Rows as they are to ``flat``, [heads, count, row] for each page group, or from there. Blocks as ``quantize``."""
    job = _job(rows)
    _native.kv_copy_rows(ctypes.byref(job), len(kv), *_pointers(kv, flat, tokens), int(to_flat))


def _job(rows: Rows, *, streams: bool = False) -> _Job:
    ours = {"dtype": _DTYPES[rows.dtype], "signs": rows.signs.ctypes.data, "streams": int(streams)}
    return _Job(**{name: getattr(rows, name) for name, *_ in _Job._fields_ if name not in ours}, **ours)


def _pointers(*arrays: NDArray[Any] | None) -> list[int | None]:
    return [array.ctypes.data if array is not None else None for array in arrays]
