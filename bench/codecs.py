"""How fast codecs are beside a copy of the same raw bytes, and how small they make them.

Every figure is a median of ratios: encoding or decoding a batch and a numpy copy of as many raw bytes by as many
threads, between ordinary arrays with all of their pages, next to each other in one run. Values are normal, and channels
differ in scale. Encoded page groups of one backend are compared with those of numpy before anything is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.measure import Team, ordinary_array, paired, timed_s
from kvstore.compression.codec import Codec, CodecId
from kvstore.compression.codecs import CODECS
from kvstore.compression.differential import Differential, most_significant
from kvstore.compression.payload import Kept
from kvstore.compression.plane import PlaneShape
from kvstore.compression.quantize import NUMPY, Rounding, backends
from kvstore.errors import BadInputError, IntegrityError

LIMITS = {
    (CodecId.Q8, "encode"): 0.35,
    (CodecId.Q8, "decode"): 0.8,
    (CodecId.Q4, "encode"): 0.3,
    (CodecId.Q4, "decode"): 0.7,
}
"""What the best backend reaches at least with one thread, where that is AVX-512."""

_SLOW_SHARE = 64
"""numpy and zstd work on that part of a batch."""

_ZSTD = "zstd"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CodecBenchOptions:
    """``batch_bytes`` of raw bfloat16 at a time, in page groups of ``tokens`` tokens."""

    pairs: int = 11
    batch_bytes: int = 64 << 20
    heads: int = 8
    dim: int = 128
    tokens: int = 64
    threads: int = 1
    seed: int = 0
    codecs: tuple[CodecId, ...] = tuple(number for number in CodecId if number is not CodecId.RAW)
    backends: tuple[str, ...] = tuple(dict.fromkeys((NUMPY, backends()[-1])))

    @property
    def plane(self) -> PlaneShape:
        """A K plane by itself, head by head."""
        row = 2 * self.dim
        return PlaneShape(
            "bfloat16", self.heads, self.dim, 1, self.tokens, 0, self.tokens * self.heads * row, row, self.tokens * row
        )


def run(options: CodecBenchOptions, step: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """A row for each codec and backend: ratio, GB/s of raw bytes, and times of the copy; ``step`` is told what comes.

    Takes about 20 s. Raises IntegrityError where a backend gives other bytes than numpy, BadInputError for a batch of
    no page group.
    """
    n = options.batch_bytes // options.plane.raw_bytes
    if n < _SLOW_SHARE:
        least = _SLOW_SHARE * options.plane.raw_bytes
        raise BadInputError(f"a batch of {options.batch_bytes} bytes is too small to measure; give {least} or more")
    batch = _Batch(options, n)
    rows = []
    for number in options.codecs:
        rounds = isinstance(CODECS[number], Rounding)
        for backend in options.backends if rounds else (_ZSTD,):
            codec = _with_backend(CODECS[number], backend)
            step(f"{number.name} by {backend}")
            rows.append({"codec": number.name, "backend": backend, **batch.measure(codec, backend == NUMPY)})
    return rows


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Which limits were not reached, in words; none where AVX-512 is absent."""
    told = []
    for row in rows:
        for what in ("encode", "decode"):
            least = LIMITS.get((CodecId[row["codec"]], what))
            reached = row[f"{what}_of_copy"]
            if least is not None and row["backend"] == "avx512" and row["threads"] == 1 and reached < least:
                told.append(f"{row['codec']} {what} is {reached:.2f} x a copy, not {least}")
    return told


