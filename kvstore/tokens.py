"""Prompts as the wire and the index take them: token ids as little-endian uint32, hashes as uint8 rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError

TOKEN = np.dtype("<u4")


def token_array(tokens: Any) -> NDArray[np.uint32]:
    """Token ids as a contiguous uint32 array [n]; one that is so already is returned as it is.

    Takes arrays of any integer type, and sequences of integers. Raises BadInputError for another type or
    shape, and for ids outside 0..2**32-1.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadInputError(f"tokens are no array of integers: {error}") from None
    if array.dtype.kind in "US":
        raise BadInputError(f"tokens are text, {str(tokens)!r:.40}: tokenise it first, and give the token ids")
    if array.ndim != 1:
        raise BadInputError(f"tokens have shape {array.shape}; give one dimension")
    if array.size == 0:
        return np.empty(0, TOKEN)
    if array.dtype.kind not in "iu":
        raise BadInputError(f"tokens are {array.dtype}; give integers, best uint32")
    if array.dtype != TOKEN:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 1 << 32:
            raise BadInputError(f"token id {low if low < 0 else high} is out of range; ids are 0 to {(1 << 32) - 1}")
    return np.ascontiguousarray(array, TOKEN)


def hash_array(hashes: Any, hash_bytes: int) -> NDArray[np.uint8]:
    """Engine hashes as a contiguous uint8 array [n, hash_bytes], from one, or from a sequence of bytes.

    Raises BadInputError for another type, shape or length.
    """
    if not isinstance(hashes, np.ndarray):
        try:
            items = [bytes(_bytes_like(item)) for item in hashes]
        except TypeError as error:
            raise BadInputError(f"hashes are no sequence of bytes: {error}") from None
        wrong = next((item for item in items if len(item) != hash_bytes), None)
        if wrong is not None:
            raise BadInputError(f"a hash has {len(wrong)} bytes; this namespace has hash_bytes {hash_bytes}")
        return np.frombuffer(b"".join(items), np.uint8).reshape(-1, hash_bytes)
    if hashes.dtype != np.uint8 or hashes.ndim != 2 or hashes.shape[1] != hash_bytes:
        raise BadInputError(f"hashes are {hashes.dtype} of shape {hashes.shape}; give uint8 of shape [n, {hash_bytes}]")
    return np.ascontiguousarray(hashes)


def _bytes_like(item: Any) -> Any:
    """``bytes(8)`` is eight zeros: a number is no hash, whatever its length would be."""
    if isinstance(item, bytes | bytearray | memoryview):
        return item
    if isinstance(item, np.ndarray) and item.dtype == np.uint8:
        return item
    raise TypeError(f"one is {item!r:.40}, a {type(item).__name__}")
