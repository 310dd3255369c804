"""The codec that stores a plane as it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codec import CodecId, Encoded, check_batch
from kvstore.compression.payload import Addresses, Kept, Sizes
from kvstore.compression.plane import PlaneShape
from kvstore.native.memcopy import copy_batch


@dataclass(frozen=True)
class Raw:
    """Pages of a plane one after the other, all of their tokens, without a head."""

    id = CodecId.RAW
    is_fixed = True

    def check(self, plane: PlaneShape) -> None:
        """As ``Codec.check``: takes everything."""

    def stored_bytes(self, plane: PlaneShape, kept: Kept) -> int:
        """As ``Codec.stored_bytes``."""
        kept.check(plane)
        return plane.raw_bytes

    def encode(self, plane: PlaneShape, kept: Kept, kv: Addresses, out: Addresses, threads: int = 1) -> Encoded:
        """As ``Codec.encode``."""
        kept.check(plane)
        check_batch(kv=kv, out=out)
        copy_batch(_pages(out, plane, plane.part_bytes), self._parts(plane, kv), plane.part_bytes, threads)
        return Encoded(np.full(len(kv), plane.raw_bytes, np.uint64), np.zeros(len(kv), np.bool_))

    def decode(
        self, plane: PlaneShape, stored: Addresses, sizes: Sizes, kv: Addresses, threads: int = 1
    ) -> NDArray[np.bool_]:
        """As ``Codec.decode``."""
        check_batch(kv=kv, stored=stored, sizes=sizes)
        fits: NDArray[np.bool_] = sizes == plane.raw_bytes
        stored_pages = _pages(stored[fits], plane, plane.part_bytes)
        copy_batch(self._parts(plane, kv[fits]), stored_pages, plane.part_bytes, threads)
        return fits

    def _parts(self, plane: PlaneShape, kv: Addresses) -> Addresses:
        return _pages(kv + np.uint64(plane.offset), plane, plane.page_stride)


def _pages(at: Addresses, plane: PlaneShape, stride: int) -> Addresses:
    """Where the pages of each page group lie, uint64 [n * pages]."""
    return (at[:, None] + np.arange(plane.pages, dtype=np.uint64) * np.uint64(stride)).ravel()
