"""Equal weights hit, in any process and from any folder; others never."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvstore.engine_adapter.transformers import KVStoreCache, namespace_of
from kvstore.engine_adapter.transformers.weights import weights_digest
from tests.engine_adapter.transformers.models import greedy, tiny_gemma, tiny_llama, tokens

MakeCache = Callable[..., KVStoreCache]
PROMPT = tokens(0, 40)[None]


def store(model: Any, make_cache: MakeCache, **settings: Any) -> None:
    cache = make_cache(model, PROMPT, **settings)
    greedy(model, PROMPT, n_new=1, past_key_values=cache)
    cache.save()


def hits(model: Any, make_cache: MakeCache, **settings: Any) -> int:
    return make_cache(model, PROMPT, **settings).n_hit_tokens


def test_equal_weights_hit_wherever_they_come_from(make_cache: MakeCache, tmp_path: Path) -> None:
    model = tiny_llama()
    store(model, make_cache)
    assert hits(copy.deepcopy(model), make_cache) == 39
    model.save_pretrained(tmp_path / "here")
    assert hits(AutoModelForCausalLM.from_pretrained(tmp_path / "here"), make_cache) == 39
    assert hits(tiny_llama(), make_cache) == 39


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[5, 7] += 1e-3


def change_behind_its_back(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.weight.data += 1e-3


def replace(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 1.5)


def to_bfloat16(model: Any) -> None:
    model.to(torch.bfloat16)


def other_rope(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 5e5


@pytest.mark.parametrize("change", [change_in_place, change_behind_its_back, replace, to_bfloat16, other_rope])
def test_what_changes_kv_does_not_hit(make_cache: MakeCache, change: Callable[[Any], None]) -> None:
    model = tiny_llama()
    store(model, make_cache)
    assert hits(model, make_cache) == 39
    change(model)
    assert hits(model, make_cache) == 0
    assert hits(tiny_llama(), make_cache) == 39


def test_a_named_revision_is_not_another_dtype(make_cache: MakeCache) -> None:
    store(tiny_llama(), make_cache, revision="x")
    assert hits(tiny_llama().to(torch.bfloat16), make_cache, revision="x") == 0
    assert hits(tiny_llama(), make_cache, revision="x") == 39


def test_other_models_do_not_hit(make_cache: MakeCache) -> None:
    store(tiny_llama(), make_cache)
    assert hits(tiny_llama(seed=2), make_cache) == 0
    assert hits(tiny_gemma(), make_cache) == 0
    assert hits(tiny_llama(), make_cache, block_tokens=32) == 0
    assert hits(tiny_llama(), make_cache, name="another") == 0


def test_salt_and_lora_are_kept_apart(make_cache: MakeCache) -> None:
    model = tiny_llama()
    kinds: list[dict[str, Any]] = [{}, {"salt": "a"}, {"salt": "b"}, {"lora": "x 1"}, {"lora": "x 2"}, {"lora": "y 1"}]
    for i, settings in enumerate(kinds):
        assert hits(model, make_cache, **settings) == 0, kinds[i]
        store(model, make_cache, **settings)
        assert hits(model, make_cache, **settings) == 39


def test_a_named_revision_stands_for_the_weights(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.engine_adapter.transformers.identity.weights_digest", None)  # would fail if called
    model = tiny_llama()
    store(model, make_cache, revision="2024-11-01")
    assert hits(model, make_cache, revision="2024-11-01") == 39
    assert hits(model, make_cache, revision="2024-12-01") == 0


def test_fields_that_say_nothing_do_not_matter() -> None:
    model, other = tiny_llama(), tiny_llama()
    other.config.eos_token_id = 7
    other.config.name_or_path = "/tmp"  # noqa: S108 - a folder that exists
    assert namespace_of(model) == namespace_of(other)
    other.config.rms_norm_eps = 1e-5
    assert [each.partition(":")[0] for each in namespace_of(model).differences(namespace_of(other))] == ["revision"]


def test_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    digest = weights_digest(model)
    monkeypatch.setattr("kvstore.engine_adapter.transformers.weights._read_all", None)  # would fail if called
    assert weights_digest(model) == digest


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_part_of_the_identity(make_cache: MakeCache) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)

    def adapted(seed: int) -> Any:
        base = tiny_llama()
        torch.manual_seed(seed)
        return peft.get_peft_model(base, config, adapter_name="first")

    store(tiny_llama(), make_cache)
    model = adapted(5)
    torch.manual_seed(6)
    model.add_adapter("second", config)
    expected = {}
    for adapter in ("first", "second"):
        model.set_adapter(adapter)
        assert hits(model, make_cache) == 0, adapter
        store(model, make_cache)
        assert hits(model, make_cache) == 39
        expected[adapter] = greedy(model, PROMPT)
        assert greedy(model, PROMPT, past_key_values=make_cache(model, PROMPT)) == expected[adapter]
    assert expected["first"] != expected["second"]
    with model.disable_adapter():
        assert hits(model, make_cache) == 39  # the base model's
    # The same name with other weights is another adapter; the same weights are found again.
    assert hits(adapted(7), make_cache) == 0
    assert hits(adapted(5), make_cache) == 39
    # Merged into the weights it is another model.
    assert hits(model.merge_and_unload(), make_cache) == 0
