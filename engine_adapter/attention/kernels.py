"""Decode attention over pages that lie anywhere, in Triton. Imports triton: only ``launch`` imports this module.

One program has one kv head of one request, the query heads that share it (``block_heads`` of them), and one split of
the tokens. As in DirectKV's decode, queries and the output stay in registers while K and V stream by once: a tile of
K and V is loaded once for all its query heads, so a page in host memory crosses the link once a layer. Softmax is the
online one of FlashAttention; what it is normalised by leaves as a log-sum-exp, so that splits, and parts from other
memories, can be merged.

Sums and products are float32. Weights, as operands of the second product, are given as two 16-bit numbers each, their
value and what rounding left of it: a rounded bfloat16 weight alone would be off by up to 2^-9.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rounded_parts(x, dtype: tl.constexpr):
    """float32 as two numbers of ``dtype`` whose sum it is, nearly."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _load(rows, at, dim: tl.constexpr, is_there, as_float32: tl.constexpr):
    """A tile of rows: those that are there, ``dim`` elements of each, else zeros."""
    tile = tl.load(rows[:, None] + at[None, :], mask=is_there[:, None] & (at[None, :] < dim), other=0.0)
    if as_float32:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def decode_split(
    outputs,  # float32 [splits, requests, q_heads, value_dim]
    lses,  # float32 [splits, requests, q_heads], natural logarithms
    q,  # [requests, q_heads, key_dim], its last dimension contiguous
    addresses,  # uint64 [pages]
    indptr,  # int32 [requests + 1]
    first_tokens,  # int32 [requests]
    end_tokens,  # int32 [requests]
    sink_tokens,  # int32 [requests]; not read unless has_sinks
    scale_log2,
    q_request_stride,
    q_head_stride,
    token_stride,
    head_stride,
    value_offset,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    is_latent: tl.constexpr,  # V is the beginning of K
    has_sinks: tl.constexpr,
    is_aligned: tl.constexpr,  # every row of K and V begins at a multiple of 16 bytes
    as_float32: tl.constexpr,  # products of float32, whatever K and V are
    block_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    block_key: tl.constexpr,
    block_rest: tl.constexpr,  # of K behind V; 0 unless is_latent
    block_value: tl.constexpr,
):
    request = tl.program_id(0)
    head_blocks: tl.constexpr = (group + block_heads - 1) // block_heads
    kv_head = tl.program_id(1) // head_blocks
    split = tl.program_id(2)
    n_splits = tl.num_programs(2)
    in_group = (tl.program_id(1) % head_blocks) * block_heads + tl.arange(0, block_heads)
    is_head = in_group < group
    head = kv_head * group + in_group

    row_dtype = q.dtype.element_ty
    tile_tokens = tl.arange(0, block_tokens)
    key_at = tl.arange(0, block_key)
    value_at = tl.arange(0, block_value)
    in_key: tl.constexpr = value_dim if is_latent else key_dim

    q_rows = q + request.to(tl.int64) * q_request_stride + head.to(tl.int64) * q_head_stride
    queries = _load(q_rows, key_at, in_key, is_head, as_float32)
    if block_rest > 0:
        rest_at = tl.arange(0, block_rest)
        rest_queries = _load(q_rows + value_dim, rest_at, key_dim - value_dim, is_head, as_float32)

    # Tiles of sinks and tiles of what the window has are counted together, and that many shared by the splits.
    page_table = addresses + tl.load(indptr + request)
    first = tl.load(first_tokens + request)
    end = tl.load(end_tokens + request)
    first_tile = first // block_tokens
    n_tiles = tl.where(end > first, tl.cdiv(end, block_tokens) - first_tile, 0)
    n_sink_tiles = 0
    end_sinks = 0
    if has_sinks:
        end_sinks = tl.minimum(tl.load(sink_tokens + request), tl.minimum(first, end))
        n_sink_tiles = tl.cdiv(end_sinks, block_tokens)
        n_tiles += n_sink_tiles
    per_split = tl.cdiv(n_tiles, n_splits)

    # Finite, as all logits of a tile may be minus infinity: they weigh nothing.
    most = tl.full([block_heads], -3.0e38, tl.float32)
    total = tl.zeros([block_heads], tl.float32)
    output = tl.zeros([block_heads, block_value], tl.float32)
    for tile in range(split * per_split, tl.minimum((split + 1) * per_split, n_tiles)):
        if has_sinks:
            is_sink = tile < n_sink_tiles
            token = tl.where(is_sink, tile, first_tile + tile - n_sink_tiles) * block_tokens + tile_tokens
            is_visible = (token >= tl.where(is_sink, 0, first)) & (token < tl.where(is_sink, end_sinks, end))
        else:
            token = (first_tile + tile) * block_tokens + tile_tokens
            is_visible = (token >= first) & (token < end)
        page = tl.load(page_table + token // page_tokens, mask=is_visible, other=0)
        rows = page.to(tl.pointer_type(row_dtype)) + (token % page_tokens).to(tl.int64) * token_stride
        rows += kv_head.to(tl.int64) * head_stride
        # Nothing is known of pointers made from integers. In a function of its own the hint would be lost.
        if is_aligned:
            rows = tl.multiple_of(rows, 16)
        keys = _load(rows, key_at, in_key, is_visible, as_float32)
        logits = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
        if block_rest > 0:
            rest = _load(rows + value_dim, rest_at, key_dim - value_dim, is_visible, as_float32)
            logits = tl.dot(rest_queries, tl.trans(rest), logits, input_precision="tf32x3")
        logits = tl.where(is_visible[None, :], logits * scale_log2, float("-inf"))
        if is_latent:
            values = keys
        else:
            value_rows = rows + value_offset
            if is_aligned:
                value_rows = tl.multiple_of(value_rows, 16)
            values = _load(value_rows, value_at, value_dim, is_visible, as_float32)

        raised = tl.maximum(most, tl.max(logits, 1))
        faded = tl.exp2(most - raised)
        weights = tl.exp2(logits - raised[:, None])
        most = raised
        total = total * faded + tl.sum(weights, 1)
        output = output * faded[:, None]
        if as_float32 or row_dtype == tl.float32:
            output = tl.dot(weights, values, output, input_precision="tf32x3")
        else:
            high, low = _rounded_parts(weights, row_dtype)
            output = tl.dot(high, values, output)
            output = tl.dot(low, values, output)

    divisor = tl.where(total > 0, total, 1.0)
    output = output / divisor[:, None]
    lse = tl.where(total > 0, (most + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    n_requests = tl.num_programs(0)
    row = (split.to(tl.int64) * n_requests + request) * (kv_heads * group) + head
    tl.store(lses + row, lse, mask=is_head)
    tl.store(
        outputs + row[:, None] * value_dim + value_at[None, :],
        output,
        mask=is_head[:, None] & (value_at[None, :] < value_dim),
    )


@triton.jit
def merge_splits(
    output,  # float32 [rows, value_dim]
    lse,  # float32 [rows]
    outputs,  # float32 [splits, rows, value_dim]
    lses,  # float32 [splits, rows]
    n_splits,
    value_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_splits: tl.constexpr,
):
    """One program a row. As ``merge`` does it; splits without tokens weigh nothing."""
    row = tl.program_id(0).to(tl.int64)
    n_rows = tl.num_programs(0)
    split = tl.arange(0, block_splits)
    value_at = tl.arange(0, block_value)
    parts = tl.load(lses + split * n_rows + row, mask=split < n_splits, other=float("-inf"))
    most = tl.max(parts, 0)
    weights = tl.exp(parts - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(weights, 0)
    merged = tl.zeros([block_value], tl.float32)
    for i in range(n_splits):
        weight = tl.sum(tl.where(split == i, weights, 0.0), 0)
        part = tl.load(outputs + (i * n_rows + row) * value_dim + value_at, mask=value_at < value_dim, other=0.0)
        merged += tl.where(weight == 0, 0.0, weight * part)
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(lse + row, most + tl.log(divisor))
    tl.store(output + row * value_dim + value_at, merged / divisor, mask=value_at < value_dim)
