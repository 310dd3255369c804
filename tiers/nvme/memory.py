"""The bytes of an extent as arrays, memory that unbuffered writes may come from, and writes that break off."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from kvstore.native.mapping import bytes_at
from kvstore.tiers.nvme.files import Extent

Bytes = NDArray[np.uint8]

TORN_BYTES = 512
"""What a disk writes wholly or not at all."""


def gather(extent: Extent) -> Bytes:
    """A copy of the bytes in memory, uint8 ``[length]``."""
    if not extent.buffers:
        return np.empty(0, dtype=np.uint8)
    return np.concatenate([bytes_at(address, length) for address, length in extent.buffers])


def scatter(extent: Extent, start_bytes: int, data: Bytes) -> None:
    """Put bytes into the memory of an extent from ``start_bytes`` on."""
    at = 0
    for address, length in extent.part(start_bytes, start_bytes + len(data)).buffers:
        bytes_at(address, length)[:] = data[at : at + length]
        at += length


def aligned(data: Bytes) -> Bytes:
    """A copy that starts on a page."""
    copy: Bytes = np.frombuffer(mmap.mmap(-1, max(len(data), 1)), dtype=np.uint8)[: len(data)]
    copy[:] = data
    return copy


def extent_of(offset: int, data: Bytes) -> Extent:
    """An extent over the memory of an array, which the caller keeps."""
    return Extent(offset, ((data.ctypes.data, len(data)),))


def torn(rng: np.random.Generator, old: Bytes, new: Bytes) -> Bytes:
    """What a write that broke off leaves: leading or scattered ``TORN_BYTES`` of ``new``, never all; else ``old``.

    Both are uint8 ``[length]``; returns a copy.
    """
    n_pieces = -(-len(new) // TORN_BYTES)
    if rng.random() < 0.5:
        arrived = np.arange(n_pieces) < rng.integers(0, n_pieces)
    else:
        arrived = rng.random(n_pieces) < rng.random()
        arrived[rng.integers(0, n_pieces)] = False
    return np.where(np.repeat(arrived, TORN_BYTES)[: len(new)], new, old)
