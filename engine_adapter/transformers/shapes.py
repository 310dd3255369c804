"""What the KV of a transformers model looks like: which layers keep some, of what shape, and how it is stored.

Layers with a sliding window are stored by themselves where a model has full attention as well, so that a hit needs
their last blocks only. What a window no longer shows of those is cut off when it is loaded. Inside a block a head's
tokens lie in a row (HND), as in the tensors of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvstore.engine_adapter.parts import in_groups
from kvstore.errors import BadInputError
from kvstore.types import GroupKind, KVGroup, KVSpec

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
CHANGING_ROPE = ("dynamic", "longrope")
PREFIX_LM = ("paligemma", "colpali")


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer that keeps KV: its index in the model, its place among the stored layers, and what it keeps."""

    index: int
    stored_index: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None


@dataclass(frozen=True, slots=True)
class KVShapes:
    """The layers of a model that keep KV, in the model's order, and how many layers it has in all."""

    layers: tuple[KVLayer, ...]
    n_layers: int
    dtype: torch.dtype
    groups: tuple[KVGroup, ...]
    """As they are stored."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> KVShapes:
        """Read from the model's config. Raises BadInputError for what can't be stored, saying what it is."""
        config = model.config
        if str(getattr(config, "model_type", "")) in PREFIX_LM:
            raise BadInputError(
                f"{type(model).__name__} looks at the whole prompt from each of its tokens: not supported"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise BadInputError(f"{type(model).__name__} has an encoder; only decoder-only models are supported")
        config = config.get_text_config(decoder=True)
        _check_rope(config)
        _check_causal(config)
        if torch.is_autocast_enabled(model.device.type):
            raise BadInputError(
                "keys and values have different dtypes under torch.autocast; load the model in its dtype"
            )
        if model.dtype not in DTYPES:
            raise BadInputError(f"the model computes in {model.dtype}; known are {', '.join(map(str, DTYPES))}")
        found: list[tuple[int, int, int, int | None]] = []
        layers = DynamicCache(config=config).layers
        for index, (layer, layer_config) in enumerate(zip(layers, config.per_layer_config, strict=True)):
            if isinstance(layer, DummyLayer):
                continue  # it reads another layer's KV, or has no attention
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise BadInputError(
                    f"layer {index} of {type(model).__name__} keeps a {type(layer).__name__}, not keys and values: "
                    "models with states are not supported, run this one without kvstore"
                )
            heads, head_dim = _heads(layer_config)
            found.append((index, heads, head_dim, getattr(layer, "sliding_window", None)))
        if not found:
            raise BadInputError(f"{type(model).__name__} has no layer with keys and values")
        groups, order = in_groups(
            [_group(heads, head_dim, window, model.dtype) for _, heads, head_dim, window in found]
        )
        kept = tuple(
            KVLayer(index, order.index(i), heads, head_dim, window)
            for i, (index, heads, head_dim, window) in enumerate(found)
        )
        return cls(kept, len(layers), model.dtype, groups)

    def spec(self, block_tokens: int) -> KVSpec:
        """How blocks of this KV look. Raises BadInputError for a block size that can't be."""
        return KVSpec(block_tokens=block_tokens, groups=self.groups)


def _group(heads: int, head_dim: int, window_tokens: int | None, dtype: torch.dtype) -> KVGroup:
    """One layer. The next token is in its own window, which shows so many tokens less one of those before it."""
    before = None if window_tokens is None else max(window_tokens - 1, 1)
    kind = GroupKind.FULL if window_tokens is None else GroupKind.SLIDING
    return KVGroup(1, heads, head_dim, DTYPES[dtype], kind, "HND", before)


def _heads(config: Any) -> tuple[int, int]:
    """KV heads and head dim of one layer's config."""
    query_heads = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    if (value_dim := getattr(config, "v_head_dim", None)) not in (None, head_dim):
        raise BadInputError(f"keys of {head_dim} and values of {value_dim} numbers a head are not supported")
    return heads, head_dim


def _check_causal(config: Any) -> None:
    """Where tokens see those after them, KV of a prefix depends on what follows."""
    bidirectional = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if bidirectional or getattr(config, "is_causal", True) is False:
        raise BadInputError("the model's tokens see those that follow, so that KV of a prefix can't be reused")


def _check_rope(config: Any) -> None:
    """With these the keys of a prefix depend on how long the whole prompt is: another prompt can't use them."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if parameters.get("rope_type") in CHANGING_ROPE:
            raise BadInputError(
                f"rope_type {parameters['rope_type']!r} makes keys depend on the length of the whole prompt; such KV "
                "can't be reused by other prompts"
            )
