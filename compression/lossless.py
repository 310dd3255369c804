"""KV without loss: the bytes of elements apart from each other, each kind compressed by zstd at level 1.

Exponents of neighbours are alike, the rest is noise: 16 bits of bfloat16 are 8 of noise and an exponent that takes 2.4
to 2.8. Elements are turned left by one bit first, which puts the sign among the noise and the exponent of bfloat16 into
one byte. An encoded page group is the head, then for each byte of an element, the lowest first, 4 bytes (the length;
the highest bit: not compressed, as it would not have become shorter) and that many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvstore.compression.codec import CodecId, Encoded, check_batch
from kvstore.compression.payload import HEAD, Addresses, Head, Kept, Sizes, heads_of
from kvstore.compression.plane import PlaneShape
from kvstore.compression.quantize import best_engine
from kvstore.errors import BadInputError
from kvstore.native.mapping import bytes_at
from kvstore.native.quantize import DTYPES
from kvstore.types import DTYPE_BYTES

LEVEL = 1
Numbers = NDArray[np.intp]
_LENGTH = np.dtype("<u4")
_AS_IT_IS = 1 << 31


@dataclass(frozen=True)
class Lossless:
    """An exact codec; ``by_channel``: elements of one channel lie together, as is best for K."""

    id: CodecId
    by_channel: bool

    is_fixed = False

    def check(self, plane: PlaneShape) -> None:
        """As ``Codec.check``: bfloat16, float16 and float32, any dim."""
        if plane.dtype not in DTYPES:
            raise BadInputError(
                f"codec {self.id.name} takes {', '.join(sorted(DTYPES))}, not {plane.dtype}; store it raw"
            )

    def stored_bytes(self, plane: PlaneShape, kept: Kept) -> int:
        """As ``Codec.stored_bytes``: the most that an encoded page group may have. All tokens are exact."""
        self.check(plane)
        kept.check(plane)
        planes = DTYPE_BYTES[plane.dtype]
        return HEAD.itemsize + planes * (_LENGTH.itemsize + self._elements(plane, kept.tokens))

    def encode(self, plane: PlaneShape, kept: Kept, kv: Addresses, out: Addresses, threads: int = 1) -> Encoded:
        """As ``Codec.encode``; holds Python's lock for some tens of microseconds a page group."""
        self.check(plane)
        kept.check(plane)
        check_batch(kv=kv, out=out)
        all_of_it = Kept(kept.tokens)
        Head(all_of_it).put(out)
        sizes = np.empty(len(kv), np.uint64)

        def encode(numbers: Numbers) -> None:
            packer = zstandard.ZstdCompressor(level=LEVEL)
            for i in numbers.tolist():
                sizes[i] = self._encode_one(plane, all_of_it, packer, int(kv[i]), int(out[i]))

        _share(encode, np.arange(len(kv)), threads)
        return Encoded(sizes, np.zeros(len(kv), np.bool_))

    def decode(
        self, plane: PlaneShape, stored: Addresses, sizes: Sizes, kv: Addresses, threads: int = 1
    ) -> NDArray[np.bool_]:
        """As ``Codec.decode``."""
        self.check(plane)
        check_batch(kv=kv, stored=stored, sizes=sizes)
        done = np.zeros(len(kv), np.bool_)

        for head, mine in heads_of(plane, stored, sizes):
            if head.for_codec or head.kept.exact:
                continue

            def decode(numbers: Numbers, kept: Kept = head.kept) -> None:
                unpacker = zstandard.ZstdDecompressor()
                for i in numbers.tolist():
                    body = bytes_at(int(stored[i]), int(sizes[i]))[HEAD.itemsize :]
                    elements = self._decode_one(plane, kept, unpacker, body)
                    if elements is not None:
                        _copy(plane, kept, int(kv[i]), elements, to_flat=False)
                        done[i] = True

            _share(decode, mine, threads)
        return done

    def _elements(self, plane: PlaneShape, tokens: int) -> int:
        return plane.heads * tokens * plane.dim

    def _encode_one(
        self, plane: PlaneShape, kept: Kept, packer: zstandard.ZstdCompressor, kv_at: int, out_at: int
    ) -> int:
        elements = np.empty((plane.heads, kept.tokens, plane.dim), f"<u{DTYPE_BYTES[plane.dtype]}")
        _copy(plane, kept, kv_at, elements, to_flat=True)
        if self.by_channel:
            elements = elements.transpose(0, 2, 1)
        turned = np.left_shift(elements, 1, order="C")
        turned |= elements >> (8 * elements.itemsize - 1)
        out = bytes_at(out_at, self.stored_bytes(plane, kept))
        at = HEAD.itemsize
        for number in range(elements.itemsize):
            raw = (turned >> 8 * number).astype(np.uint8).ravel()
            packed = packer.compress(raw.data)
            shorter = len(packed) < len(raw)
            body = np.frombuffer(packed, np.uint8) if shorter else raw
            length = np.array([len(body) | (0 if shorter else _AS_IT_IS)], _LENGTH)
            for part in (length.view(np.uint8), body):
                out[at : at + len(part)] = part
                at += len(part)
        return at

    def _decode_one(
        self, plane: PlaneShape, kept: Kept, unpacker: zstandard.ZstdDecompressor, body: NDArray[np.uint8]
    ) -> NDArray[np.unsignedinteger] | None:
        """Elements as they were, [heads, tokens, dim]; None for bytes that can't be these."""
        itemsize, count = DTYPE_BYTES[plane.dtype], self._elements(plane, kept.tokens)
        turned = np.empty((count, itemsize), np.uint8)
        for number in range(itemsize):
            if len(body) < _LENGTH.itemsize:
                return None
            length = int(body[: _LENGTH.itemsize].view(_LENGTH)[0])
            n_bytes = length & ~_AS_IT_IS
            part, body = body[_LENGTH.itemsize : _LENGTH.itemsize + n_bytes], body[_LENGTH.itemsize + n_bytes :]
            raw = part if length & _AS_IT_IS else _unpacked(unpacker, part, count)
            if raw is None or len(part) != n_bytes or len(raw) != count:
                return None
            turned[:, number] = raw
        if len(body):
            return None
        words = turned.view(f"<u{itemsize}")
        elements = (words >> 1 | words << (8 * itemsize - 1)).astype(f"<u{itemsize}", copy=False)
        if not self.by_channel:
            return elements.reshape(plane.heads, kept.tokens, plane.dim)
        return np.ascontiguousarray(elements.reshape(plane.heads, plane.dim, kept.tokens).transpose(0, 2, 1))


def _unpacked(unpacker: zstandard.ZstdDecompressor, part: NDArray[np.uint8], count: int) -> NDArray[np.uint8] | None:
    """What zstd has made of ``count`` bytes; None for bytes that it has not. Takes no more memory than that."""
    try:
        if zstandard.frame_content_size(part.data) != count:
            return None
        return np.frombuffer(unpacker.decompress(part.data, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError:
        return None


def _copy(plane: PlaneShape, kept: Kept, kv_at: int, elements: NDArray[np.generic], *, to_flat: bool) -> None:
    """All rows of a page group to ``elements``, or from there."""
    kv = np.array([kv_at + plane.offset], np.uint64)
    flat = np.array([elements.ctypes.data], np.uint64)
    best_engine().copy(plane, kept.tokens, 0, kv, flat, to_flat=to_flat)


def _share(work: Callable[[Numbers], None], numbers: Numbers, threads: int) -> None:
    """Have ``threads`` threads do these page groups."""
    if threads <= 1 or len(numbers) <= 1:
        work(numbers)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, np.array_split(numbers, threads)))
