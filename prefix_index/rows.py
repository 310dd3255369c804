"""A prompt as rows of the index: token ids of whole blocks (and a short tail), or engine hashes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.prefix_index.keys import block_key, block_keys, extra_digest
from kvstore.tokens import hash_array, token_array
from kvstore.types import KEY_BYTES, MAX_BLOCK_TOKENS, TOKEN_BYTES, ExtraKey

_MAX_HASH_BYTES = 64
_EXTRA_MARK = b"\x01"
EXTRA_SUFFIX_BYTES = 16 + 4 + 1
"""What a child key carries behind the row when extra keys cover it: digest, first covered token, mark.

Together 1 modulo 4, so that no row of tokens, full or short, is ever taken for one.
"""


class RowExtra(NamedTuple):
    """What extra keys add to one row."""

    digest: bytes
    first_covered: int
    """Offset in the row, in tokens, of the first token that stands for other content."""


class RowPath:
    """One prompt as rows. Holds the caller's buffer without copying it: don't write to it meanwhile.

    ``n_full_rows`` whole rows of ``row_bytes`` bytes, then ``tail_tokens`` tokens (0 for hashes) as a
    short row; ``n_rows`` counts both. ``unit_bytes`` is what a partial match counts in: a token, or a
    whole hash. Build one with ``from_tokens`` or ``from_hashes``.
    """

    __slots__ = (
        "_chained",
        "_extras",
        "_special",
        "block_tokens",
        "data",
        "n_full_rows",
        "n_rows",
        "row_bytes",
        "tail_tokens",
        "unit_bytes",
    )

    def __init__(self, data: memoryview, row_bytes: int, unit_bytes: int, block_tokens: int) -> None:
        self.data = data
        self.row_bytes = row_bytes
        self.unit_bytes = unit_bytes
        self.block_tokens = block_tokens
        self.n_full_rows, tail_bytes = divmod(data.nbytes, row_bytes)
        self.tail_tokens = tail_bytes // unit_bytes
        self.n_rows = self.n_full_rows + (self.tail_tokens > 0)
        self._extras: dict[int, RowExtra] = {}
        self._chained: tuple[bytes, int, int, NDArray[np.uint8]] | None = None
        self._special: list[int] = [self.n_full_rows]

    @classmethod
    def from_tokens(cls, tokens: Any, block_tokens: int, extras: Sequence[ExtraKey] | None = ()) -> RowPath:
        """Rows of ``block_tokens`` tokens each.

        ``tokens``: bytes-like of little-endian unsigned 32-bit ids, or a one-dimensional array or sequence
        of integers (contiguous uint32 is taken without a copy). ``extras`` in any order; parts that lie
        behind the prompt's end are ignored. Raises BadInputError for other types, ids out of range, and
        extras that overlap.
        """
        if not isinstance(block_tokens, int) or not 0 < block_tokens <= MAX_BLOCK_TOKENS:
            raise BadInputError(
                f"block_tokens is {block_tokens!r}; it must be a whole number from 1 to {MAX_BLOCK_TOKENS}"
            )
        path = cls(_token_bytes(tokens), TOKEN_BYTES * block_tokens, TOKEN_BYTES, block_tokens)
        if extras:
            path._cover(extras)
        return path

    @classmethod
    def from_hashes(cls, data: Any, hash_bytes: int, block_tokens: int = 1) -> RowPath:
        """One row per engine hash: bytes-like of n * ``hash_bytes``, or a uint8 array [n, hash_bytes].

        ``block_tokens`` is what one hash stands for; only the count of matched tokens uses it. Raises
        BadInputError for another shape, type or length.
        """
        if not isinstance(hash_bytes, int) or not 0 < hash_bytes <= _MAX_HASH_BYTES:
            raise BadInputError(f"hash_bytes is {hash_bytes!r}; it must be a whole number from 1 to {_MAX_HASH_BYTES}")
        is_array = isinstance(data, np.ndarray)
        view = _flat(hash_array(data, hash_bytes)) if is_array else _flat_buffer(data, "hashes")
        if view.nbytes % hash_bytes:
            raise BadInputError(f"hashes are {view.nbytes} bytes; that is no multiple of hash_bytes {hash_bytes}")
        return cls(view, hash_bytes, hash_bytes, block_tokens)

    def row(self, i: int) -> bytes:
        """Row ``i`` as bytes; the last may be short."""
        return bytes(self.data[i * self.row_bytes : (i + 1) * self.row_bytes])

    def extra(self, i: int) -> RowExtra | None:
        """What extra keys add to row ``i``; None for a plain row."""
        return self._extras.get(i)

    @property
    def has_extras(self) -> bool:
        """Whether extra keys cover any row."""
        return bool(self._extras)

    def has_extra(self, i: int) -> bool:
        """Whether extra keys cover row ``i``."""
        return i in self._extras

    def keys(self, root_key: bytes) -> NDArray[np.uint8]:
        """Chained block keys of all rows, uint8 [n_rows, 16]."""
        return self.chain(root_key, 0, self.n_rows)

    def chain(self, parent: bytes, first_row: int, end_row: int) -> NDArray[np.uint8]:
        """Keys of rows ``first_row`` to ``end_row - 1``, uint8 [n, 16]; ``parent`` is the key before them.

        The last answer is kept: blocks are keyed when room is made for them, and when they are inserted.
        """
        if self._chained is not None and self._chained[:2] == (parent, first_row) and end_row <= self._chained[2]:
            return self._chained[3][: end_row - first_row]
        keys = np.empty((end_row - first_row, KEY_BYTES), np.uint8)
        before, i = parent, first_row
        while i < end_row:
            end = min(self.run_end(i), end_row)
            if end > i:
                rows = self.data[i * self.row_bytes : end * self.row_bytes]
                keys[i - first_row : end - first_row] = block_keys(parent, rows, self.row_bytes)
            else:
                extra, end = self._extras.get(i), i + 1
                key = block_key(parent, self.row(i), extra.digest if extra else b"")
                keys[i - first_row] = np.frombuffer(key, np.uint8)
            parent, i = keys[end - first_row - 1].tobytes(), end
        self._chained = (before, first_row, end_row, keys)
        return keys

    def run_end(self, i: int) -> int:
        """The first row from ``i`` on that is no plain full row: extra keys cover it, or it is the tail."""
        special = self._special
        return special[0] if len(special) == 1 else special[bisect_left(special, i)]

    def n_extras_before(self, row: int) -> int:
        """How many rows before this one extra keys cover."""
        n = bisect_left(self._special, min(row, self.n_full_rows))
        return n + (row > self.n_full_rows and self.n_full_rows in self._extras)

    def starts_as(self, other: RowPath, n_rows: int) -> bool:
        """Whether two paths of rows of the same length have the same first rows, ``n_rows`` of them.

        Takes about a quarter of a nanosecond a byte, and an eighth of a microsecond for each row with extra keys.
        """
        n_bytes, n_extras = n_rows * self.row_bytes, self.n_extras_before(n_rows)
        if n_extras != other.n_extras_before(n_rows):
            return False
        mine, others = (np.frombuffer(path.data[:n_bytes], np.uint8) for path in (self, other))
        if not np.array_equal(mine, others):
            return False
        return all(other._extras.get(i) == extra for i, extra in islice(self._extras.items(), n_extras))

    def child_key(self, i: int) -> bytes:
        """Row ``i`` as the tree's child key: its bytes, and behind them what extra keys add."""
        extra = self._extras.get(i)
        if extra is None:
            return self.row(i)
        return b"".join((self.row(i), extra.digest, extra.first_covered.to_bytes(4, "little"), _EXTRA_MARK))

    def open_part(self, i: int) -> bytes:
        """The bytes of row ``i`` before the first token that extra keys cover; empty behind the end."""
        row = self.row(i)
        extra = self._extras.get(i)
        return row if extra is None else row[: extra.first_covered * self.unit_bytes]

    def _cover(self, extras: Sequence[ExtraKey]) -> None:
        n_tokens = self.data.nbytes // TOKEN_BYTES
        per_row: dict[int, list[tuple[int, int, int, bytes]]] = {}
        last_end = 0
        for extra in sorted(extras, key=lambda e: (e.start_token, e.n_tokens, e.digest)):
            if extra.start_token < last_end:
                raise BadInputError(
                    f"extra keys overlap at token {extra.start_token}; give one key with one digest for them"
                )
            last_end = extra.start_token + extra.n_tokens
            _spread(per_row, extra, min(last_end, n_tokens), self.block_tokens)
        for i, parts in per_row.items():
            self._extras[i] = RowExtra(extra_digest(parts), parts[0][0])
        self._special = [*(i for i in self._extras if i < self.n_full_rows), self.n_full_rows]


