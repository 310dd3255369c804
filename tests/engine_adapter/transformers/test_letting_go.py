"""What a cache holds goes back: when it is used, dropped, copied, or its forward was broken off."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore.client import Client
from kvstore.engine_adapter.block_writer import BlockWriter
from kvstore.engine_adapter.transformers import KVStoreCache
from tests.engine_adapter.transformers.models import greedy, tiny_gemma, tiny_llama, tokens

MakeCache = Callable[..., KVStoreCache]
WaitUntil = Callable[[Callable[[], bool], str], None]
PROMPT = tokens(1, 50)[None]


def store(model: Any, make_cache: MakeCache) -> None:
    cache = make_cache(model, PROMPT)
    greedy(model, PROMPT, n_new=1, past_key_values=cache)
    assert cache.save() == 4


def n_held(client: Client) -> float:
    """Leases and reservations in force or not let go of, at the daemon."""
    stats = client.stats()
    names = ("leases", "reservations", "leases_ended_unacknowledged", "reservations_ended_unacknowledged")
    return sum(float(stats[name]) for name in names)


def test_a_cache_that_was_never_used(client: Client, make_cache: MakeCache, wait_until: WaitUntil) -> None:
    model = tiny_gemma()
    store(model, make_cache)
    cache = make_cache(model, PROMPT)
    assert n_held(client) == 1
    del cache
    gc.collect()
    wait_until(lambda: n_held(client) == 0, "the lease is let go of")


def test_a_cache_that_was_used_and_is_kept(client: Client, make_cache: MakeCache, wait_until: WaitUntil) -> None:
    model = tiny_gemma()
    store(model, make_cache)
    cache = make_cache(model, PROMPT)
    greedy(model, PROMPT, past_key_values=cache)
    wait_until(lambda: n_held(client) == 0, "the lease is let go of although the cache lives")
    assert cache.n_hit_tokens == 49


def test_a_forward_that_is_broken_off(client: Client, make_cache: MakeCache, wait_until: WaitUntil) -> None:
    model = tiny_gemma()
    expected = greedy(model, PROMPT)
    cache = make_cache(model, PROMPT)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, PROMPT, past_key_values=cache)
    hook.remove()
    assert n_held(client) == 3  # reservations for the blocks, for the last windows and for those before
    # Nothing half-written is visible, and the next who computes it stores it.
    assert make_cache(model, PROMPT).n_hit_tokens == 0
    del cache
    gc.collect()
    wait_until(lambda: n_held(client) == 0, "the reservation is let go of")
    store(model, make_cache)
    assert greedy(model, PROMPT, past_key_values=make_cache(model, PROMPT)) == expected


def test_a_copy_goes_on_by_itself(model: Any, make_cache: MakeCache) -> None:
    store(model, make_cache)
    prompts = [torch.cat([PROMPT[0], tokens(10 + i, 5)])[None] for i in range(2)]
    original = make_cache(model, prompts[0])
    copied = copy.deepcopy(original)
    assert greedy(model, prompts[0], past_key_values=copied) == greedy(model, prompts[0])
    assert copied.save() == 0
    # The original is as it was before.
    assert original.get_seq_length() == 50
    assert greedy(model, prompts[0], past_key_values=original) == greedy(model, prompts[0])


def test_a_kept_cache_goes_on_with_the_next_turn(model: Any, make_cache: MakeCache) -> None:
    """As transformers' own caches do: the conversation so far, and more."""
    first = PROMPT
    cache = make_cache(model, first)
    answer = torch.tensor(greedy(model, first, past_key_values=cache))
    turn = torch.cat([first, answer, tokens(3, 6)[None]], dim=1)
    assert greedy(model, turn, past_key_values=cache) == greedy(model, turn)
    cache.save()
    assert make_cache(model, turn).n_hit_tokens == turn.shape[1] - 1


def test_a_cache_that_was_cut_behind_its_back_stores_nothing_wrong(make_cache: MakeCache) -> None:
    """Layers hold what is stored later: whoever changes them directly must not have it stored as something else."""
    model = tiny_llama()
    cache = make_cache(model, PROMPT)
    said, other = tokens(4, 3)[None], tokens(5, 20)[None]
    with torch.no_grad():
        for part in (PROMPT, said):
            model(part, past_key_values=cache)
        layers: Any = cache.layers
        for layer in layers:
            layer.crop(-2)
        for token in other.split(1, dim=1):
            model(token, past_key_values=cache)
    cache.save()
    assert "where 53 comes next" in cache.save_reason
    as_if = torch.cat([PROMPT, said, other], dim=1)
    assert make_cache(model, as_if).n_hit_tokens == 48


def test_layers_that_were_replaced_store_nothing_wrong(make_cache: MakeCache) -> None:
    model = tiny_llama()
    cache = make_cache(model, PROMPT)
    following = tokens(4, 20)[None]
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        model(following[:, :3], past_key_values=cache)
        layer: Any = cache.layers[1]
        layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
        assert cache.save() == 3
    assert "layer 1 does not hold what was computed" in cache.save_reason
    assert make_cache(model, torch.cat([PROMPT, following], dim=1)).n_hit_tokens == 48


def test_decoding_gives_the_store_whole_blocks_not_tokens(
    model: Any, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    begin = BlockWriter.begin

    def counted(writer: BlockWriter, given: Any) -> None:
        passes.append(len(given))
        begin(writer, given)

    monkeypatch.setattr(BlockWriter, "begin", counted)
    cache = make_cache(model, PROMPT)
    greedy(model, PROMPT, n_new=40, past_key_values=cache)
    assert passes == [50, 14, 16]  # the prompt, to the end of its last block, a block
    assert cache.n_stored_blocks == 5
    cache.save()
    assert passes == [50, 14, 16, 9]
