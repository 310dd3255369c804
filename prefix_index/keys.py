"""Canonical block keys: a BLAKE2b chain over rows, equal in every process and on every host.

The key of a block names its whole prefix: it hashes the parent's key, the row's bytes and, where a row
is covered by extra keys (an image behind placeholder tokens), their digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.native.blockkeys import chained_keys
from kvstore.types import KEY_BYTES

EXTRA_DIGEST_BYTES = 16
"""Length of the digest that stands for all extra keys of one row."""

_BLOCK = b"kvstore.block.1"
_PART = b"kvstore.part.1"
_EXTRA = b"kvstore.extra.1"


def block_key(parent: bytes, row: bytes, extra_digest: bytes = b"") -> bytes:
    """The 16-byte key of the block with this row below ``parent`` (a block key or a root key).

    The parent has a fixed length and the last byte hashed is the digest's length, so that two different
    triples never hash the same bytes. No digest and an empty one are the same thing.
    Raises BadInputError for a parent that is not 16 bytes or a digest longer than 255.
    """
    if len(parent) != KEY_BYTES:
        raise BadInputError(f"parent is {len(parent)} bytes; a block key or root key has {KEY_BYTES}")
    if len(extra_digest) > 255:
        raise BadInputError(f"extra_digest is {len(extra_digest)} bytes; at most 255 fit")
    message = b"".join((parent, row, extra_digest, bytes((len(extra_digest),))))
    return blake2b(message, digest_size=KEY_BYTES, person=_BLOCK).digest()


def block_keys(parent: bytes, rows: memoryview, row_bytes: int) -> NDArray[np.uint8]:
    """The keys of the plain rows that lie end to end in ``rows``, each below the one before: uint8 [n, 16].

    ``rows``: bytes, contiguous, whole rows of ``row_bytes``. Raises BadInputError for a parent that is not 16 bytes.
    """
    if len(parent) != KEY_BYTES:
        raise BadInputError(f"parent is {len(parent)} bytes; a block key or root key has {KEY_BYTES}")
    keys = chained_keys(parent, rows, row_bytes, _BLOCK)
    if keys is not None:
        return keys
    out = []
    for start in range(0, rows.nbytes, row_bytes):
        parent = block_key(parent, bytes(rows[start : start + row_bytes]))
        out.append(parent)
    return np.frombuffer(b"".join(out), np.uint8).reshape(-1, KEY_BYTES)


def part_tag(number: int) -> bytes:
    """16 bytes that stand for the parts of blocks with this number, 1 to 255."""
    return blake2b(bytes((number,)), digest_size=EXTRA_DIGEST_BYTES, person=_PART).digest()


def part_key(block: bytes, number: int) -> bytes:
    """The key of a part of the block with this key: as of a block below it without a row, which no row is."""
    return block_key(block, b"", part_tag(number))


def extra_digest(parts: Iterable[tuple[int, int, int, bytes]]) -> bytes:
    """Digest of the extra keys that cover one row, in order of their place.

    A part is (first covered token of the row, covered tokens of the row, tokens of the same item that
    lie in earlier rows, the item's digest).
    """
    state = blake2b(digest_size=EXTRA_DIGEST_BYTES, person=_EXTRA)
    for first_token, n_tokens, skipped_tokens, digest in parts:
        for number in (first_token, n_tokens, skipped_tokens, len(digest)):
            state.update(number.to_bytes(4, "little"))
        state.update(digest)
    return state.digest()
