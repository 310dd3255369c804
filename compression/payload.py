"""How an encoded page group begins: which of its tokens are there, and which of them are kept exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.plane import PlaneShape
from kvstore.errors import BadInputError
from kvstore.native.memcopy import copy_batch

Addresses = NDArray[np.uint64]
Sizes = NDArray[np.uint64]

HEAD = np.dtype(
    [("tokens", "<u4"), ("exact_first", "<u2"), ("exact_last", "<u2"), ("for_codec", "<u4"), ("reserved", "<u4")]
)
"""The first 16 bytes of an encoded page group."""

EXACT_MAX = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a page group is stored: its first ``tokens`` tokens, the rest is not defined after decoding.

    The first ``exact_first`` of them (attention sinks) and the last ``exact_last`` (recent ones) are stored as is.
    """

    tokens: int
    exact_first: int = 0
    exact_last: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise BadInputError(f"tokens is {self.tokens}; a page group that is stored has one or more")
        for name in ("exact_first", "exact_last"):
            if not 0 <= getattr(self, name) <= EXACT_MAX:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be from 0 to {EXACT_MAX}")
        object.__setattr__(self, "exact_first", min(self.exact_first, self.tokens))
        object.__setattr__(self, "exact_last", min(self.exact_last, self.tokens - self.exact_first))

    @property
    def exact(self) -> int:
        """Tokens that are stored as they are."""
        return self.exact_first + self.exact_last

    @property
    def rounded(self) -> int:
        """Tokens that are not."""
        return self.tokens - self.exact

    def check(self, plane: PlaneShape) -> None:
        """Raises BadInputError where a page group has not as many tokens."""
        if self.tokens > plane.tokens:
            raise BadInputError(f"tokens is {self.tokens}; a page group of this shape has {plane.tokens}")


@dataclass(frozen=True, slots=True)
class Head:
    """What ``HEAD`` says."""

    kept: Kept
    for_codec: int = 0

    def put(self, addresses: Addresses) -> None:
        """Write it at each address."""
        record = np.zeros(1, HEAD)
        record["tokens"], record["for_codec"] = self.kept.tokens, self.for_codec
        record["exact_first"], record["exact_last"] = self.kept.exact_first, self.kept.exact_last
        sources = np.full(len(addresses), record.ctypes.data, np.uint64)
        copy_batch(addresses, sources, HEAD.itemsize, streaming=False)


def heads_of(plane: PlaneShape, addresses: Addresses, sizes: Sizes) -> Iterator[tuple[Head, NDArray[np.intp]]]:
    """Each head that there is among ``n`` encoded page groups of a shape, with the numbers of those that have it.

    Page groups that are too short for one, or whose head contradicts itself or the shape, are left out.
    """
    long_enough = np.flatnonzero(sizes >= HEAD.itemsize)
    heads = np.empty(len(long_enough), HEAD)
    to = np.uint64(heads.ctypes.data) + np.arange(len(heads), dtype=np.uint64) * np.uint64(HEAD.itemsize)
    copy_batch(to, np.ascontiguousarray(addresses[long_enough]), HEAD.itemsize, streaming=False)
    kinds, kind_of = np.unique(heads.view(f"V{HEAD.itemsize}"), return_inverse=True)
    for number, kind in enumerate(kinds.view(HEAD)):
        tokens, exact_first, exact_last, for_codec, reserved = kind.item()
        if 0 < tokens <= plane.tokens and exact_first + exact_last <= tokens and not reserved:
            yield Head(Kept(tokens, exact_first, exact_last), for_codec), long_enough[kind_of == number]
