"""Memory for direct I/O and native copies, as numpy arrays and as addresses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ALIGNMENT_BYTES = 4096


def aligned_bytes(n_bytes: int) -> NDArray[np.uint8]:
    """uint8 [n_bytes] that starts at a multiple of 4096; contents undefined."""
    raw = np.empty(n_bytes + ALIGNMENT_BYTES, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[skip : skip + n_bytes]


def row_addresses(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Where each row of a C-contiguous uint8 [n, row_bytes] lies, uint64 [n]; valid while ``rows`` lives."""
    n, row_bytes = rows.shape
    return np.uint64(rows.ctypes.data) + np.arange(n, dtype=np.uint64) * np.uint64(row_bytes)
