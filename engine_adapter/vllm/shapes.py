"""What a worker's KV looks like, as a namespace: layers and bytes of its pages, and what computes them.

Inside of a page only vLLM knows its way (on the CPU it depends on the instruction set), so pages are opaque. Version,
attention backend, instruction set and layout stand in the namespace: what one wrote the other never reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm
from vllm.v1 import kv_cache_interface as kvi

from kvstore.errors import BadInputError
from kvstore.types import DTYPE_BYTES, KVGroup, KVSpec, Namespace, Shard

LAYOUT_VERSION = 1
"""Raised when this adapter puts pages into blocks in another way."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's memory: the page of block i begins ``i * stride_bytes`` after ``address``, which is 0 on a device."""

    group: int
    names: tuple[str, ...]
    tensor: torch.Tensor
    address: int
    stride_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Layers that share a block table."""

    layers: tuple[str, ...]
    recycles: bool
    """Whether the engine takes blocks from a request that it still computes (sliding windows)."""
    says: str


def group_shapes(kv_cache_config: Any, parallel_config: Any) -> tuple[GroupShape, ...]:
    """The groups that are stored. Raises BadInputError for a model or setting that can't be, and says which."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel_config, name, 1) > 1:
            raise BadInputError(
                f"{name} is {getattr(parallel_config, name)}; kvstore knows no context parallelism: use 1"
            )
    groups = kv_cache_config.kv_cache_groups
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if len(sizes) != 1:
        raise BadInputError(
            f"the model's groups of layers have blocks of {sorted(sizes)} tokens; kvstore needs one size for all "
            "(--block-size), or --disable-hybrid-kv-cache-manager"
        )
    return tuple(_group_shape(i, group) for i, group in enumerate(groups))


def _group_shape(number: int, group: Any) -> GroupShape:
    specs = [*kvi.iter_layer_specs(group.kv_cache_spec)]
    for spec in specs:
        if isinstance(spec, kvi.SlidingWindowSpec):
            continue
        if not isinstance(spec, kvi.FullAttentionSpec) or getattr(spec, "tokens_per_state", 1) != 1:
            raise BadInputError(
                f"layers {group.layer_names[0]}, ... keep a {type(spec).__name__}; kvstore stores full attention, "
                "MLA and sliding windows of vLLM, no states and no other kinds: run this model without it"
            )
    windows = {spec.sliding_window for spec in specs if isinstance(spec, kvi.SlidingWindowSpec)}
    kinds = sorted({f"{type(spec).__name__}:{getattr(spec, 'sliding_window', None) or ''}" for spec in specs})
    return GroupShape(tuple(group.layer_names), bool(windows), f"{number}:{'+'.join(kinds)}")


def layer_pages(
    groups: tuple[GroupShape, ...], kv_cache_config: Any, kv_caches: dict[str, torch.Tensor]
) -> list[LayerPages]:
    """The memory of every layer, group by group. Raises BadInputError where the engine's layout can't be read."""
    found: dict[tuple[int, int], LayerPages] = {}
    for number, group in enumerate(groups):
        for name in group.layers:
            tensor = kv_caches.get(name)
            if tensor is None:
                raise BadInputError(f"the engine registered no KV for layer {name}, which is in group {number}")
            # Layers that share KV with another are in the same group, and have its memory.
            place = number, tensor.data_ptr()
            same = found.get(place)
            if same is not None:
                found[place] = replace(same, names=(*same.names, name))
            else:
                found[place] = _pages(number, name, tensor, kv_cache_config.num_blocks)
    return [*found.values()]


def _pages(group: int, name: str, tensor: torch.Tensor, n_blocks: int) -> LayerPages:
    if tensor.shape[0] % n_blocks:
        raise BadInputError(f"layer {name} has {tensor.shape[0]} pages for {n_blocks} blocks of the engine")
    unit = tensor.element_size()
    pages_per_block = tensor.shape[0] // n_blocks
    stride_bytes = tensor.stride(0) * unit * pages_per_block
    page_bytes = tensor[0].numel() * unit * pages_per_block
    # A page is one run of bytes if its dimensions, widest step first, leave no gap.
    dimensions = [(tensor.stride(i), tensor.shape[i]) for i in range(1, tensor.dim()) if tensor.shape[i] > 1]
    if pages_per_block > 1:
        dimensions.append((tensor.stride(0), pages_per_block))
    step = 1
    for stride, size in sorted(dimensions):
        if stride != step:
            raise BadInputError(
                f"a block of layer {name} is not one run of bytes (strides {tensor.stride()}, "
                f"shape {tuple(tensor.shape)}): "
                "set VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        step *= size
    address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
    return LayerPages(group, (name,), tensor, address, stride_bytes, page_bytes)


def namespace_of(
    vllm_config: Any, groups: tuple[GroupShape, ...], layers: list[LayerPages], *, model: str, tenant: str, shard: Shard
) -> Namespace:
    """The namespace of one worker, but for ``revision``."""
    cache = vllm_config.cache_config
    block_tokens: int = cache.block_size
    spec = KVSpec(block_tokens, tuple(_kv_group(layer) for layer in layers))
    facts = [
        f"vllm {vllm.__version__} kv {LAYOUT_VERSION}",
        f"{layers[0].tensor.device.type} {_backends(vllm_config, groups)}",
        f"layout {cache.kv_cache_layout}",
        f"cache {cache.cache_dtype}",
        *(group.says for group in groups),
    ]
    return Namespace(model=model, spec=spec, engine="; ".join(facts)[:1024], shard=shard, tenant=tenant)


def _kv_group(layer: LayerPages) -> KVGroup:
    dtype = str(layer.tensor.dtype).removeprefix("torch.")
    dtype = {"float8_e4m3fn": "float8_e4m3"}.get(dtype, dtype)
    return KVGroup(
        layers=1, dtype=dtype if dtype in DTYPE_BYTES else "uint8", layout="opaque", page_bytes=layer.page_bytes
    )


def _backends(vllm_config: Any, groups: tuple[GroupShape, ...]) -> str:
    """Attention backends and, on the CPU, their instruction sets: they decide how a page looks inside."""
    context = vllm_config.compilation_config.static_forward_context
    found = set()
    for name in (name for group in groups for name in group.layers):
        layer = context.get(name)
        backend = getattr(layer, "attn_backend", None)
        found.add(f"{backend.get_name() if backend is not None else type(layer).__name__}/{getattr(layer, 'isa', '')}")
    return "+".join(sorted(found))
