"""Summaries of pages of keys, and what they promise for a query: for choosing pages without reading them.

The smallest and largest key of a page, channel by channel, bound its scores (Quest, arXiv 2406.10774); their mean
is a landmark (ShadowKV). All arrays are told by address and lie where the device can reach them, each aligned to its
values.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.device.copy_kernels import access_bytes
from kvstore.device.kernels import SHARED_BYTES_MAX, VALUE_BYTES, WARP_THREADS, Launcher, launch
from kvstore.errors import BadInputError

_BLOCK_THREADS = 256
_FLOAT_BYTES = 4
_BLOCKS_MAX = 4096
_COUNT_MAX = 2**31


@dataclass(frozen=True, slots=True)
class KeyPages:
    """Keys of one layer in pages: ``addresses``, uint64 [n_pages], of the first token's first head; ``rows``, uint32
    [n_pages], tokens in each. All addresses are multiples of ``aligned_bytes``, strides are in bytes.
    """

    addresses: int
    rows: int
    n_pages: int
    heads: int
    head_dim: int
    dtype: str
    token_bytes: int
    head_bytes: int
    aligned_bytes: int = 16


def summarize_pages(
    device: Launcher, keys: KeyPages, stream: int, *, low: int = 0, high: int = 0, mean: int = 0
) -> None:
    """Write what is asked for (not 0) of every page: [n_pages, heads, head_dim] in the keys' dtype. Does not wait.

    ``low`` and ``high`` are exact; a NaN is passed over unless all rows have one. ``mean`` is summed in float32, row
    by row, divided once and rounded to the nearest. For a page without rows nothing is written.
    """
    size = _value_bytes(keys.dtype)
    fits = (
        access_bytes(keys.aligned_bytes, keys.token_bytes, keys.head_bytes, keys.head_dim * size, low, high, mean) == 16
    )
    at_once = 16 // size if fits else 1
    items = keys.n_pages * keys.heads * (keys.head_dim // at_once)
    if items == 0:
        return
    _check_count(items, "channels")
    values = (
        keys.addresses, keys.rows, keys.token_bytes, keys.head_bytes, low, high, mean,
        keys.n_pages, keys.heads, keys.head_dim, at_once,
    )  # fmt: skip
    grid = min(-(-items // _BLOCK_THREADS), _BLOCKS_MAX)
    launch(device, f"kv_page_summary_{keys.dtype}", (grid, 1), _BLOCK_THREADS, values, stream)


@dataclass(frozen=True, slots=True)
class PageSummaries:
    """``low`` and ``high``, [n_pages, heads, head_dim] in ``dtype``; both the mean to score by landmarks."""

    low: int
    high: int
    n_pages: int
    heads: int
    head_dim: int
    dtype: str


def score_pages(
    device: Launcher,
    pages: PageSummaries,
    queries: int,
    queries_per_head: int,
    scores: int,
    stream: int,
    *,
    add: bool = False,
) -> None:
    """Write for every kv head and page the largest (or, with ``add``, the sum) of its queries' bounds. Does not wait.

    ``queries`` are [heads * queries_per_head, head_dim] in the summaries' dtype, ``scores`` float32 [heads, n_pages].
    A bound is the sum over channels of max(q * low, q * high), without a scale, in float32 and in a fixed order.
    """
    _value_bytes(pages.dtype)
    if pages.n_pages == 0 or pages.heads == 0:
        return
    _check_count(pages.n_pages, "pages")
    if queries_per_head < 1:
        raise BadInputError(f"queries_per_head is {queries_per_head}; a kv head has at least 1")
    query_bytes = pages.head_dim * _FLOAT_BYTES
    if not 0 < query_bytes <= SHARED_BYTES_MAX:
        raise BadInputError(
            f"head_dim is {pages.head_dim}; a query of 1 to {SHARED_BYTES_MAX // _FLOAT_BYTES} can be held"
        )
    tile = min(queries_per_head, SHARED_BYTES_MAX // query_bytes)
    warps = _BLOCK_THREADS // WARP_THREADS
    grid = (min(-(-pages.n_pages // warps), _BLOCKS_MAX), pages.heads)
    values = (
        queries, pages.low, pages.high, scores, pages.n_pages, queries_per_head, pages.head_dim, tile, int(add),
    )  # fmt: skip
    launch(device, f"kv_page_score_{pages.dtype}", grid, _BLOCK_THREADS, values, stream, tile * query_bytes)


def _check_count(count: int, what: str) -> None:
    """Kernels count in 32 bits."""
    if count > _COUNT_MAX:
        raise BadInputError(f"{count} {what} are too many for one launch, which takes {_COUNT_MAX}; make several of it")


def _value_bytes(dtype: str) -> int:
    size = VALUE_BYTES.get(dtype)
    if size is None:
        raise BadInputError(f"keys of {dtype!r} have no summaries; {', '.join(VALUE_BYTES)} have")
    return size
