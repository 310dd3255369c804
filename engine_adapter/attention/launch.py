"""How the Triton kernels are started: what is fixed when they are compiled, and how work is shared out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton

from kvstore.engine_adapter.attention import kernels
from kvstore.engine_adapter.attention.merge import Part
from kvstore.engine_adapter.attention.pages import KVPages, PageLayout
from kvstore.errors import BadInputError

LOG2_E = 1.4426950408889634
SPLITS_MAX = 64
SPLIT_TILES = 4
"""A split has at least as many tiles, so that merging costs little beside it."""
DOT_MIN = 16
"""No side of a product of tiles may be smaller."""
BLOCK_HEADS_MAX = 32
N_STAGES = 2
"""Tiles on their way from memory while one is computed on, and that one."""
LATENT_FLOAT32_MAX = 256


class Tiling(NamedTuple):
    """What one program takes at a time, and with how many threads: ``n_warps`` of 32."""

    block_heads: int
    block_tokens: int
    n_warps: int


def tiling(layout: PageLayout, group: int) -> Tiling:
    """The tiling for ``group`` query heads a kv head.

    Chosen so that nothing spills on sm_80, sm_90 and sm_100, and that 99 KiB of shared memory are enough.

    Raises BadInputError for a latent of float32 that is wider than 256: it does not fit.
    """
    is_float32, is_wide = layout.dtype == torch.float32, max(layout.key_dim, layout.value_dim) > 128
    if is_float32 and layout.is_latent and layout.key_dim > LATENT_FLOAT32_MAX:
        raise BadInputError(
            f"a latent of {layout.key_dim} float32 does not fit into a GPU's registers, {LATENT_FLOAT32_MAX} do; keep "
            "latents in 16 bits"
        )
    if is_wide and is_float32:
        return Tiling(DOT_MIN, 16, 8)
    block_heads = min(max(int(triton.next_power_of_2(group)), DOT_MIN), BLOCK_HEADS_MAX)
    if layout.is_latent and is_wide and block_heads == DOT_MIN:
        return Tiling(block_heads, 16, 4)
    if is_wide:
        return Tiling(block_heads, 32, 8)
    return Tiling(block_heads, 32 if is_float32 else 64, 4 if block_heads == DOT_MIN else 8)


def constants(layout: PageLayout, group: int, *, is_aligned: bool, has_sinks: bool, as_float32: bool) -> dict[str, Any]:
    """The compile-time arguments of ``decode_split``."""
    rest = layout.key_dim - layout.value_dim if layout.is_latent else 0
    chosen = tiling(layout, group)
    return {
        "kv_heads": layout.kv_heads,
        "group": group,
        "key_dim": layout.key_dim,
        "value_dim": layout.value_dim,
        "page_tokens": layout.page_tokens,
        "is_latent": layout.is_latent,
        "has_sinks": has_sinks,
        "is_aligned": is_aligned,
        "as_float32": as_float32,
        "block_heads": chosen.block_heads,
        "block_tokens": chosen.block_tokens,
        "block_key": _padded(layout.value_dim if layout.is_latent else layout.key_dim),
        "block_rest": _padded(rest) if rest else 0,
        "block_value": _padded(layout.value_dim),
    }


def decode(q: torch.Tensor, pages: KVPages, scale: float, out: Part[torch.Tensor], n_splits: int | None) -> None:
    """As ``decode_attention``, checked already. Waits for the compiler the first time, never for the device."""
    if n_splits is None:
        n_splits = _splits(q, pages)
    if n_splits == 1:
        decode_splits(q, pages, scale, Part(out.output[None], out.lse[None]))
        return
    shape = (n_splits, *out.output.shape)
    parts = Part(_floats(shape, q.device), _floats(shape[:3], q.device))
    decode_splits(q, pages, scale, parts)
    merge_splits(parts, out)


def decode_splits(
    q: torch.Tensor, pages: KVPages, scale: float, parts: Part[torch.Tensor], *, as_float32: bool | None = None
) -> None:
    """One part for each of ``parts``' first dimension: float32 [splits, requests, q_heads, value_dim] and without the
    last. ``as_float32``: multiply in float32; so does Triton's interpreter, whose 16-bit products are none."""
    layout = pages.layout
    group = q.shape[1] // layout.kv_heads
    if as_float32 is None:
        as_float32 = triton.knobs.runtime.interpret or layout.dtype == torch.float32
    chosen = tiling(layout, group)
    fixed = constants(
        layout, group, is_aligned=pages.is_aligned, has_sinks=pages.sink_tokens is not None, as_float32=as_float32
    )
    grid = q.shape[0], layout.kv_heads * -(-group // chosen.block_heads), parts.lse.shape[0]
    with _device(q):
        kernels.decode_split[grid](
            parts.output,
            parts.lse,
            q,
            pages.addresses,
            pages.indptr,
            pages.first_tokens,
            pages.n_tokens,
            pages.sink_tokens if pages.sink_tokens is not None else pages.n_tokens,
            scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            layout.token_stride,
            layout.head_stride,
            layout.value_offset,
            **fixed,
            num_warps=chosen.n_warps,
            num_stages=N_STAGES,
            enable_fp_fusion=True,
        )


def merge_splits(parts: Part[torch.Tensor], out: Part[torch.Tensor]) -> None:
    """Splits as one; as ``merge`` would, in one kernel."""
    n_splits, value_dim = parts.output.shape[0], parts.output.shape[-1]
    with _device(out.lse):
        kernels.merge_splits[(out.lse.numel(),)](
            out.output,
            out.lse,
            parts.output,
            parts.lse,
            n_splits,
            value_dim=value_dim,
            block_value=triton.next_power_of_2(value_dim),
            block_splits=triton.next_power_of_2(n_splits),
            enable_fp_fusion=True,
        )


def _splits(q: torch.Tensor, pages: KVPages) -> int:
    """Enough programs for every multiprocessor to have two, as long as each has something to do."""
    group = q.shape[1] // pages.layout.kv_heads
    chosen = tiling(pages.layout, group)
    tiles = -(-pages.max_tokens // chosen.block_tokens)
    if q.device.type != "cuda":
        return 1
    programs = len(pages) * pages.layout.kv_heads * -(-group // chosen.block_heads)
    wanted = -(-2 * torch.cuda.get_device_properties(q.device).multi_processor_count // programs)
    return max(1, min(wanted, tiles // SPLIT_TILES, SPLITS_MAX))


def _padded(dim: int) -> int:
    return max(DOT_MIN, int(triton.next_power_of_2(dim)))


def _device(tensor: torch.Tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _floats(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)
