"""Where the K and V of one layer lie, page by page, for attention that reads them in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.page_table import PageTable
from kvstore.errors import BadInputError
from kvstore.types import GroupKind, KVSpec

Addresses = NDArray[np.uint64]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
VECTOR_BYTES = 16
"""The widest access of a GPU; rows that begin at multiples of it are read with it."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The inside of a page of one layer: strides and dims in elements of ``dtype``.

    The key of token t and head h begins at ``t * token_stride + h * head_stride`` after the page's address, its value
    ``value_offset`` elements after that (also backwards, as in another tensor). Without an offset the value is the
    beginning of the key: a latent (MLA).
    """

    dtype: torch.dtype
    page_tokens: int
    kv_heads: int
    key_dim: int
    value_dim: int
    token_stride: int
    head_stride: int
    value_offset: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES.values():
            raise BadInputError(f"attention can't read pages of {self.dtype}; it reads {', '.join(DTYPES)}")
        for name in ("page_tokens", "kv_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.is_latent and self.value_dim > self.key_dim:
            raise BadInputError(
                f"value_dim is {self.value_dim}, but a value without an offset is the beginning of a key of "
                f"{self.key_dim}"
            )

    @property
    def is_latent(self) -> bool:
        """Whether values are the beginnings of keys."""
        return self.value_offset == 0

    @property
    def row_bytes(self) -> tuple[int, int, int]:
        """``token_stride``, ``head_stride`` and ``value_offset`` in bytes."""
        size = self.dtype.itemsize
        return self.token_stride * size, self.head_stride * size, self.value_offset * size

    @classmethod
    def of_block(cls, spec: KVSpec, layer: int, value_dim: int | None = None) -> PageLayout:
        """The pages of a layer inside blocks of the store; layers are counted through all groups.

        ``value_dim``: of a latent, how much of it is the value; else it is the group's ``head_dim``. Raises
        BadInputError for groups that attention can't read: opaque ones, states, other dtypes, or without value_dim.
        """
        groups = [group for group in spec.groups for _ in range(group.layers)]
        if not 0 <= layer < len(groups):
            raise BadInputError(f"layer {layer} is none of the spec's {len(groups)} layers")
        group = groups[layer]
        place = BlockLayout.of(spec).layers[layer]
        if place.opaque or group.dtype not in DTYPES:
            raise BadInputError(f"layer {layer} is {group.layout} of {group.dtype}; attention can't read that in place")
        is_latent = group.kind is GroupKind.MLA
        if is_latent and value_dim is None:
            raise BadInputError(
                f"value_dim is missing: layer {layer} is a latent of {group.head_dim}, part of it value"
            )
        size = place.unit_bytes // group.head_dim
        return cls(
            DTYPES[group.dtype],
            spec.tokens_per_page,
            place.heads,
            group.head_dim,
            value_dim if value_dim is not None else group.head_dim,
            place.strides.token_bytes // size,
            place.strides.head_bytes // size,
            0 if is_latent else (place.planes[1] - place.planes[0]) // size,
        )


def block_pages(layout: BlockLayout, layer: int, blocks: Addresses) -> Addresses:
    """Addresses of a layer's pages in blocks (uint64 [n_blocks], host's or device's), uint64 [n_pages]."""
    starts = layout.pages(layer, blocks.astype(np.int64), 0).starts + layout.layers[layer].planes[0]
    return starts.astype(np.uint64)


