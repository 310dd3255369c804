"""The ways in which bytes get between host memory and a GPU, and the pieces that are moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]


class Direction(StrEnum):
    """Seen from the engine."""

    LOAD = "load"
    """Host memory to the GPU."""
    STORE = "store"
    """The GPU to host memory."""


class Way(StrEnum):
    """How the bytes cross the link."""

    COPY = "copy"
    """One call to the copy engine for each piece."""
    BATCH = "batch"
    """One call to the copy engine for many pieces."""
    KERNEL = "kernel"
    """A kernel of few thread blocks moves pieces between mapped host memory and the GPU's own, beside other work."""
    ZERO_COPY = "zero-copy"
    """Kernels work on mapped host memory where it lies; nothing is kept in the GPU's own."""


STAGED = (Way.COPY, Way.BATCH, Way.KERNEL)
"""Ways after which the bytes lie in the GPU's own memory."""
MAPPED = (Way.KERNEL, Way.ZERO_COPY)
"""Ways that need host memory to have an address for kernels."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of one size to be moved; uint64 ``[n]`` each.

    ``host``: where each lies in host memory, for copies; ``mapped``: the same for kernels; ``device``: in the GPU's.
    """

    direction: Direction
    host: Addresses
    mapped: Addresses
    device: Addresses
    piece_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of all."""
        return len(self.host) * self.piece_bytes


Mover = Callable[[Pieces, int], None]
"""Gives the moves to a stream, and does not wait for them."""
