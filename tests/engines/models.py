"""Tiny models with random weights, made on the spot: seconds to serve, and their tokens depend on every block of KV."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, DeepseekV2Config, Gemma3TextConfig, LlamaConfig, PreTrainedTokenizerFast

VOCABULARY = 512
CONTEXT = 4096

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    # Wide enough that logits differ and greedy tokens are not all the same.
    "initializer_range": 0.2,
}


def make_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A Llama with full attention."""
    return _save(LlamaConfig(**{**_SHAPE, **changes}), folder, seed)


def make_gemma(folder: Path, window_tokens: int, seed: int = 0) -> Path:
    """A Gemma 3 of which every second layer sees a window only."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **{**_SHAPE, "query_pre_attn_scalar": 64}, sliding_window=window_tokens, layer_types=kinds, use_cache=True
    )
    return _save(config, folder, seed)


def make_deepseek(folder: Path, seed: int = 0) -> Path:
    """A DeepSeek V2 with latent attention (MLA) and no experts."""
    config = DeepseekV2Config(
        **{name: value for name, value in _SHAPE.items() if name not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,  # with the next but one the only size that vLLM has for CPUs
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=_SHAPE["num_hidden_layers"],
        n_routed_experts=1,
    )
    return _save(config, folder, seed)


def make_lora(folder: Path, base: Path, seed: int) -> Path:
    """An adapter of the attention's projections, strong enough to change every token."""
    shape = json.loads((base / "config.json").read_text())
    rank, hidden, layers = 8, shape["hidden_size"], shape["num_hidden_layers"]
    wide = {"q_proj": hidden, "v_proj": shape["num_key_value_heads"] * shape["head_dim"]}
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, out in wide.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, hidden, generator=noise) * 0.1
            tensors[f"{at}.lora_B.weight"] = torch.randn(out, rank, generator=noise) * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(wide), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**facts, "task_type": "CAUSAL_LM"}))
    return folder


def add_tokenizer(model: Path) -> Path:
    """A tokenizer of as many tokens, from bytes up, so that the model can be given text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # noqa: S106
    fast.save_pretrained(model)
    return model


def change_one_weight(model: Path) -> None:
    """Other weights of the same shapes, names and sizes."""
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    name = min(tensors)
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, file, metadata={"format": "pt"})


def _save(config: Any, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM.from_config
    make(config).to(torch.float32).save_pretrained(folder)
    return folder
