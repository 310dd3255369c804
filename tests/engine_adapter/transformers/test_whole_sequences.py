"""``generate`` is given a whole sequence, of which the model sees what the cache lacks: all of it must be right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from kvstore.engine_adapter.transformers import KVStoreCache
from kvstore.errors import BadInputError
from tests.engine_adapter.transformers.models import BLOCK_TOKENS, greedy, tiny_llama, tokens

MakeCache = Callable[..., KVStoreCache]
PROMPT = tokens(0, 5 * BLOCK_TOKENS)
OTHER = torch.cat([tokens(1, len(PROMPT) - 1), PROMPT[-1:]])
"""As long as PROMPT, with the same last token: what is computed after a hit is the same."""


def cache_with_hit(model: Any, make_cache: MakeCache, ids: torch.Tensor) -> KVStoreCache:
    """A cache for a batch of which all is stored that can be."""
    for row in ids:
        first = make_cache(model, row[None])
        greedy(model, row[None], n_new=1, past_key_values=first)
        first.save()
    cache = make_cache(model, ids)
    assert cache.n_hit_tokens == ids.shape[1] - 1
    return cache


def turn_after(prompt: torch.Tensor, answer: list[list[int]], seed: int, n_new: int = 9) -> torch.Tensor:
    """The conversation so far, and what is asked next."""
    return torch.cat([prompt[0], torch.tensor(answer[0]), tokens(seed, n_new)])[None]


WAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "in chunks": {"prefill_chunk_size": 7},
    "beams": {"num_beams": 3},
    "assisted": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_another_prompt_that_ends_as_the_one_it_is_for(model: Any, make_cache: MakeCache, way: str) -> None:
    cache = cache_with_hit(model, make_cache, PROMPT[None])
    with pytest.raises(BadInputError, match="row 0 has other tokens than the prompt that the cache was made for"):
        greedy(model, OTHER[None], n_new=2 * BLOCK_TOKENS, past_key_values=cache, **WAYS[way])
    assert cache.save() == 0
    assert "other tokens" in cache.save_reason
    assert make_cache(model, OTHER[None]).n_hit_tokens == 0


@pytest.mark.parametrize("n_hit", [0, BLOCK_TOKENS])
def test_wherever_the_hit_ends(make_cache: MakeCache, n_hit: int) -> None:
    model = tiny_llama()
    if n_hit:
        greedy(model, PROMPT[None, :n_hit], n_new=1, past_key_values=make_cache(model, PROMPT[None, :n_hit]))
    for column in (0, BLOCK_TOKENS - 1, BLOCK_TOKENS, len(PROMPT) - 1):
        cache = make_cache(model, PROMPT[None])
        assert cache.n_hit_tokens == n_hit
        changed = PROMPT.clone()
        changed[column] = changed[column] % 100 + 1 if changed[column] > 100 else changed[column] + 1
        with pytest.raises(BadInputError, match="other tokens"):
            greedy(model, changed[None], past_key_values=cache)
        assert cache.save() == 0


def test_names_and_places_of_the_argument(make_cache: MakeCache) -> None:
    model = tiny_llama()
    cache = cache_with_hit(model, make_cache, PROMPT[None])
    for arguments in ({"input_ids": OTHER[None]}, {"inputs": OTHER[None]}):
        with pytest.raises(BadInputError, match="other tokens"):
            model.generate(**arguments, past_key_values=cache, max_new_tokens=1)
    # Nothing was computed with it, so that it is still good for its own prompt.
    assert greedy(model, PROMPT[None], past_key_values=cache) == greedy(model, PROMPT[None])
    assert cache.save() == 0


def test_a_row_of_a_batch(model: Any, make_cache: MakeCache) -> None:
    ids = torch.stack([PROMPT, tokens(2, len(PROMPT)), tokens(3, len(PROMPT))])
    cache = cache_with_hit(model, make_cache, ids)
    changed = ids.clone()
    changed[1, 3] = ids[0, 3]
    with pytest.raises(BadInputError, match="row 1 has other tokens"):
        greedy(model, changed, past_key_values=cache)
    with pytest.raises(BadInputError, match="row 0 has other tokens"):
        greedy(model, ids[[1, 0, 2]], past_key_values=make_cache(model, ids))
    assert greedy(model, ids, past_key_values=make_cache(model, ids)) == greedy(model, ids)


def test_a_beginning_of_the_prompt(make_cache: MakeCache) -> None:
    model = tiny_llama()
    cache = cache_with_hit(model, make_cache, PROMPT[None])
    for n in (30, len(PROMPT) - 1):
        with pytest.raises(BadInputError, match=f"{n} tokens were given, but the cache holds 79 already"):
            greedy(model, PROMPT[None, :n], past_key_values=cache)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_with_adapters_and_a_copy_of_a_model(make_cache: MakeCache) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    for model in (peft.get_peft_model(tiny_llama(), config), copy.deepcopy(tiny_llama())):
        cache = cache_with_hit(model, make_cache, PROMPT[None])
        with pytest.raises(BadInputError, match="other tokens"):
            greedy(model, OTHER[None], past_key_values=cache)
        assert greedy(model, PROMPT[None], past_key_values=make_cache(model, PROMPT[None])) == greedy(
            model, PROMPT[None]
        )


def test_a_conversation_goes_on_with_the_same_cache(model: Any, make_cache: MakeCache) -> None:
    turn = PROMPT[None]
    cache = cache_with_hit(model, make_cache, turn)
    for seed in (10, 11, 12):
        answer = greedy(model, turn, past_key_values=cache)
        assert answer == greedy(model, turn)
        last, turn = turn, turn_after(turn, answer, seed)
    cache.save()
    assert not cache.save_reason
    # All turns were stored as they were computed.
    assert make_cache(model, turn).n_hit_tokens == last.shape[1] + len(answer[0]) - 1


def test_another_conversation_goes_on_with_the_cache(model: Any, make_cache: MakeCache) -> None:
    cache = make_cache(model, PROMPT[None])
    answer = greedy(model, PROMPT[None], past_key_values=cache)
    stored = cache.n_stored_blocks
    turn = turn_after(PROMPT[None], answer, 10)
    changed = turn.clone()
    changed[0, len(PROMPT) + 4] = turn[0, len(PROMPT) + 5] % 100 + 101
    at = len(PROMPT) + 4
    with pytest.raises(BadInputError, match=f"row 0 goes on with other tokens.*from token {at} on"):
        greedy(model, changed, past_key_values=cache)
    with pytest.raises(BadInputError, match=r"80 tokens were given, but the cache holds 91 already"):
        greedy(model, PROMPT[None], past_key_values=cache)
    assert cache.save() == stored
    assert greedy(model, turn, past_key_values=cache) == greedy(model, turn)


def test_only_the_next_tokens_of_a_conversation(make_cache: MakeCache) -> None:
    """The mask says that they are not the whole sequence."""
    model = tiny_llama()
    cache = make_cache(model, PROMPT[None])
    answer = greedy(model, PROMPT[None], past_key_values=cache)
    turn = turn_after(PROMPT[None], answer, 10)
    new = turn[:, cache.get_seq_length() :]
    assert greedy(model, new, attention_mask=torch.ones_like(turn), past_key_values=cache) == greedy(model, turn)


def test_assisted_decoding_leaves_a_cache_to_go_on_with(make_cache: MakeCache) -> None:
    model = tiny_llama()
    prompt = tokens(9, 10).repeat(6)[None]
    cache = make_cache(model, prompt)
    answer = greedy(model, prompt, prompt_lookup_num_tokens=4, past_key_values=cache)
    turn = turn_after(prompt, answer, 10)
    changed = turn.clone()
    changed[0, 62] = turn[0, 62] % 100 + 101 if turn[0, 62] <= 100 else turn[0, 62] - 1
    with pytest.raises(BadInputError, match="from token 62 on"):
        greedy(model, changed, past_key_values=cache)
    assert greedy(model, turn, past_key_values=cache) == greedy(model, turn)


def test_several_answers_are_no_conversation(make_cache: MakeCache) -> None:
    model = tiny_llama()
    prompt = PROMPT[None]
    cache = make_cache(model, prompt)
    answer = greedy(model, prompt, num_beams=3, past_key_values=cache)
    with pytest.raises(BadInputError, match="does not know which tokens it holds"):
        greedy(model, turn_after(prompt, answer, 10), num_beams=3, past_key_values=cache)
    cache = make_cache(model, prompt)
    torch.manual_seed(0)
    several: Any = model.generate(
        prompt, past_key_values=cache, do_sample=True, num_return_sequences=3, max_new_tokens=8, temperature=5.0
    )
    turns = torch.cat([several, tokens(10, 5).repeat(3, 1)], dim=1)
    with pytest.raises(BadInputError, match="goes on with other tokens"):
        greedy(model, turns[:1], num_return_sequences=3, num_beams=3, past_key_values=copy.deepcopy(cache))
    with pytest.raises(BadInputError, match="row 0 goes on with other tokens"):
        greedy(model, turns[[1, 0, 2]], past_key_values=cache)
    assert greedy(model, turns, past_key_values=cache) == greedy(model, turns)


def test_copies_go_their_own_ways(model: Any, make_cache: MakeCache) -> None:
    shared = make_cache(model, PROMPT[None])
    answer = greedy(model, PROMPT[None], past_key_values=shared)
    first, second = (turn_after(PROMPT[None], answer, seed) for seed in (10, 11))
    for turn in (first, second):
        assert greedy(model, turn, past_key_values=copy.deepcopy(shared)) == greedy(model, turn)
    mine = copy.deepcopy(shared)
    greedy(model, first, past_key_values=mine)
    with pytest.raises(BadInputError, match="goes on with other tokens"):
        greedy(model, torch.cat([second, first], dim=1), past_key_values=mine)
    assert greedy(model, second, past_key_values=shared) == greedy(model, second)
