"""From which position on a model's attention costs more than all the rest, by its config as transformers has it."""

from __future__ import annotations

from typing import Any

from kvstore.recompute import doubling_tokens_of

_WHOLE = ("full_attention", "attention")


def doubling_tokens_of_config(config: Any) -> float:
    """``attention_doubling_tokens`` for ``Client.open``; 0 if the config, one of a decoder, does not say enough.

    Counted is what a token is multiplied with: projections of attention, and three matrices of an MLP, of the experts
    that it visits where there are some. Only layers that look at all tokens before make later ones dearer.
    """

    def number(*names: str) -> int:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), 0)

    layers, hidden, heads = (number(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    mlp = number("intermediate_size")
    if not (layers and hidden and heads and mlp) or number("kv_lora_rank"):
        return 0.0
    head_dim = number("head_dim") or hidden // heads
    kv_heads = number("num_key_value_heads") or heads
    visited = number("num_experts_per_tok", "num_experts_per_token")
    if visited:
        mlp = visited * (number("moe_intermediate_size") or mlp) + number("shared_expert_intermediate_size")
    n_parameters = layers * hidden * (2 * (heads + kv_heads) * head_dim + 3 * mlp)
    return doubling_tokens_of(n_parameters, _whole_layers(config, layers), heads, head_dim)


def _whole_layers(config: Any, layers: int) -> int:
    """How many layers look at all tokens before."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return sum(kind in _WHOLE for kind in kinds)
    return 0 if getattr(config, "sliding_window", None) else layers
