"""What computing a token costs, for well-known models, from their published shapes."""

from __future__ import annotations

from kvstore.errors import BadInputError
from kvstore.plan.recompute import Model

_COSTS: dict[str, tuple[float, int, int, int]] = {
    "llama-3.1-8b": (8.03e9, 32, 32, 128),
    "llama-3.1-70b": (70.6e9, 80, 64, 128),
    "llama-3.1-405b": (405.9e9, 126, 128, 128),
    "mistral-7b": (7.25e9, 32, 32, 128),
    "qwen2.5-7b": (7.62e9, 28, 28, 128),
    "qwen2.5-32b": (32.8e9, 64, 40, 128),
    "qwen2.5-72b": (72.7e9, 80, 64, 128),
    "qwen3-8b": (8.19e9, 36, 32, 128),
    "qwen3-32b": (32.8e9, 64, 64, 128),
    "deepseek-v3": (37e9, 61, 128, 160),
}
"""Parameters used for a token, layers, query heads, dims of a head. Of DeepSeek's latent attention the mean of the dims
that queries and keys have (192) and that values have (128), as prefills compute it."""


def cost_of(model: str) -> Model:
    """Raises BadInputError for a model that is not known; those of ``kv_sizes.MODELS`` are."""
    if model not in _COSTS:
        raise BadInputError(f"model is {model!r}; known are {', '.join(sorted(_COSTS))}")
    return Model(*_COSTS[model])
