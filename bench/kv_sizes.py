"""How many bytes of KV a token has, for well-known models, from their published shapes in 16 bits."""

from __future__ import annotations

from kvstore.errors import BadInputError
from kvstore.types import GroupKind, KVGroup, KVSpec

_SHAPES: dict[str, tuple[int, int, int]] = {
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b": (80, 8, 128),
    "llama-3.1-405b": (126, 8, 128),
    "mistral-7b": (32, 8, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen2.5-32b": (64, 8, 128),
    "qwen2.5-72b": (80, 8, 128),
    "qwen3-8b": (36, 8, 128),
    "qwen3-32b": (64, 8, 128),
}
"""Layers, KV heads, dims of a head."""
_LATENT_SHAPES: dict[str, tuple[int, int]] = {"deepseek-v3": (61, 576)}
"""Layers and dims of the latent, for models with multi-head latent attention."""

MODELS = tuple(sorted([*_SHAPES, *_LATENT_SHAPES]))


def bytes_per_token(model: str) -> int:
    """Bytes of KV of one token over all layers. Raises BadInputError for a model that is not in ``MODELS``."""
    if model in _LATENT_SHAPES:
        layers, dim = _LATENT_SHAPES[model]
        group = KVGroup(layers, 1, dim, kind=GroupKind.MLA)
    elif model in _SHAPES:
        group = KVGroup(*_SHAPES[model])
    else:
        raise BadInputError(f"model is {model!r}; known are {', '.join(MODELS)}: or give --bytes-per-token")
    return KVSpec(block_tokens=1, groups=(group,)).block_bytes
