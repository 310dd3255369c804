"""What a worker's KV looks like, as a namespace: layers and bytes of its pages, and what computes them.

Layers with a sliding window are stored by themselves where a model has full attention as well, so that a hit needs
their last blocks only. Inside of a page only vLLM knows its way (on the CPU it depends on the instruction set), so
pages are opaque. Version, attention backend, instruction set and layout stand in the namespace: what one wrote the
other never reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm
from vllm.v1 import kv_cache_interface as kvi

from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.parts import in_groups
from kvstore.errors import BadInputError
from kvstore.types import DTYPE_BYTES, GroupKind, KVGroup, KVSpec, Namespace, Shard

LAYOUT_VERSION = 2
"""Raised when this adapter puts pages into blocks in another way."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's memory: the page of block i begins ``i * stride_bytes`` after ``address``. That is 0 on devices other
    than CUDA's.

    ``group`` is the engine's, ``part`` is that of the store's blocks which has the layer (see ``kvstore.hybrid``).
    """

    group: int
    names: tuple[str, ...]
    tensor: torch.Tensor
    address: int
    stride_bytes: int
    page_bytes: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Layers that share a block table."""

    layers: tuple[str, ...]
    window_tokens: int
    """How many tokens before the next one these layers look at; 0 for all."""
    says: str

    @property
    def recycles(self) -> bool:
        """Whether the engine takes blocks from a request that it still computes."""
        return self.window_tokens > 0


def check_prefixes(vllm_config: Any) -> None:
    """Raises BadInputError for an engine that says something else behind a prefix than if it computes the prefix, too.

    vLLM's reference backend for MLA on CPUs: it reads latents in another way than it computes them, and the answers are
    visibly apart. vLLM turns its own prefix caching and chunked prefill off with it, which is how to tell.
    """
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if on_cpu and vllm_config.model_config.use_mla and not vllm_config.scheduler_config.enable_chunked_prefill:
        raise BadInputError(
            f"{vllm_config.model_config.model} has MLA, and vLLM's backend for that on this CPU gives other answers "
            "behind a prefix that it did not just compute (its own prefix caching is off, too): run it without kvstore"
        )


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
    # The next token is in its own window. Some speculative decoding reads a few tokens before it again.
    windows = [
        max(spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0), 1)
        for spec in specs
        if isinstance(spec, kvi.SlidingWindowSpec)
    ]
    kinds = sorted({f"{type(spec).__name__}:{getattr(spec, 'sliding_window', None) or ''}" for spec in specs})
    return GroupShape(tuple(group.layer_names), max(windows, default=0), f"{number}:{'+'.join(kinds)}")


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
    address = tensor.data_ptr() if tensor.device.type in ("cpu", "cuda") else 0
    return LayerPages(group, (name,), tensor, address, stride_bytes, page_bytes)


def stored_as(
    block_tokens: int, groups: tuple[GroupShape, ...], layers: list[LayerPages], shard: Shard
) -> tuple[KVSpec, list[LayerPages]]:
    """What a block of the store has of these layers, and the layers in that order, each with its part.

    Windows are groups of their own if there are other layers, too, and one worker computes all: ranks are asked
    together for what all of them have, which hybrid namespaces can't be.
    """
    alone = shard.tp_size == shard.pp_size == 1
    kinds = [_kv_group(layer, groups[layer.group].window_tokens) for layer in layers]
    kv_groups, order = in_groups(kinds, windows_apart=alone)
    spec = KVSpec(block_tokens, kv_groups)
    places = BlockLayout.by_part(spec).layers
    return spec, [replace(layers[i], part=place.part) for i, place in zip(order, places, strict=True)]


def namespace_of(
    vllm_config: Any, groups: tuple[GroupShape, ...], layers: list[LayerPages], spec: KVSpec,
    *, model: str, tenant: str, shard: Shard,
) -> Namespace:  # fmt: skip
    """The namespace of one worker, but for ``revision``."""
    cache = vllm_config.cache_config
    facts = [
        f"vllm {vllm.__version__} kv {LAYOUT_VERSION}",
        f"{layers[0].tensor.device.type} {_backends(vllm_config, groups)}",
        f"layout {cache.kv_cache_layout}",
        f"cache {cache.cache_dtype}",
        *(group.says for group in groups),
    ]
    return Namespace(model=model, spec=spec, engine="; ".join(facts)[:1024], shard=shard, tenant=tenant)


def _kv_group(layer: LayerPages, window_tokens: int) -> KVGroup:
    dtype = str(layer.tensor.dtype).removeprefix("torch.")
    dtype = {"float8_e4m3fn": "float8_e4m3"}.get(dtype, dtype)
    return KVGroup(
        layers=1,
        dtype=dtype if dtype in DTYPE_BYTES else "uint8",
        kind=GroupKind.SLIDING if window_tokens else GroupKind.FULL,
        layout="opaque",
        window_tokens=window_tokens or None,
        page_bytes=layer.page_bytes,
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
