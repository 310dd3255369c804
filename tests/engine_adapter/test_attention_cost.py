"""Where attention costs as much as the rest, from configs as transformers has them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig

from kvstore.engine_adapter.attention_cost import doubling_tokens_of_config

LLAMA_8B: dict[str, Any] = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip


def test_llama() -> None:
    assert doubling_tokens_of_config(LlamaConfig(**LLAMA_8B)) == pytest.approx(26_600, rel=0.01)


def test_of_experts_those_count_that_a_token_visits() -> None:
    config = MixtralConfig(**LLAMA_8B, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    assert doubling_tokens_of_config(config) == pytest.approx(48_100, rel=0.01)


def test_only_layers_that_look_at_everything_make_late_tokens_dearer() -> None:
    config = LlamaConfig(**LLAMA_8B)
    whole = doubling_tokens_of_config(config)
    config.layer_types = ["sliding_attention", "full_attention"] * 16
    assert doubling_tokens_of_config(config) == pytest.approx(2 * whole)
    config.layer_types = ["sliding_attention"] * 32
    assert doubling_tokens_of_config(config) == 0


def test_a_config_that_says_too_little_tells_nothing() -> None:
    class Bare:
        hidden_size = 64

    assert doubling_tokens_of_config(Bare()) == 0