@dataclass(frozen=True, slots=True)
class KVPages:
    """The pages of one layer for a batch of requests, on the device whose kernels read them.

    Request r has the pages ``addresses[indptr[r] : indptr[r + 1]]``, in the order of its tokens, of which it has
    ``n_tokens[r]``; only its last page may be in part. It attends to its tokens from ``first_tokens[r]`` on, and to its
    first ``sink_tokens[r]``, if those are given. Nothing else of the pages is read.

    Whoever makes one answers for the addresses: they are readable by the device (device memory, or the addresses for
    kernels of registered host memory) and stay so, with their bytes, until the work that was given them is over.
    """

    layout: PageLayout
    addresses: torch.Tensor
    """uint64 [n_pages]"""
    indptr: torch.Tensor
    """int32 [requests + 1]"""
    n_tokens: torch.Tensor
    """int32 [requests]"""
    first_tokens: torch.Tensor
    """int32 [requests]"""
    max_tokens: int
    """No request has more: what the work is shared out by."""
    is_aligned: bool = False
    """Whether every key and value begins at a multiple of ``VECTOR_BYTES``. A GPU faults if this is not so."""
    sink_tokens: torch.Tensor | None = None
    """int32 [requests]"""

    def __len__(self) -> int:
        return len(self.n_tokens)

    @property
    def device(self) -> torch.device:
        """Where the table is, and whose kernels can read it."""
        return self.addresses.device

    @classmethod
    def of(
        cls,
        layout: PageLayout,
        rows: Sequence[Addresses],
        n_tokens: ArrayLike,
        *,
        first_tokens: ArrayLike = 0,
        device: torch.device | str = "cpu",
    ) -> KVPages:
        """Checked, from one row of addresses (uint64 [n]) a request; ``n_tokens`` and ``first_tokens`` [requests].

        Copies the table to the device, which blocks. Raises BadInputError for more tokens than pages have room for, and
        for addresses of no such element.
        """
        counts = _counts("n_tokens", n_tokens, len(rows))
        first = _counts("first_tokens", first_tokens, len(rows))
        for r, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            if count > len(row) * layout.page_tokens:
                raise BadInputError(
                    f"request {r} has {count} tokens, but {len(row)} pages of {layout.page_tokens} tokens"
                )
        joined = np.concatenate([np.empty(0, np.uint64), *(np.asarray(row, np.uint64) for row in rows)])
        wrong = joined % layout.dtype.itemsize != 0
        if wrong.any():
            raise BadInputError(f"no {layout.dtype} can lie at the odd address {hex(int(joined[wrong][0]))}")
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        starts = np.concatenate([joined, np.array(layout.row_bytes, np.int64).astype(np.uint64)])
        return cls(
            layout,
            torch.from_numpy(joined).to(device),
            _on(device, indptr),
            _on(device, counts),
            _on(device, first),
            int(counts.max(initial=0)),
            is_aligned=not (starts % VECTOR_BYTES).any(),
        )

    @classmethod
    def of_tensors(cls, keys: torch.Tensor, values: torch.Tensor, table: PageTable, n_tokens: ArrayLike) -> KVPages:
        """An engine's own pages: K and V [n_pages, page_tokens, kv_heads, dim] with any strides but the last, and which
        of them each request has. For a latent give it as K, and its beginning (a view) as V.

        Raises BadInputError for tensors whose strides differ, and as ``of`` does.
        """
        if keys.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.stride() != values.stride():
            raise BadInputError(
                f"K is {tuple(keys.shape)} with strides {keys.stride()}, V {tuple(values.shape)} with "
                f"{values.stride()}; give [n_pages, page_tokens, kv_heads, dim] with equal strides"
            )
        distance = values.data_ptr() - keys.data_ptr()
        if keys.dtype != values.dtype or keys.stride(3) != 1 or distance % keys.dtype.itemsize:
            raise BadInputError("K and V need the same dtype, aligned to it, and heads whose elements are contiguous")
        layout = PageLayout(
            keys.dtype,
            keys.shape[1],
            keys.shape[2],
            keys.shape[3],
            values.shape[3],
            keys.stride(1),
            keys.stride(2),
            distance // keys.dtype.itemsize,
        )
        page_bytes = keys.stride(0) * keys.dtype.itemsize
        rows = [(keys.data_ptr() + table.row(r) * page_bytes).astype(np.uint64) for r in range(len(table))]
        return cls.of(layout, rows, n_tokens, device=keys.device)

    def windowed(
        self,
        positions: torch.Tensor,
        window_tokens: int,
        *,
        sink_tokens: int = 0,
        first_positions: torch.Tensor | int = 0,
    ) -> KVPages:
        """The same pages; a query sees ``window_tokens``, itself included, and its prompt's first ``sink_tokens``.

        ``positions``: of each request's query, int [requests]; ``first_positions``: of the first token of its pages,
        where that is not the prompt's first. Requests with ``first_tokens`` have no sinks here. Does not wait for the
        device.
        """
        if window_tokens < 1 or sink_tokens < 0:
            raise BadInputError(f"a window of {window_tokens} tokens and {sink_tokens} sinks is none")
        first = torch.clamp(positions - first_positions - window_tokens + 1, min=0)
        first = torch.maximum(first.to(torch.int32), self.first_tokens)
        sinks = None
        if sink_tokens:
            before = torch.zeros_like(self.first_tokens) + first_positions
            sinks = (torch.clamp(sink_tokens - before, min=0) * (self.first_tokens == 0)).to(torch.int32)
        return replace(self, first_tokens=first, sink_tokens=sinks)


def _counts(name: str, given: ArrayLike, n: int) -> NDArray[np.int64]:
    counts: NDArray[Any] = np.asarray(given)
    is_whole = not counts.size or counts.dtype.kind in "iu"
    if not is_whole or (counts.ndim and counts.shape != (n,)) or (counts < 0).any():
        raise BadInputError(f"{name} is {given!r:.80}; give whole numbers from 0 on, one for each of {n} requests")
    return np.broadcast_to(counts, (n,)).astype(np.int64)


def _on(device: torch.device | str, counts: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(counts.astype(np.int32)).to(device)
