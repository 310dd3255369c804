"""What KV of well-known models takes and costs to compute, from their published shapes: bytes in 16 bits."""

from __future__ import annotations

from pathlib import Path

from kvstore.bench.model_config import kv_group_of
from kvstore.errors import BadInputError
from kvstore.recompute import doubling_tokens_of
from kvstore.types import GroupKind, KVGroup, KVSpec

_SHAPES: dict[str, tuple[int, int, int, int, float]] = {
    "llama-3.1-8b": (32, 8, 128, 32, 8.0),
    "llama-3.1-70b": (80, 8, 128, 64, 70.6),
    "llama-3.1-405b": (126, 8, 128, 128, 406.0),
    "mistral-7b": (32, 8, 128, 32, 7.2),
    "qwen2.5-7b": (28, 4, 128, 28, 7.6),
    "qwen2.5-32b": (64, 8, 128, 40, 32.8),
    "qwen2.5-72b": (80, 8, 128, 64, 72.7),
    "qwen3-8b": (36, 8, 128, 32, 8.2),
    "qwen3-32b": (64, 8, 128, 64, 32.8),
}
"""Layers, KV heads, dims of a head, query heads, parameters in billions."""
_LATENT_SHAPES: dict[str, tuple[int, int]] = {"deepseek-v3": (61, 576)}
"""Layers and dims of the latent, for models with multi-head latent attention."""

MODELS = tuple(sorted([*_SHAPES, *_LATENT_SHAPES]))


def bytes_per_token(model: str) -> int:
    """Bytes of KV of one token over all layers, of one of ``MODELS`` or of the model that a ``config.json`` describes.

    Raises BadInputError for anything else.
    """
    if model in _LATENT_SHAPES:
        layers, dim = _LATENT_SHAPES[model]
        group = KVGroup(layers, 1, dim, kind=GroupKind.MLA)
    elif model in _SHAPES:
        group = KVGroup(*_SHAPES[model][:3])
    elif Path(model).exists():
        group = kv_group_of(Path(model))
    else:
        raise BadInputError(
            f"model is {model!r:.80}; known are {', '.join(MODELS)}: or give the config.json of a model, or "
            "--bytes-per-token"
        )
    return KVSpec(block_tokens=1, groups=(group,)).block_bytes


def attention_doubling_tokens(model: str) -> float:
    """See ``kvstore.recompute``; 0 for a model that isn't known so well."""
    if model not in _SHAPES:
        return 0.0
    layers, _, head_dim, query_heads, billions = _SHAPES[model]
    return doubling_tokens_of(billions * 1e9, layers, query_heads, head_dim)
