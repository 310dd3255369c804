"""Arrays as packed little-endian bytes, and back, with every length checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ProtocolError

U8 = np.dtype("u1")
I32 = np.dtype("<i4")
U32 = np.dtype("<u4")
I64 = np.dtype("<i8")
U64 = np.dtype("<u8")
F64 = np.dtype("<f8")
U32 = np.dtype("<u4")


def pack(values: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """Bytes of a one-dimensional array converted to ``dtype``; copies once."""
    return values.astype(dtype, copy=False).tobytes()


def unpack(name: str, data: bytes, dtype: np.dtype[Any], count: int | None = None) -> NDArray[Any]:
    """Read-only array over ``data``; raises ProtocolError if the length does not fit."""
    if len(data) % dtype.itemsize:
        raise ProtocolError(f"{name} has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    values = np.frombuffer(data, dtype)
    if count is not None and len(values) != count:
        raise ProtocolError(f"{name} has {len(values)} items; {count} were expected")
    return values
