"""KV rounded to 8, 4 or 2 bits or to fp8, with exact first and last tokens.

An encoded page group is: the head (``payload.HEAD``), codes, exact rows, numbers (scales and minima). All sizes follow
from the shape. Rows go head by head, whatever the engine's layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvstore.compression import quantize_numpy
from kvstore.compression.codec import CodecId, Encoded, check_batch
from kvstore.compression.payload import HEAD, Addresses, Head, Kept, Sizes, heads_of
from kvstore.compression.plane import PlaneShape
from kvstore.compression.rotation import norm_of, run_of, signs_of
from kvstore.errors import BadInputError
from kvstore.native import quantize as native
from kvstore.native.quantize import DIM_MAX, DIM_STEP, DTYPES, Rows, Scheme, Tokens

NUMPY = "numpy"


def backends() -> tuple[str, ...]:
    """What can do the arithmetic here, the fastest last."""
    return (NUMPY, *native.levels())


def check_rows(codec: CodecId, plane: PlaneShape) -> None:
    """Raises BadInputError unless rows of this plane can be rounded."""
    if plane.dtype not in DTYPES:
        raise BadInputError(f"codec {codec.name} takes {', '.join(sorted(DTYPES))}, not {plane.dtype}; store it raw")
    if plane.dim % DIM_STEP or plane.dim > DIM_MAX:
        raise BadInputError(
            f"head_dim is {plane.dim}; codec {codec.name} takes multiples of {DIM_STEP} up to {DIM_MAX}: store it raw"
        )


def rows_of(plane: PlaneShape, scheme: Scheme, bits: int, count: int, first: int = 0) -> Rows:
    """Rows ``first`` to ``first + count`` of every head of a plane."""
    return Rows(
        dtype=plane.dtype,
        scheme=scheme,
        bits=bits,
        heads=plane.heads,
        dim=plane.dim,
        count=count,
        first=first,
        page_tokens=plane.page_tokens,
        page_stride=plane.page_stride,
        token_stride=plane.token_stride,
        head_stride=plane.head_stride,
        signs=signs_of(plane.dim),
        rotated_run=run_of(plane.dim),
        norm=norm_of(plane.dim),
    )


@dataclass(frozen=True)
class Engine:
    """The arithmetic, by C or by numpy, with the same bytes."""

    backend: str

    def __post_init__(self) -> None:
        if self.backend not in backends():
            raise BadInputError(f"backend is {self.backend!r}; here there are {', '.join(backends())}")

    def quantize(
        self,
        rows: Rows,
        kv: Addresses,
        codes: Addresses,
        numbers: Addresses,
        tokens: Tokens | None = None,
        threads: int = 1,
    ) -> NDArray[np.bool_]:
        """See ``kvstore.native.quantize.quantize``."""
        if not rows.count:
            return np.zeros(len(kv), np.bool_)
        if self.backend == NUMPY:
            return quantize_numpy.quantize(rows, kv, codes, numbers, tokens)
        return native.quantize(rows, kv, codes, numbers, tokens, self.backend, threads)

    def dequantize(
        self,
        rows: Rows,
        kv: Addresses,
        codes: Addresses,
        numbers: Addresses,
        tokens: Tokens | None = None,
        threads: int = 1,
    ) -> None:
        """See ``kvstore.native.quantize.dequantize``."""
        if not rows.count:
            return
        if self.backend == NUMPY:
            quantize_numpy.dequantize(rows, kv, codes, numbers, tokens)
        else:
            native.dequantize(rows, kv, codes, numbers, tokens, self.backend, threads)

    def copy_exact(self, plane: PlaneShape, kept: Kept, kv: Addresses, flat: Addresses, *, to_flat: bool) -> None:
        """Exact rows of page groups to ``flat``, or from there: [heads, exact_first], then [heads, exact_last] rows."""
        for count, first in ((kept.exact_first, 0), (kept.exact_last, kept.tokens - kept.exact_last)):
            self.copy(plane, count, first, kv, flat, to_flat=to_flat)
            flat = flat + np.uint64(count * plane.heads * plane.row_bytes)

    def copy(self, plane: PlaneShape, count: int, first: int, kv: Addresses, flat: Addresses, *, to_flat: bool) -> None:
        """Rows of ``count`` tokens from ``first`` on to ``flat``, [heads, count] rows, or from there."""
        if not count:
            return
        copy = quantize_numpy.copy_rows if self.backend == NUMPY else native.copy_rows
        copy(rows_of(plane, Scheme.TOKEN, 8, count, first), kv, flat, None, to_flat=to_flat)


def best_engine() -> Engine:
    """The fastest here."""
    return Engine(backends()[-1])


@dataclass(frozen=True)
class Rounding:
    """What codecs that round rows have in common. ``backend``: None for the fastest."""

    id: CodecId
    scheme: Scheme
    backend: str | None = field(default=None, kw_only=True)

    is_fixed = True

    @cached_property
    def _engine(self) -> Engine:
        return best_engine() if self.backend is None else Engine(self.backend)

    def check(self, plane: PlaneShape) -> None:
        """As ``Codec.check``: bfloat16, float16 and float32, with dims in steps of 16 up to 1024."""
        check_rows(self.id, plane)


@dataclass(frozen=True)
class Quantizer(Rounding):
    """A codec that rounds all but exact tokens alike."""

    bits: int

    def stored_bytes(self, plane: PlaneShape, kept: Kept) -> int:
        """As ``Codec.stored_bytes``."""
        self.check(plane)
        kept.check(plane)
        rows = self._rows(plane, kept)
        return HEAD.itemsize + rows.codes_bytes + kept.exact * plane.heads * plane.row_bytes + rows.numbers_bytes

    def encode(self, plane: PlaneShape, kept: Kept, kv: Addresses, out: Addresses, threads: int = 1) -> Encoded:
        """As ``Codec.encode``."""
        size = self.stored_bytes(plane, kept)
        check_batch(kv=kv, out=out)
        Head(kept).put(out)
        kv = kv + np.uint64(plane.offset)
        rows, codes, exact, numbers = self._places(plane, kept, out)
        self._engine.copy_exact(plane, kept, kv, exact, to_flat=True)
        lost = self._engine.quantize(rows, kv, codes, numbers, threads=threads)
        return Encoded(np.full(len(kv), size, np.uint64), lost)

    def decode(
        self, plane: PlaneShape, stored: Addresses, sizes: Sizes, kv: Addresses, threads: int = 1
    ) -> NDArray[np.bool_]:
        """As ``Codec.decode``."""
        self.check(plane)
        check_batch(kv=kv, stored=stored, sizes=sizes)
        done = np.zeros(len(kv), np.bool_)
        for head, mine in heads_of(plane, stored, sizes):
            fits = mine[sizes[mine] == self.stored_bytes(plane, head.kept)]
            if head.for_codec or not len(fits):
                continue
            to = kv[fits] + np.uint64(plane.offset)
            rows, codes, exact, numbers = self._places(plane, head.kept, stored[fits])
            self._engine.dequantize(rows, to, codes, numbers, threads=threads)
            self._engine.copy_exact(plane, head.kept, to, exact, to_flat=False)
            done[fits] = True
        return done

    def _rows(self, plane: PlaneShape, kept: Kept) -> Rows:
        return rows_of(plane, self.scheme, self.bits, kept.rounded, kept.exact_first)

    def _places(self, plane: PlaneShape, kept: Kept, at: Addresses) -> tuple[Rows, Addresses, Addresses, Addresses]:
        """Rows, and where codes, exact rows and numbers of each page group lie."""
        rows = self._rows(plane, kept)
        codes = at + np.uint64(HEAD.itemsize)
        exact = codes + np.uint64(rows.codes_bytes)
        return rows, codes, exact, exact + np.uint64(kept.exact * plane.heads * plane.row_bytes)