class _Batch:
    """Raw page groups, room for encoded ones, and for decoded ones."""

    def __init__(self, options: CodecBenchOptions, n: int) -> None:
        self._options, self._n = options, n
        raw_bytes = n * options.plane.raw_bytes
        rng = np.random.default_rng(options.seed)
        values = rng.standard_normal((raw_bytes // 2 // options.dim, options.dim), np.float32)
        values *= np.exp(rng.standard_normal(options.dim)).astype(np.float32)
        self._raw = ordinary_array(raw_bytes, 64)
        self._raw[:] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).ravel()
        self._encoded, self._decoded = ordinary_array(2 * raw_bytes, 64), ordinary_array(raw_bytes, 64)
        self._kept = Kept(options.tokens)
        shape = (n, options.heads, options.tokens)
        self._high = most_significant(rng.random(shape), self._kept, 0.25)

    def measure(self, codec: Codec, is_slow: bool) -> dict[str, Any]:
        """One row of the table."""
        options, plane = self._options, self._options.plane
        n = self._n // _SLOW_SHARE if is_slow or not codec.is_fixed else self._n
        raw_bytes = n * plane.raw_bytes
        raw, decoded = (_addresses(array, n, plane.raw_bytes) for array in (self._raw, self._decoded))
        room = self._room(codec)
        encoded = _addresses(self._encoded, n, room)
        sizes = self._encode(codec, raw, encoded)
        self._check(codec, raw, self._encoded[: n * room])
        if not codec.decode(plane, encoded, sizes, decoded, options.threads).all():
            raise IntegrityError(f"codec {codec.id.name} refuses what it has written")
        row: dict[str, Any] = {"ratio": raw_bytes / float(sizes.sum()), "threads": options.threads}
        for what, work in (
            ("encode", lambda: self._encode(codec, raw, encoded)),
            ("decode", lambda: codec.decode(plane, encoded, sizes, decoded, options.threads)),
        ):
            times = self._beside_copies(work, raw_bytes)
            row[f"{what}_of_copy"] = float(np.median(times[:, 1] / times[:, 0]))
            row[f"{what}_gb_per_s"] = raw_bytes / float(np.median(times[:, 0])) / 1e9
        row["copy_gb_per_s"] = raw_bytes / float(np.median(times[:, 1])) / 1e9
        return row

    def _room(self, codec: Codec) -> int:
        if isinstance(codec, Differential):
            return codec.stored_bytes(self._options.plane, self._kept, int(self._high[0, 0].sum()))
        return codec.stored_bytes(self._options.plane, self._kept)

    def _encode(self, codec: Codec, raw: NDArray[np.uint64], encoded: NDArray[np.uint64]) -> NDArray[np.uint64]:
        plane, threads = self._options.plane, self._options.threads
        if isinstance(codec, Differential):
            return codec.encode(plane, self._kept, raw, encoded, threads, self._high[: len(raw)]).sizes
        return codec.encode(plane, self._kept, raw, encoded, threads).sizes

    def _check(self, codec: Codec, raw: NDArray[np.uint64], encoded: Bytes) -> None:
        """The first page groups are what numpy makes of them."""
        if not codec.is_fixed:
            return
        reference = _with_backend(codec, NUMPY)
        n, room = min(4, len(raw)), self._room(codec)
        expected = np.zeros(n * room, np.uint8)
        self._encode(reference, raw[:n], _addresses(expected, n, room))
        if not np.array_equal(expected, encoded[: n * room]):
            raise IntegrityError(f"codec {codec.id.name} gives other bytes than numpy")

    def _beside_copies(self, work: Callable[[], object], raw_bytes: int) -> NDArray[np.float64]:
        """Seconds [pairs, 2]: the work, and copying so many bytes."""
        cuts = np.linspace(0, raw_bytes, self._options.threads + 1).astype(int).tolist()
        parts = [slice(a, b) for a, b in pairwise(cuts)]
        copies = [partial(np.copyto, self._decoded[part], self._raw[part]) for part in parts]
        with Team(self._options.threads) as team:
            return paired(self._options.pairs, lambda _: timed_s(work), lambda _: team.time_s(copies))


def _addresses(memory: Bytes, n: int, step: int) -> NDArray[np.uint64]:
    return np.uint64(memory.ctypes.data) + np.arange(n, dtype=np.uint64) * np.uint64(step)


def _with_backend(codec: Codec, backend: str) -> Codec:
    """The same codec by another backend, where it has any."""
    return dataclasses.replace(codec, backend=backend) if isinstance(codec, Rounding) else codec
