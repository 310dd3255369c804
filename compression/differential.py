"""Two precisions in one plane: tokens that matter in more bits than the others, head by head.

An encoded page group is: the head (with the number of high tokens of each head), codes of high tokens, codes of low
ones, exact rows, numbers of high tokens, of low ones, and for each head a bit per rounded token, set for high ones.
Tokens of equal precision lie together in their order, so decoding is two passes like those of ``Quantizer``, and groups
of 32 tokens that share the numbers of a channel are of one precision. After DiffKV (SOSP 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codec import Encoded, check_batch
from kvstore.compression.payload import HEAD, Addresses, Head, Kept, Sizes, heads_of
from kvstore.compression.plane import PlaneShape
from kvstore.compression.quantize import Rounding, rows_of
from kvstore.errors import BadInputError
from kvstore.native.memcopy import copy_batch
from kvstore.native.quantize import Rows, Tokens

High = NDArray[np.bool_]


def most_significant(significance: NDArray[np.floating], kept: Kept, share: float) -> High:
    """Which rounded tokens are the ``share`` (0 to 1) of highest significance in each head; bool [n, heads, rounded].

    ``significance``: [n, heads, kept.tokens], for instance the mean attention a token receives from later ones. Equal
    ones go by position, NaN is the lowest. Raises BadInputError for another shape or share.
    """
    if significance.ndim != 3 or significance.shape[2] != kept.tokens or not 0 <= share <= 1:
        raise BadInputError(
            f"significance has shape {significance.shape} and share is {share}; "
            f"give [n, heads, {kept.tokens}] and a share from 0 to 1"
        )
    rounded = significance[:, :, kept.exact_first : kept.exact_first + kept.rounded]
    lowest_first = np.where(np.isnan(rounded), np.inf, -rounded)
    n_high = round(share * kept.rounded)
    high = np.zeros(rounded.shape, np.bool_)
    np.put_along_axis(high, np.argsort(lowest_first, axis=2, kind="stable")[:, :, :n_high], True, axis=2)
    return high


class _Places(NamedTuple):
    """Both kinds of rows, and where their codes and numbers, exact rows and the bits of page groups lie."""

    high: Rows
    low: Rows
    codes: tuple[Addresses, Addresses]
    exact: Addresses
    numbers: tuple[Addresses, Addresses]
    bits: Addresses


@dataclass(frozen=True)
class Differential(Rounding):
    """A codec of two precisions, ``bits_high`` and ``bits_low``."""

    bits_high: int
    bits_low: int

    def stored_bytes(self, plane: PlaneShape, kept: Kept, n_high: int = 0) -> int:
        """As ``Codec.stored_bytes``, with ``n_high`` high tokens in each head."""
        self.check(plane)
        kept.check(plane)
        high, low = self._rows(plane, kept, n_high)
        rows_bytes = high.codes_bytes + low.codes_bytes + high.numbers_bytes + low.numbers_bytes
        exact_bytes = kept.exact * plane.heads * plane.row_bytes
        return HEAD.itemsize + rows_bytes + exact_bytes + _bits_bytes(plane, kept)

    def encode(
        self,
        plane: PlaneShape,
        kept: Kept,
        kv: Addresses,
        out: Addresses,
        threads: int = 1,
        high: High | None = None,
    ) -> Encoded:
        """As ``Codec.encode``. ``high``: bool [n, heads, kept.rounded], as many in each head; None for none.

        Give ``out`` the ``stored_bytes`` of that many. Raises BadInputError also for another ``high``.
        """
        check_batch(kv=kv, out=out)
        if high is None:
            high = np.zeros((len(kv), plane.heads, kept.rounded), np.bool_)
        n_high = _count_of(high, (len(kv), plane.heads, kept.rounded))
        size = self.stored_bytes(plane, kept, n_high)
        Head(kept, n_high).put(out)
        places = self._places(plane, kept, n_high, out)
        kv = kv + np.uint64(plane.offset)
        self._engine.copy_exact(plane, kept, kv, places.exact, to_flat=True)
        lost = np.zeros(len(kv), np.bool_)
        for number, rows in enumerate((places.high, places.low)):
            tokens = _tokens(high if number == 0 else ~high, kept)
            lost |= self._engine.quantize(rows, kv, places.codes[number], places.numbers[number], tokens, threads)
        bits = np.packbits(high, axis=2, bitorder="little").reshape(len(kv), -1)
        _move(bits, places.bits, to_memory=True)
        return Encoded(np.full(len(kv), size, np.uint64), lost)

    def decode(
        self, plane: PlaneShape, stored: Addresses, sizes: Sizes, kv: Addresses, threads: int = 1
    ) -> NDArray[np.bool_]:
        """As ``Codec.decode``."""
        self.check(plane)
        check_batch(kv=kv, stored=stored, sizes=sizes)
        done = np.zeros(len(kv), np.bool_)
        for head, mine in heads_of(plane, stored, sizes):
            n_high, kept = head.for_codec, head.kept
            if n_high > kept.rounded:
                continue
            fits = mine[sizes[mine] == self.stored_bytes(plane, kept, n_high)]
            if not len(fits):
                continue
            bits = np.empty((len(fits), _bits_bytes(plane, kept)), np.uint8)
            _move(bits, self._places(plane, kept, n_high, stored[fits]).bits, to_memory=False)
            all_high = np.unpackbits(
                bits.reshape(len(fits), plane.heads, _bits_bytes(plane, kept) // plane.heads), axis=2, bitorder="little"
            )
            high = all_high[:, :, : kept.rounded].astype(np.bool_)
            good = (high.sum(axis=2) == n_high).all(axis=1) & ~all_high[:, :, kept.rounded :].any(axis=(1, 2))
            fits, high = fits[good], high[good]
            places, to = self._places(plane, kept, n_high, stored[fits]), kv[fits] + np.uint64(plane.offset)
            for number, rows in enumerate((places.high, places.low)):
                tokens = _tokens(high if number == 0 else ~high, kept)
                self._engine.dequantize(rows, to, places.codes[number], places.numbers[number], tokens, threads)
            self._engine.copy_exact(plane, kept, to, places.exact, to_flat=False)
            done[fits] = True
        return done

    def _rows(self, plane: PlaneShape, kept: Kept, n_high: int) -> tuple[Rows, Rows]:
        return (
            rows_of(plane, self.scheme, self.bits_high, n_high),
            rows_of(plane, self.scheme, self.bits_low, kept.rounded - n_high),
        )

    def _places(self, plane: PlaneShape, kept: Kept, n_high: int, at: Addresses) -> _Places:
        high, low = self._rows(plane, kept, n_high)
        exact_bytes = kept.exact * plane.heads * plane.row_bytes
        sizes = (HEAD.itemsize, high.codes_bytes, low.codes_bytes, exact_bytes, high.numbers_bytes, low.numbers_bytes)
        starts = [at + np.uint64(start) for start in np.cumsum(sizes)]
        return _Places(high, low, (starts[0], starts[1]), starts[2], (starts[3], starts[4]), starts[5])


def _bits_bytes(plane: PlaneShape, kept: Kept) -> int:
    return plane.heads * -(-kept.rounded // 8)


def _count_of(high: High, shape: tuple[int, ...]) -> int:
    if high.dtype != np.bool_ or high.shape != shape:
        raise BadInputError(f"high is {high.dtype} {high.shape}; give bool {list(shape)}")
    counts = np.unique(high.sum(axis=2))
    if len(counts) > 1:
        raise BadInputError(f"heads have from {counts[0]} to {counts[-1]} high tokens; give each as many")
    return int(counts[0]) if len(counts) else 0


def _tokens(chosen: High, kept: Kept) -> Tokens:
    """Their numbers, int32 [n, heads, as many as are chosen in a head]."""
    tokens = np.nonzero(chosen)[2].astype(np.int32) + np.int32(kept.exact_first)
    return tokens.reshape(*chosen.shape[:2], -1) if chosen.size else np.zeros((*chosen.shape[:2], 0), np.int32)


def _move(rows: NDArray[np.uint8], addresses: Addresses, *, to_memory: bool) -> None:
    """Rows of uint8 [n, row] to as many addresses, or from there."""
    mine = np.uint64(rows.ctypes.data) + np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.shape[1])
    to, source = (addresses, mine) if to_memory else (mine, addresses)
    copy_batch(to, source, rows.shape[1], streaming=False)
