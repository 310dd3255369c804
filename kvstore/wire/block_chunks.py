"""Blocks in chunks: copied between their memory and messages, with a checksum for each.

Checksums are made of what is sent, and compared with what has come, while it is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import UnavailableError
from kvstore.native.spans import CheckedCopy
from kvstore.wire.chunks import Span, frame_data
from kvstore.wire.packing import U64, pack, unpack


class DamagedError(UnavailableError):
    """What has arrived is not what was sent."""


class BlockChunks:
    """The blocks at ``addresses`` (uint64 [n]), as chunks that follow each other. For one thread at a time."""

    def __init__(self, addresses: NDArray[np.uint64], block_bytes: int) -> None:
        self._copy = CheckedCopy(addresses, block_bytes)

    def chunk_of(self, span: Span, fill: Callable[[bytes], bytes]) -> bytes:
        """A message with a piece of the blocks. Blocks for the copy, without Python's lock.

        ``fill(checksums)`` gives its other fields, serialized; equally long for equally long checksums.
        """
        chunk = frame_data(span.n_bytes, len(fill(bytes(8 * span.n_ended))))
        sums = self._copy.gather(span.offset, span.n_bytes, chunk.data_address)
        chunk.write_rest(fill(pack(sums, U64)))
        return chunk.message

    def take(self, span: Span, data: memoryview, sent: bytes) -> None:
        """Copy a piece that came to the blocks. Blocks as ``chunk_of``.

        Raises DamagedError if a block that it ends differs from its checksum, found while it is copied; ProtocolError
        if there are too few checksums or too many, before anything is.
        """
        expected = unpack("checksums", sent, U64, span.n_ended)
        actual = self._copy.scatter(span.offset, span.n_bytes, np.frombuffer(data, np.uint8).ctypes.data)
        if not np.array_equal(actual, expected):
            n_bad = int((actual != expected).sum())
            raise DamagedError(f"{n_bad} of {len(expected)} blocks did not arrive as they were sent")
