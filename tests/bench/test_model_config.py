"""Bytes of KV from the config.json of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.bench.kv_sizes import bytes_per_token
from kvstore.errors import BadInputError

LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("config", "n_bytes"),
    [
        (LLAMA, 32 * 8 * 128 * 2 * 2),
        (LLAMA | {"torch_dtype": "float32"}, 32 * 8 * 128 * 2 * 4),
        (LLAMA | {"head_dim": 64, "dtype": "torch.float16"}, 32 * 8 * 64 * 2 * 2),
        (LLAMA | {"num_key_value_heads": None}, 32 * 32 * 128 * 2 * 2),
        ({"text_config": LLAMA, "model_type": "with pictures"}, 32 * 8 * 128 * 2 * 2),
        (LLAMA | {"layer_types": ["full_attention", "sliding_attention", "linear_attention"]}, 2 * 8 * 128 * 2 * 2),
        (LLAMA | {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 61 * 576 * 2),
    ],
)
def test_bytes_of_a_token(tmp_path: Path, config: dict[str, Any], n_bytes: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bytes_per_token(str(tmp_path / "config.json")) == bytes_per_token(str(tmp_path)) == n_bytes


def test_a_file_gives_what_the_name_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert bytes_per_token(str(tmp_path)) == bytes_per_token("llama-3.1-8b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "is no object"),
        ("{}", "num_hidden_layers is missing"),
        (json.dumps(LLAMA | {"num_hidden_layers": "32"}), "num_hidden_layers is '32', which is no count"),
        (json.dumps(LLAMA | {"layer_types": ["linear_attention"]}), "has no layer with attention"),
        (json.dumps(LLAMA | {"num_key_value_heads": 0}), "num_key_value_heads is 0"),
        (json.dumps({"text_config": 3}), "text_config is 3"),
    ],
)
def test_a_file_that_can_not_be(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match=said) as caught:
        bytes_per_token(str(path))
    assert str(path) in str(caught.value)


def test_neither_a_name_nor_a_file() -> None:
    with pytest.raises(BadInputError, match=r"known are .*config\.json"):
        bytes_per_token("gpt-unknown")
    with pytest.raises(BadInputError, match=r"config\.json can't be read"):
        bytes_per_token("/")
