"""Block bytes that follow from a block's key, so that every byte read back can be checked.

A block is cut into equal segments (one per block, or one per token for workloads with token ids). Each
segment is a slice of a fixed random buffer, XORed word by word with a mixed 64-bit key of its own: another
key changes every word, another place in the block finds another part of the buffer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.types import MAX_BLOCK_BYTES

WORD_BYTES = 8
_BUFFER_SEED = 0x6B76
# An odd multiplier has an inverse modulo 2^64, which `prefix_keys` needs.
_CHAIN_FACTOR = 0x9E3779B97F4A7C15
_WORD_BITS = 64


def mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words in which every input bit reaches every output bit (as in splitmix64)."""
    z = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def prefix_keys(tokens: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """A key per token that depends on all tokens up to it and their order, uint64 [n].

    A polynomial hash modulo 2^64: key[t] = sum of mix(token[i]) * F^(t-i) for i <= t. It shares nothing with
    the store's own block keys, so that a collision there shows as a mismatch here.
    """
    n = len(tokens)
    powers = np.ones(n, dtype=np.uint64)
    inverse = np.ones(n, dtype=np.uint64)
    powers[1:] = np.uint64(_CHAIN_FACTOR)
    inverse[1:] = np.uint64(pow(_CHAIN_FACTOR, -1, 1 << _WORD_BITS))
    np.multiply.accumulate(powers, out=powers)
    np.multiply.accumulate(inverse, out=inverse)
    sums = np.add.accumulate(mix(tokens.astype(np.uint64)) * inverse)
    return sums * powers


class Payload:
    """Makes and checks blocks of ``block_bytes`` bytes cut into ``segments`` segments."""

    def __init__(self, block_bytes: int, seed: int = 0, segments: int = 1) -> None:
        if not 1 <= block_bytes <= MAX_BLOCK_BYTES:
            raise BadInputError(f"block_bytes is {block_bytes}; it must be in 1..{MAX_BLOCK_BYTES}")
        if segments > 1 and block_bytes % (segments * WORD_BYTES):
            raise BadInputError(
                f"block_bytes is {block_bytes}; for a payload per token it must be a multiple of "
                f"{segments * WORD_BYTES} (8 bytes for each of {segments} tokens)"
            )
        self.block_bytes = block_bytes
        self.segments = segments
        self._salt = mix(np.array([seed], dtype=np.uint64))[0]
        words, tail_bytes = divmod(block_bytes, WORD_BYTES)
        rng = np.random.default_rng(_BUFFER_SEED)
        self._base = rng.integers(0, 1 << 64, size=(segments, words // segments), dtype=np.uint64)
        self._base_tail = rng.integers(0, 256, size=tail_bytes, dtype=np.uint8)
        self._scratch = np.empty_like(self._base)
        self._differs = np.empty(self._base.shape, dtype=np.bool_)

    def masks(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """What the buffer is XORed with: uint64 [n, segments] for keys of shape [n] or [n, segments]."""
        mixed = mix(keys.reshape(len(keys), -1) ^ self._salt)
        if mixed.shape[1] != self.segments:
            raise BadInputError(f"{mixed.shape[1]} keys a block given; this payload has {self.segments} segments")
        return mixed

    def fill(self, keys: NDArray[np.uint64], out: NDArray[np.uint8]) -> None:
        """Write the blocks of ``keys`` (as for ``masks``) into ``out`` (uint8 [n, block_bytes])."""
        masks = self.masks(keys)
        body = out[:, : self._base.nbytes].view(np.uint64)
        for row, mask in zip(body, masks, strict=True):
            np.bitwise_xor(self._base, mask[:, None], out=row.reshape(self._base.shape))
        if len(self._base_tail):
            out[:, self._base.nbytes :] = self._tails(masks)

    def matches(self, block: NDArray[np.uint8], masks: NDArray[np.uint64], n_segments: int | None = None) -> bool:
        """Whether every byte of one block (uint8 [block_bytes]) is as it must be.

        ``masks`` is one row of what ``masks()`` gave; ``n_segments`` compares leading segments only.
        """
        n = self.segments if n_segments is None else n_segments
        body = block[: self._base.nbytes].view(np.uint64).reshape(self._base.shape)
        np.bitwise_xor(body[:n], masks[:n, None], out=self._scratch[:n])
        np.not_equal(self._scratch[:n], self._base[:n], out=self._differs[:n])
        if self._differs[:n].any():
            return False
        if not len(self._base_tail):
            return True
        return bool(np.array_equal(block[self._base.nbytes :], self._tails(masks[None])[0]))

    def count_mismatches(self, blocks: NDArray[np.uint8], keys: NDArray[np.uint64]) -> int:
        """How many of ``blocks`` (uint8 [n, block_bytes]) differ anywhere from what ``keys`` say."""
        masks = self.masks(keys)
        return sum(not self.matches(block, mask) for block, mask in zip(blocks, masks, strict=True))

    def _tails(self, masks: NDArray[np.uint64]) -> NDArray[np.uint8]:
        mask_bytes = np.ascontiguousarray(masks[:, :1]).view(np.uint8)
        tails: NDArray[np.uint8] = mask_bytes[:, : len(self._base_tail)] ^ self._base_tail
        return tails
