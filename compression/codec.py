"""Codecs by the byte that names them in a frame, and what each of them can do.

A codec turns one plane of a page group into bytes of its own and back, in batches of page groups of one shape.
docs/FORMAT.md has the bytes of each. Numbers are on disks and on other hosts: they are added to, never reused.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.payload import Addresses, Kept, Sizes
from kvstore.compression.plane import PlaneShape
from kvstore.errors import BadInputError


class CodecId(IntEnum):
    """The numbers, in PLANE.codec of a frame."""

    RAW = 0
    Q8 = 1
    Q4 = 2
    Q2 = 3
    Q8_ROTATED = 4
    Q4_ROTATED = 5
    Q2_ROTATED = 6
    Q8_CHANNEL = 7
    Q4_CHANNEL = 8
    Q2_CHANNEL = 9
    FP8 = 10
    BYTES = 11
    BYTES_CHANNEL = 12
    Q8_Q4_CHANNEL = 13
    Q4_Q2_ROTATED = 14


class Encoded(NamedTuple):
    """What has become of ``n`` page groups.

    ``sizes``: uint64 [n], bytes of each. ``lost``: bool [n], where a value was NaN or beyond what fp16 holds and was
    replaced; keep such a page group in a lossless codec if that matters.
    """

    sizes: Sizes
    lost: NDArray[np.bool_]


class Codec(Protocol):
    """One way to store a plane. Never changes; safe to use from any thread."""

    @property
    def id(self) -> CodecId:
        """The number in a frame."""

    @property
    def is_fixed(self) -> bool:
        """Whether every page group of one shape has exactly ``stored_bytes`` bytes."""

    def check(self, plane: PlaneShape) -> None:
        """Raises BadInputError for a plane that this codec can't store, and says why."""

    def stored_bytes(self, plane: PlaneShape, kept: Kept) -> int:
        """How much room an encoded page group needs. Raises BadInputError as ``check``."""

    def encode(self, plane: PlaneShape, kept: Kept, kv: Addresses, out: Addresses, threads: int = 1) -> Encoded:
        """Encode ``n`` page groups that lie at ``kv`` into ``stored_bytes`` bytes at each of ``out``; uint64 [n] both.

        Blocks, for the bulk of it without Python's lock where there is a C part. Raises BadInputError as ``check``.
        The caller answers for all memory being mapped, and for no two ranges that overlap.
        """

    def decode(
        self, plane: PlaneShape, stored: Addresses, sizes: Sizes, kv: Addresses, threads: int = 1
    ) -> NDArray[np.bool_]:
        """Decode ``n`` page groups, ``sizes`` bytes (uint64 [n]) at ``stored``, into the plane's rows at ``kv``.

        bool [n]: False where the bytes can't be of this codec and shape; rows there are as they were or undefined.
        Never raises for bad bytes and never writes elsewhere, whatever they are: but only a checksum tells whether
        they are those that were written. Blocks, and raises BadInputError, as ``encode``.
        """


def check_batch(**arrays: NDArray[np.uint64]) -> None:
    """Raises BadInputError unless all are uint64 [n] with the same n."""
    n = len(next(iter(arrays.values())))
    for name, array in arrays.items():
        if array.dtype != np.uint64 or array.shape != (n,):
            raise BadInputError(f"{name} is {array.dtype} {array.shape}; give uint64 [{n}], one for each page group")
