"""With hits a model says exactly what it says without: fp32, greedy. And it would not, were the bytes others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvstore.client import Client
from kvstore.engine_adapter.transformers import KVStoreCache
from tests.engine_adapter.transformers.models import BLOCK_TOKENS, WINDOW_TOKENS, greedy, tiny_llama, tokens

MakeCache = Callable[..., KVStoreCache]


def test_24_prompts_with_shared_prefixes(model: Any, make_cache: MakeCache) -> None:
    shared = tokens(0, 90)
    # Shorter and longer than the window and a block, ends in a block's first, last and other tokens.
    lengths = [90, 64, 63, 65, 48, 90, 33, 80, 19, 20, 21, 16, 17, 15, 1, 89, 72, 50, 49, 47, 32, 31, 79, 81]
    n_hits = 0
    longest = 0
    for i, n_shared in enumerate(lengths):
        prompt = torch.cat([shared[:n_shared], tokens(100 + i, 3 + i % 5)])[None]
        cache = make_cache(model, prompt)
        assert cache.n_hit_tokens >= min(n_shared, longest)
        assert greedy(model, prompt, past_key_values=cache) == greedy(model, prompt), f"prompt {i}"
        cache.save()
        assert not cache.save_reason
        n_hits += cache.n_hit_tokens > 0
        longest = max(longest, n_shared)
    assert n_hits == len(lengths) - 1


def test_a_hit_reaches_to_the_last_token_but_one(model: Any, make_cache: MakeCache) -> None:
    prompt = tokens(1, 4 * BLOCK_TOKENS)[None]
    expected = greedy(model, prompt)
    assert greedy(model, prompt, past_key_values=make_cache(model, prompt)) == expected
    cache = make_cache(model, prompt)
    assert cache.n_hit_tokens == prompt.shape[1] - 1
    assert greedy(model, prompt, past_key_values=cache) == expected


@pytest.mark.parametrize("n_common", [5, BLOCK_TOKENS - 1, BLOCK_TOKENS + 1, WINDOW_TOKENS, 3 * BLOCK_TOKENS + 7])
def test_a_hit_ends_inside_a_block(model: Any, make_cache: MakeCache, n_common: int) -> None:
    first = tokens(2, 70)[None]
    greedy(model, first, n_new=2, past_key_values=make_cache(model, first))
    ending = tokens(3, 40)
    ending[0] = first[0, n_common] % 100 + 1 if first[0, n_common] > 100 else first[0, n_common] + 1
    second = torch.cat([first[0, :n_common], ending])[None]
    cache = make_cache(model, second)
    assert cache.n_hit_tokens == n_common
    assert greedy(model, second, past_key_values=cache) == greedy(model, second)
    # What was completed from the middle of a block on is whole: a third prompt gets it all.
    third = make_cache(model, second)
    assert third.n_hit_tokens == second.shape[1] - 1
    assert greedy(model, second, past_key_values=third) == greedy(model, second)


def test_other_bytes_are_other_tokens(client: Client, model: Any, make_cache: MakeCache) -> None:
    """The control: were hits not used, or were they allowed to be wrong, the tests above could not fail."""
    prompt = tokens(4, 80)[None]
    expected = greedy(model, prompt, past_key_values=make_cache(model, prompt))
    for mapping in client._session.regions._mappings.values():
        assert mapping.writable
        mapping.array()[:] = 0
    cache = make_cache(model, prompt)
    assert cache.n_hit_tokens == 79
    assert greedy(model, prompt, past_key_values=cache) != expected


def test_what_was_generated_is_found_by_the_next_turn(model: Any, make_cache: MakeCache) -> None:
    prompt = tokens(5, 40)[None]
    cache = make_cache(model, prompt)
    answer = greedy(model, prompt, n_new=30, past_key_values=cache)
    cache.save()
    turn = torch.cat([prompt[0], torch.tensor(answer[0]), tokens(6, 9)])[None]
    following = make_cache(model, turn)
    assert following.n_hit_tokens == 40 + 30 - 1  # the last token was said, but never computed with
    assert greedy(model, turn, past_key_values=following) == greedy(model, turn)


def test_only_the_prompt_is_stored_if_so_asked(make_cache: MakeCache) -> None:
    model = tiny_llama()
    prompt = tokens(7, 40)[None]
    cache = make_cache(model, prompt, generated=False)
    answer = greedy(model, prompt, n_new=30, past_key_values=cache)
    assert cache.save() == 3  # two whole blocks and a short one
    turn = torch.cat([prompt[0], torch.tensor(answer[0])])[None]
    assert make_cache(model, turn).n_hit_tokens == 40


def test_nothing_is_stored_if_so_asked(make_cache: MakeCache) -> None:
    model = tiny_llama()
    prompt = tokens(8, 40)[None]
    cache = make_cache(model, prompt, save=False)
    greedy(model, prompt, past_key_values=cache)
    assert cache.save() == 0
    assert make_cache(model, prompt).n_hit_tokens == 0


def test_chunks_of_the_prefill_are_stored_one_by_one(model: Any, make_cache: MakeCache) -> None:
    prompt = tokens(9, 75)[None]
    expected = greedy(model, prompt)
    cache = make_cache(model, prompt)
    stored: list[int] = []
    handle = model.register_forward_hook(lambda *_: stored.append(cache.n_stored_blocks))
    assert greedy(model, prompt, past_key_values=cache, prefill_chunk_size=22) == expected
    handle.remove()
    assert stored[:4] == [22 // 16, 44 // 16, 66 // 16, 75 // 16]
    again = make_cache(model, prompt)
    assert again.n_hit_tokens == 74
    assert greedy(model, prompt, past_key_values=again, prefill_chunk_size=22) == expected


def test_tokens_are_loaded_when_they_are_first_needed(model: Any, make_cache: MakeCache) -> None:
    prompt = tokens(10, 50)[None]
    first = make_cache(model, prompt)
    greedy(model, prompt, past_key_values=first)
    first.save()
    cache = make_cache(model, prompt)
    layers: Any = list(cache.layers)
    assert cache.get_seq_length() == 49
    assert not any(layer.loaded for layer in layers)
    greedy(model, prompt, n_new=1, past_key_values=cache)
    assert all(layer.loaded for layer in layers)


def test_the_stored_prefix_is_there_to_look_at(model: Any, make_cache: MakeCache) -> None:
    prompt = tokens(11, 50)[None]
    first = make_cache(model, prompt)
    with torch.no_grad():
        model(prompt, past_key_values=first)
    first.save()
    second = make_cache(model, prompt)
    layers: Any = zip(second.layers, first.layers, strict=True)
    for mine, theirs in layers:
        n = 49 if not mine.is_sliding else WINDOW_TOKENS - 1
        expected = theirs.keys[:, :, :49] if not mine.is_sliding else theirs.keys[:, :, : n - 1]
        got = mine.keys if not mine.is_sliding else mine.keys[:, :, 1:]
        assert mine.keys.shape[2] == n
        assert torch.equal(got, expected)


def test_two_that_compute_the_same_at_once_store_it_once(model: Any, make_cache: MakeCache) -> None:
    prompt = tokens(12, 70)[None]
    expected = greedy(model, prompt)
    first, second = make_cache(model, prompt), make_cache(model, prompt)
    assert greedy(model, prompt, past_key_values=first) == expected
    assert greedy(model, prompt, past_key_values=second) == expected
    assert first.save() == 6  # 81 tokens: five whole blocks and a short one
    assert second.save() == 0
    assert not second.save_reason


def test_several_threads_with_one_client(make_cache: MakeCache) -> None:
    models = [tiny_llama() for _ in range(3)]
    shared = tokens(13, 50)
    prompts = [torch.cat([shared, tokens(20 + i, 6)])[None] for i in range(9)]
    expected = [greedy(models[0], prompt) for prompt in prompts]

    def answer(i: int) -> list[list[int]]:
        torch.set_num_threads(1)
        cache = make_cache(models[i % 3], prompts[i])
        said = greedy(models[i % 3], prompts[i], past_key_values=cache)
        cache.save()
        return said

    with ThreadPoolExecutor(3) as pool:
        # A model is used by one thread at a time.
        rounds = [list(pool.map(answer, range(start, start + 3))) for start in (0, 3, 6)]
    assert [said for each in rounds for said in each] == expected
    assert make_cache(models[0], prompts[8]).n_hit_tokens == 55
