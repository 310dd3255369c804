"""Blocks in chunks: copied between their memory and messages, with a checksum for each.

Checksums are made of what is sent, and compared with what has come, while it is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import UnavailableError
from kvstore.native import copy_batch
from kvstore.native.checksum import checksums
from kvstore.wire.chunks import Span, frame_data
from kvstore.wire.packing import U64, pack, unpack

Addresses = NDArray[np.uint64]


class DamagedError(UnavailableError):
    """What has arrived is not what was sent."""


def chunk_of(addresses: Addresses, span: Span, fill: Callable[[bytes], bytes]) -> bytes:
    """A message with a piece of the blocks at ``addresses`` (uint64 [n]). Blocks for the copy, without Python's lock.

    ``fill(checksums)`` gives its other fields, serialized; equally long for equally long checksums.
    """
    blocks, in_block, in_span, sizes = span.pieces()
    n_ended = span.ended.stop - span.ended.start
    chunk = frame_data(span.n_bytes, len(fill(bytes(8 * n_ended))))
    copy_batch(np.uint64(chunk.data_address) + in_span, addresses[blocks] + in_block, sizes, streaming=False)
    chunk.write_rest(fill(pack(_sums(addresses, span, chunk.data_address), U64)))
    return chunk.message


def take_chunk(addresses: Addresses, span: Span, data: memoryview, sent: bytes) -> None:
    """Copy a piece that came to the blocks at ``addresses``. Blocks as ``chunk_of``.

    Raises DamagedError if a block that it ends differs from its checksum, ProtocolError if those are too few or many.
    """
    blocks, in_block, in_span, sizes = span.pieces()
    expected = unpack("checksums", sent, U64, span.ended.stop - span.ended.start)
    source = np.frombuffer(data, np.uint8).ctypes.data
    whole = span.n_whole == len(expected)
    if whole:
        _compare(_sums(addresses, span, source), expected)
    copy_batch(addresses[blocks] + in_block, np.uint64(source) + in_span, sizes)
    if not whole:
        _compare(_sums(addresses, span, source), expected)


def _sums(addresses: Addresses, span: Span, data_address: int) -> Addresses:
    """Of the blocks that a piece ends: from the piece itself where it has all of them, else where they lie."""
    ended, block_bytes = span.ended, np.uint64(span.block_bytes)
    n = ended.stop - ended.start
    if not n:
        return np.empty(0, np.uint64)
    if span.n_whole == n:
        at = np.uint64(data_address) + np.uint64(ended.start * span.block_bytes - span.offset)
        return checksums(at + np.arange(n, dtype=np.uint64) * block_bytes, np.full(n, block_bytes))
    return checksums(addresses[ended], np.full(n, block_bytes))


def _compare(actual: Addresses, expected: Addresses) -> None:
    if not (actual == expected).all():
        n_bad = int((actual != expected).sum())
        raise DamagedError(f"{n_bad} of {len(expected)} blocks did not arrive as they were sent")