def _spread(
    per_row: dict[int, list[tuple[int, int, int, bytes]]], extra: ExtraKey, end: int, block_tokens: int
) -> None:
    at = extra.start_token
    while at < end:
        i, first = divmod(at, block_tokens)
        upto = min(end, (i + 1) * block_tokens)
        per_row.setdefault(i, []).append((first, upto - at, at - extra.start_token, extra.digest))
        at = upto


def _flat(array: NDArray[Any]) -> memoryview:
    if not array.size:
        return memoryview(b"")
    return (array if array.flags.c_contiguous else np.ascontiguousarray(array)).data.cast("B")


def _flat_buffer(data: Any, what: str, formats: tuple[str, ...] = ("B", "b", "c")) -> memoryview:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise BadInputError(f"{what} are {type(data).__name__}; give bytes or a numpy array")
    view = memoryview(data)
    if view.format not in formats:
        raise BadInputError(f"{what} are a memoryview of format {view.format!r}; give one of {', '.join(formats)}")
    if not view.c_contiguous:
        raise BadInputError(f"{what} are a memoryview with gaps; give a contiguous one")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _token_bytes(tokens: Any) -> memoryview:
    if isinstance(tokens, bytes | bytearray | memoryview):
        view = _flat_buffer(tokens, "tokens", ("B", "b", "c", "I"))
        if view.nbytes % TOKEN_BYTES:
            raise BadInputError(f"tokens are {view.nbytes} bytes; each takes {TOKEN_BYTES}, little-endian")
        return view
    return _flat(token_array(tokens))
