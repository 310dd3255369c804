"""Tiny models with random weights, made on the spot: the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY = 199
WINDOW_TOKENS = 20
BLOCK_TOKENS = 16

SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "intermediate_size": 96, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    # So that every token of the prompt has a say in what comes next: tied or small weights repeat the last one.
    "tie_word_embeddings": False, "initializer_range": 0.3,
}  # fmt: skip


def tiny_llama(seed: int = 1, **settings: Any) -> Any:
    """Full attention everywhere."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings})).eval()


def tiny_gemma(seed: int = 1, **settings: Any) -> Any:
    """Every other layer has a window of 20 tokens."""
    torch.manual_seed(seed)
    windows = {"sliding_window": WINDOW_TOKENS, "sliding_window_pattern": 2, "initializer_range": 0.6}
    config = Gemma3TextConfig(**{**SIZES, **windows, **settings})
    return Gemma3ForCausalLM(config).eval()


MODELS = {"llama": tiny_llama, "gemma": tiny_gemma}


def tokens(seed: int, n: int) -> torch.Tensor:
    """Random token ids [n], none of them padding."""
    return torch.randint(1, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, input_ids: torch.Tensor, n_new: int = 12, **inputs: Any) -> list[list[int]]:
    """What the model says next, without sampling."""
    output: Any = model.generate(input_ids, max_new_tokens=n_new, do_sample=False, **inputs)
    return [list(map(int, row)) for row in output[:, input_ids.shape[1] :]]
