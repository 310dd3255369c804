"""Copies by kernel: any layout to any other, with few blocks, from and to whatever memory the device can reach.

Where the copy engine needs large pieces, threads copy small ones as fast (Strata). A source in registered host memory
makes it a zero-copy gather. A copy is planned into a ``CopyTable``, which the caller puts where the device can read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.device.kernels import ADDRESS, BLOCK_THREADS_MAX, KERNELS, WARP_THREADS, Launcher, launch
from kvstore.device.seam import Addresses
from kvstore.errors import BadInputError

Offsets = NDArray[np.int64]

COPY_BLOCKS = 2
"""Blocks that keep a PCIe link busy (Strata: 2 of 1024 threads) and leave the rest of a GPU to the engine."""

_PIECES_AT_ONCE = 4
"""As in kernels.cu."""
_PIECES_MAX = 2**31
_LONG_RUN_BYTES = 16 << 10


class PageSide(NamedTuple):
    """Where tokens lie on one side of a copy: token t in page ``(t + first_token) // page_tokens`` of every plane.

    ``planes``, uint64 [p], are addresses for the device; ``starts``, int64, where pages begin after each of them, in
    bytes. The strides go from one token and one head to the next, in bytes, and may be negative.
    """

    planes: Addresses
    starts: Offsets
    page_tokens: int
    token_bytes: int
    head_bytes: int
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class CopyTable:
    """One launch of a copy kernel. ``words``, uint64 [n], go to where the device can read them; see ``copy``."""

    words: NDArray[np.uint64]
    kernel: str
    values: tuple[int, ...]
    """The arguments; an address is given as its offset into ``words``, in bytes."""
    n_pieces: int
    lanes: int
    access_bytes: int
    """How wide loads and stores are."""
    moved_bytes: int


def table_of_runs(
    to_planes: Addresses, from_planes: Addresses, to: Offsets, come_from: Offsets, sizes: NDArray[np.uint64]
) -> CopyTable:
    """Runs of bytes: offsets on both sides and sizes, [n], the same for every pair of planes, [p].

    Planes are addresses for the device. Runs may lie and follow each other anyhow; what is written twice or written and
    read has no order. Long runs among short ones are cut: the table has at most twice as many. Raises BadInputError for
    arrays that differ in length, and for too much for one launch (2**31 pieces of 512 bytes or, unaligned, less).
    """
    if len(to_planes) != len(from_planes) or not len(to) == len(come_from) == len(sizes):
        raise BadInputError(
            f"{len(to_planes)} planes are given to copy to and {len(from_planes)} to copy from, with {len(to)} and "
            f"{len(come_from)} offsets and {len(sizes)} sizes; each side needs as many"
        )
    moved_bytes = int(sizes.sum()) * len(to_planes)
    to, come_from, sizes = _cut(to, come_from, sizes)
    longest = int(sizes.max(initial=0))
    access = access_bytes(to_planes, from_planes, to, come_from, sizes)
    lanes, pieces = _pieces(longest, access)
    words, offsets = _packed(to_planes, from_planes, to, come_from, sizes)
    n_pieces = len(to_planes) * len(to) * pieces
    values = (*offsets, len(to_planes), len(to), pieces, lanes, access)
    return _table(words, "kv_copy_runs", values, n_pieces, lanes, access, moved_bytes)


def table_of_pages(to: PageSide, come_from: PageSide, n_tokens: int, heads: int, unit_bytes: int) -> CopyTable:
    """``n_tokens`` tokens of every plane, each of ``heads`` units of ``unit_bytes`` that lie in a row by themselves.

    Raises BadInputError if a side lacks room for the tokens, for sides of different numbers of planes, and as
    ``table_of_runs`` for too much.
    """
    for name, side in (("to", to), ("come_from", come_from)):
        if side.page_tokens < 1 or side.first_token < 0 or n_tokens < 0 or heads < 0 or unit_bytes < 0:
            raise BadInputError(
                f"pages of {side.page_tokens} tokens from token {side.first_token} on (the side {name!r}), "
                f"{n_tokens} tokens, {heads} heads and {unit_bytes} bytes: none may be negative, a page not empty"
            )
        if side.first_token + n_tokens > len(side.starts) * side.page_tokens:
            raise BadInputError(
                f"{len(side.starts)} pages of {side.page_tokens} tokens can't hold {n_tokens} tokens from token "
                f"{side.first_token} on (the side {name!r})"
            )
    if len(to.planes) != len(come_from.planes):
        raise BadInputError(f"{len(to.planes)} planes are given to copy to, and {len(come_from.planes)} to copy from")
    moved_bytes = len(to.planes) * n_tokens * heads * unit_bytes
    if to.head_bytes == come_from.head_bytes == unit_bytes:
        heads, unit_bytes = min(heads, 1), heads * unit_bytes
    strides = [stride for side in (to, come_from) for stride in (side.token_bytes, side.head_bytes if heads > 1 else 0)]
    access = access_bytes(to.planes, to.starts, come_from.planes, come_from.starts, unit_bytes, *strides)
    lanes, pieces = _pieces(unit_bytes, access)
    words, offsets = _packed(to.planes, to.starts, come_from.planes, come_from.starts)
    values = (
        *offsets[:2], *_of_side(to), *offsets[2:], *_of_side(come_from),
        len(to.planes), n_tokens, heads, unit_bytes, pieces, lanes, access,
    )  # fmt: skip
    return _table(
        words, "kv_copy_pages", values, len(to.planes) * n_tokens * heads * pieces, lanes, access, moved_bytes
    )


def copy(device: Launcher, table: CopyTable, words_address: int, stream: int, blocks: int = COPY_BLOCKS) -> None:
    """Launch the copy; ``words_address`` is where the table's words lie for the device, aligned to 8 bytes.

    The words, like what is copied, belong to the device until the work is over. Does not wait.
    """
    if table.n_pieces == 0:
        return
    threads = -(-table.n_pieces // _PIECES_AT_ONCE) * table.lanes
    grid = min(blocks, -(-threads // BLOCK_THREADS_MAX))
    block = min(BLOCK_THREADS_MAX, -(-threads // WARP_THREADS) * WARP_THREADS)
    values = [
        value + words_address if parameter.dtype == ADDRESS else value
        for parameter, value in zip(KERNELS[table.kernel].parameters, table.values, strict=True)
    ]
    launch(device, table.kernel, (grid, 1), block, values, stream)


def access_bytes(*values: NDArray[np.uint64] | Offsets | int) -> int:
    """The widest access, 16, 8, 4, 2 or 1 bytes, that divides all these addresses, offsets, strides and sizes."""
    bits = 16
    for value in values:
        bits |= int(np.bitwise_or.reduce(value.view(np.int64))) if isinstance(value, np.ndarray) else value
    return bits & -bits


def _of_side(side: PageSide) -> tuple[int, int, int, int]:
    return side.token_bytes, side.head_bytes, side.page_tokens, side.first_token


def _pieces(run_bytes: int, access: int) -> tuple[int, int]:
    """How many lanes move a piece of such a run together, and how many pieces it has."""
    accesses = -(-run_bytes // access)
    lanes = min(WARP_THREADS, 1 << max(accesses - 1, 0).bit_length())
    return lanes, -(-accesses // lanes)


def _cut(to: Offsets, come_from: Offsets, sizes: NDArray[np.uint64]) -> tuple[Offsets, Offsets, NDArray[np.uint64]]:
    """Runs of which none is much longer than the others: a kernel gives each as many threads as the longest needs."""
    if len(sizes) == 0:
        return to, come_from, sizes
    most = max(_LONG_RUN_BYTES, -(-int(sizes.mean()) // 512) * 512)
    if int(sizes.max()) <= most:
        return to, come_from, sizes
    counts = np.maximum(-(-sizes.astype(np.int64) // most), 1)
    before = (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    rest = np.repeat(sizes.astype(np.int64), counts) - before
    return (
        np.repeat(to, counts) + before,
        np.repeat(come_from, counts) + before,
        np.minimum(rest, most).astype(np.uint64),
    )


def _packed(*tables: NDArray[np.uint64] | Offsets) -> tuple[NDArray[np.uint64], list[int]]:
    """Tables of 8-byte words in a row, and where each begins, in bytes."""
    words = np.concatenate([np.ascontiguousarray(table).view(np.uint64) for table in tables])
    ends = np.cumsum([len(table) for table in tables]) * words.itemsize
    return words, [0, *ends[:-1].tolist()]


def _table(
    words: NDArray[np.uint64], kernel: str, values: tuple[int, ...], n_pieces: int, lanes: int, access: int, moved: int
) -> CopyTable:
    if n_pieces > _PIECES_MAX:
        raise BadInputError(
            f"{moved} bytes are {n_pieces} pieces of {lanes * access} bytes, but one launch copies {_PIECES_MAX}: "
            "make several copies of it"
        )
    return CopyTable(words, kernel, values, n_pieces, lanes, access, moved)
