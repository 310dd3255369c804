"""A cache given to something else than what it was made for says so: the answer would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from kvstore.client import Client
from kvstore.engine_adapter.transformers import KVStoreCache, namespace_of
from kvstore.errors import BadInputError
from tests.engine_adapter.transformers.models import (
    BLOCK_TOKENS,
    VOCABULARY,
    greedy,
    tiny_gemma,
    tiny_llama,
    tokens,
)

MakeCache = Callable[..., KVStoreCache]


def stored(make_cache: MakeCache) -> tuple[Any, torch.Tensor]:
    """A model, and a prompt that is stored."""
    model = tiny_llama()
    prompt = tokens(0, 40)[None]
    cache = make_cache(model, prompt)
    greedy(model, prompt, n_new=1, past_key_values=cache)
    cache.save()
    return model, prompt


def test_another_prompt(make_cache: MakeCache) -> None:
    model, prompt = stored(make_cache)
    cache = make_cache(model, torch.cat([prompt[0], tokens(1, 5)])[None])
    with pytest.raises(BadInputError, match="row 0 has other tokens than the prompt"):
        greedy(model, torch.cat([prompt[0], tokens(2, 5)])[None], past_key_values=cache)
    other = torch.cat([tokens(3, 40), tokens(2, 5)])[None]
    cache = make_cache(model, torch.cat([prompt[0], tokens(1, 5)])[None])
    with pytest.raises(BadInputError, match="other tokens"):
        greedy(model, other, past_key_values=cache)
    # None of that was stored.
    assert make_cache(model, other).n_hit_tokens == 0


def test_another_batch(make_cache: MakeCache) -> None:
    model, prompt = stored(make_cache)
    cache = make_cache(model, prompt.repeat(2, 1))
    with pytest.raises(BadInputError, match="a batch of 3 rows was given, but the cache was made for 2"):
        greedy(model, prompt.repeat(3, 1), past_key_values=cache)


def test_another_padding(make_cache: MakeCache) -> None:
    model, prompt = stored(make_cache)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    with pytest.raises(BadInputError, match=r"padded by \(3,\), but the cache was made for \(0,\)"):
        greedy(model, prompt, attention_mask=mask, past_key_values=make_cache(model, prompt))
    mask = torch.ones_like(prompt)
    mask[0, 7] = 0
    with pytest.raises(BadInputError, match="attention mask is not one"):
        greedy(model, prompt, attention_mask=mask, past_key_values=make_cache(model, prompt))


def test_other_positions(make_cache: MakeCache) -> None:
    model, prompt = stored(make_cache)
    cache = make_cache(model, prompt)
    with pytest.raises(BadInputError, match="at other positions"), torch.no_grad():
        model(prompt[:, 39:], past_key_values=cache, position_ids=torch.tensor([[7]]))


def test_another_autocast(make_cache: MakeCache) -> None:
    model, prompt = stored(make_cache)
    cache = make_cache(model, prompt)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BadInputError, match=r"torch\.autocast is on"):
        greedy(model, prompt, past_key_values=cache)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BadInputError, match="load the model in its dtype"):
        make_cache(model, prompt)


def test_tokens_of_another_type(make_cache: MakeCache) -> None:
    model, prompt = stored(make_cache)
    cache = make_cache(model, prompt)
    with pytest.raises(BadInputError, match="token_type_ids mark"), torch.no_grad():
        model(prompt[:, 39:], past_key_values=cache, token_type_ids=torch.ones(1, 1))


def test_an_error_of_our_own_does_not_reach_generate(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    prompt = tokens(8, 40)[None]
    expected = greedy(model, prompt)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    for name in ("begin", "write", "end"):
        cache = make_cache(model, prompt)
        with monkeypatch.context() as patch:
            patch.setattr(f"kvstore.engine_adapter.transformers.keeping.BatchKeeper.{name}", broken)
            assert greedy(model, prompt, past_key_values=cache) == expected
        assert cache.save() == 0
        assert cache.save_reason == "ZeroDivisionError: a bug"
        assert "generate goes on" in caplog.text
    assert make_cache(model, prompt).n_hit_tokens == 0


def test_embeddings_instead_of_tokens(make_cache: MakeCache) -> None:
    model, prompt = stored(make_cache)
    cache = make_cache(model, prompt)
    embeddings = model.get_input_embeddings()(prompt)
    with pytest.raises(BadInputError, match="made for text"), torch.no_grad():
        model(inputs_embeds=embeddings[:, 39:], past_key_values=cache)


def test_the_inner_model_does_not_say_its_tokens_so_nothing_is_stored(make_cache: MakeCache) -> None:
    model = tiny_llama()
    prompt = tokens(5, 40)[None]
    cache = make_cache(model, prompt)
    with torch.no_grad():
        model.model(prompt, past_key_values=cache)
    assert "did not say" in cache.save_reason
    assert make_cache(model, prompt).n_hit_tokens == 0


def test_arguments_by_position_are_understood(make_cache: MakeCache) -> None:
    model = tiny_llama()
    prompt = tokens(5, 40)[None]
    cache = make_cache(model, prompt)
    with torch.no_grad():
        model(prompt, None, None, cache)
    cache.save()
    assert make_cache(model, prompt).n_hit_tokens == 39


def test_a_handle_of_another_model(client: Client) -> None:
    llama, other = tiny_llama(), tiny_llama(seed=2)
    handle = client.open(namespace_of(llama, block_tokens=BLOCK_TOKENS))
    KVStoreCache.for_prompt(handle, llama, tokens(0, 20)[None])
    with pytest.raises(BadInputError, match="revision: "):
        KVStoreCache.for_prompt(handle, other, tokens(0, 20)[None])
    with pytest.raises(BadInputError, match=r"give a kvstore\.Client"):
        KVStoreCache.for_prompt(client._session, llama, tokens(0, 20)[None])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'dynamic'"),
        ({"dtype": "float64"}, "computes in torch.float64"),
        ({"is_causal": False}, "see those that follow"),
    ],
)  # fmt: skip
def test_models_whose_kv_can_not_be_stored(make_cache: MakeCache, settings: dict[str, Any], said: str) -> None:
    model = tiny_llama(**settings)
    if "dtype" in settings:
        model = model.to(torch.float64)
    with pytest.raises(BadInputError, match=said):
        make_cache(model, tokens(0, 20)[None])


@pytest.mark.parametrize("layer_types", [["conv", "full_attention"], ["full_attention", "conv"]])
def test_models_with_states_are_refused(make_cache: MakeCache, layer_types: list[str]) -> None:
    config = Lfm2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=VOCABULARY, layer_types=layer_types,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config)
    where = layer_types.index("conv")
    with pytest.raises(BadInputError, match=f"layer {where} of Lfm2ForCausalLM keeps a LinearAttentionLayer.*states"):
        make_cache(model, tokens(0, 20)[None])


def test_no_transformers_model(make_cache: MakeCache) -> None:
    with pytest.raises(BadInputError, match="model is a Linear"):
        make_cache(torch.nn.Linear(2, 2), tokens(0, 20)[None])


def test_a_cache_that_was_reset_stores_nothing_wrong(make_cache: MakeCache) -> None:
    model, prompt = stored(make_cache)
    cache = make_cache(model, prompt)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert greedy(model, prompt, past_key_values=cache) == greedy(model, prompt)


def test_training_goes_through_a_hit(make_cache: MakeCache) -> None:
    """With gradients nothing is written in place: what was computed from stays as it was."""
    # As many heads of keys as of queries: attention then works on the cache's own memory.
    model = tiny_gemma(num_key_value_heads=4)
    prompt = tokens(6, 40)[None]
    greedy(model, prompt, n_new=1, past_key_values=make_cache(model, prompt))
    longer = torch.cat([prompt[0], tokens(7, 5)])[None]
    cache = make_cache(model, longer)
    assert cache.n_hit_tokens
    middle = cache.n_hit_tokens + 3
    parts = longer[:, cache.n_hit_tokens : middle], longer[:, middle:]
    first, second = (model(part, past_key_values=cache).logits.sum() for part in parts)
    (first + second).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)
