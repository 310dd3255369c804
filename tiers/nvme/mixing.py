"""A checksum over fixed-size records, computed for many of them at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_FOLD = np.uint64(29)


def record_checksums(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """uint32 [n] for uint64 [k, n]: any change of one word changes it, but for one chance in 2**32.

    Word j goes through a bijection and is multiplied by an odd constant of its own, so that words that
    change places count as well. Against accidents, not against forgers.
    """
    mixed = np.zeros(words.shape[1], np.uint64)
    for j, column in enumerate(words):
        factor = np.uint64((2 * j + 1) * int(_SPREAD) & 0xFFFFFFFFFFFFFFFF)
        mixed += (column ^ (column >> _FOLD)) * factor
    mixed ^= mixed >> _HALF
    sums: NDArray[np.uint32] = ((mixed * _SPREAD) >> _HALF).astype(np.uint32)
    return sums
