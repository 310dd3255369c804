"""Decode attention in plain torch, for pages in this process' own memory: what there is without a GPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engine_adapter.attention.merge import Part, merge
from kvstore.engine_adapter.attention.pages import KVPages
from kvstore.engine_adapter.runs import Pages, Strides, copy_runs, plan_runs

CHUNK_TOKENS = 512
"""Gathered at a time: K and V of a chunk stay in the cache."""


def decode(q: torch.Tensor, pages: KVPages, scale: float, out: Part[torch.Tensor]) -> None:
    """As ``decode_attention``, on the CPU, in float32. Blocks; its copies are made without Python's lock."""
    indptr, counts, first_tokens = pages.indptr.tolist(), pages.n_tokens.tolist(), pages.first_tokens.tolist()
    sinks = pages.sink_tokens.tolist() if pages.sink_tokens is not None else [0] * len(counts)
    addresses = pages.addresses.numpy().astype(np.int64)
    for r, (first, end) in enumerate(zip(first_tokens, counts, strict=True)):
        row = addresses[indptr[r] : indptr[r + 1]]
        parts = [
            _attend(q[r], pages, row, start, min(start + CHUNK_TOKENS, stop), scale)
            for begin, stop in ((0, min(sinks[r], first, end)), (first, end))
            for start in range(begin, stop, CHUNK_TOKENS)
        ]
        if parts:
            merged = merge([part.output for part in parts], [part.lse for part in parts])
            out.output[r], out.lse[r] = merged.output, merged.lse
        else:
            out.output[r], out.lse[r] = 0.0, -torch.inf


def _attend(
    q: torch.Tensor, pages: KVPages, row: NDArray[np.int64], start: int, end: int, scale: float
) -> Part[torch.Tensor]:
    """The query heads of a request [q_heads, key_dim] over its tokens from ``start`` to ``end``."""
    layout = pages.layout
    keys = _gather(pages, row, start, end, layout.key_dim, 0)
    if layout.is_latent:
        values = keys[..., : layout.value_dim]
    else:
        values = _gather(pages, row, start, end, layout.value_dim, layout.row_bytes[2])
    queries = q.float().reshape(layout.kv_heads, -1, layout.key_dim)
    logits = torch.matmul(queries, keys.transpose(1, 2)) * scale
    lse = torch.logsumexp(logits, 2)
    base = torch.where(lse == -torch.inf, 0.0, lse)
    output = torch.matmul(torch.exp(logits - base[..., None]), values)
    return Part(output.reshape(len(q), layout.value_dim), lse.reshape(len(q)))


def _gather(pages: KVPages, row: NDArray[np.int64], start: int, end: int, dim: int, offset_bytes: int) -> torch.Tensor:
    """K, or what lies ``offset_bytes`` after it, of tokens of a request: float32 [kv_heads, tokens, dim]."""
    layout = pages.layout
    n_tokens, row_bytes = end - start, dim * layout.dtype.itemsize
    gathered = torch.empty((layout.kv_heads, n_tokens, dim), dtype=layout.dtype)
    to = Pages(np.zeros(1, np.int64), n_tokens, Strides(row_bytes, n_tokens * row_bytes))
    come_from = Pages(row, layout.page_tokens, Strides(*layout.row_bytes[:2]), start)
    copy_runs(plan_runs(to, come_from, n_tokens, layout.kv_heads, row_bytes), gathered.data_ptr(), offset_bytes)
    return gathered.float()
