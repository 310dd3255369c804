"""Layers with a sliding window: stored by themselves, and needed only at the end of a hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.client import Client
from kvstore.engine_adapter.parts import open_namespace
from kvstore.engine_adapter.transformers import COUNTERS, KVStoreCache, namespace_of
from kvstore.engine_adapter.transformers.shapes import KVShapes
from kvstore.hybrid import parts_of
from tests.cases.processes import DaemonProcess
from tests.engine_adapter.transformers.models import (
    BLOCK_TOKENS,
    WINDOW_TOKENS,
    greedy,
    tiny_gemma,
    tiny_llama,
    tokens,
)
from tests.engine_adapter.transformers.test_batches import padded

N_TOKENS = 200
PROMPT = tokens(1, N_TOKENS)
WINDOW_BLOCKS = -(-(WINDOW_TOKENS - 1) // BLOCK_TOKENS)


def cache_for(client: Client, model: Any, ids: torch.Tensor, *args: Any, **settings: Any) -> KVStoreCache:
    return KVStoreCache.for_prompt(client, model, ids, *args, **{"block_tokens": BLOCK_TOKENS, **settings})


def store(client: Client, model: Any, prompt: torch.Tensor) -> None:
    cache = cache_for(client, model, prompt[None])
    greedy(model, prompt[None], n_new=1, past_key_values=cache)
    cache.save()
    assert not cache.save_reason


@pytest.fixture
def gemma() -> Any:
    return tiny_gemma()


@pytest.fixture
def client_of_few_windows(daemon_process: DaemonProcess, gemma: Any) -> Iterator[Client]:
    """A daemon that was restarted, with two prompts on its disk: the windows at their ends, behind 101 and 192 tokens,
    and no others."""
    with Client(daemon_process.socket_path, timeout_s=5.0) as client:
        for prompt in (PROMPT, PROMPT[:101]):
            store(client, gemma, prompt)
            handle = open_namespace(client, namespace_of(gemma, block_tokens=BLOCK_TOKENS))
            n_whole = len(prompt) // BLOCK_TOKENS
            assert handle.persist(prompt.numpy(), wait_s=10.0, n_blocks=n_whole).n_durable == n_whole
    daemon_process.end()
    daemon_process.start()
    with Client(daemon_process.socket_path, timeout_s=5.0) as client:
        yield client


def test_how_the_layers_of_a_model_are_stored() -> None:
    assert parts_of(KVShapes.of(tiny_llama()).spec(BLOCK_TOKENS)) == ()
    shapes = KVShapes.of(tiny_gemma())
    full, windows = parts_of(shapes.spec(BLOCK_TOKENS))
    assert (full.window_blocks, windows.window_blocks) == (0, WINDOW_BLOCKS)
    assert full.block_bytes == windows.block_bytes  # two layers each
    assert [(layer.stored_index, layer.window_tokens) for layer in shapes.layers] == [
        (2, WINDOW_TOKENS), (0, None), (3, WINDOW_TOKENS), (1, None)
    ]  # fmt: skip


def test_a_model_of_windows_only_is_stored_in_one_piece(client: Client) -> None:
    model = tiny_gemma(layer_types=["sliding_attention"] * 4)
    assert parts_of(KVShapes.of(model).spec(BLOCK_TOKENS)) == ()
    store(client, model, PROMPT)
    cache = cache_for(client, model, PROMPT[None])
    assert cache.n_hit_tokens == N_TOKENS - 1
    assert greedy(model, PROMPT[None], past_key_values=cache) == greedy(model, PROMPT[None])


def test_while_all_windows_are_there_hits_end_anywhere(client: Client, gemma: Any) -> None:
    store(client, gemma, PROMPT)
    for n in (N_TOKENS - 1, 64, 65, 19, 20, 21, 3):
        prompt = torch.cat([PROMPT[:n], tokens(n, 5)])[None]
        cache = cache_for(client, gemma, prompt, save=False)
        assert cache.n_hit_tokens >= n
        assert greedy(gemma, prompt, past_key_values=cache) == greedy(gemma, prompt)


def test_layers_of_both_kinds_that_look_the_same_have_their_own_bytes(client: Client, gemma: Any) -> None:
    prompt = PROMPT[None, : WINDOW_TOKENS - 1]
    first = cache_for(client, gemma, prompt)
    with torch.no_grad():
        gemma(prompt, past_key_values=first)
    first.save()
    second = cache_for(client, gemma, prompt)
    layers: Any = zip(second.layers, first.layers, strict=True)
    for mine, theirs in layers:
        assert torch.equal(mine.keys, theirs.keys[:, :, :-1])
        assert torch.equal(mine.values, theirs.values[:, :, :-1])


def test_only_the_windows_at_the_end_of_a_hit_are_needed(
    client_of_few_windows: Client, daemon_process: DaemonProcess, gemma: Any
) -> None:
    client = client_of_few_windows
    prompt = torch.cat([PROMPT, tokens(5, 9)])[None]
    cache = cache_for(client, gemma, prompt, save=False)
    assert cache.n_hit_tokens == N_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    assert greedy(gemma, prompt, past_key_values=cache) == greedy(gemma, prompt)
    (found,) = client.namespaces()
    full, windows = parts_of(namespace_of(gemma, block_tokens=BLOCK_TOKENS).spec)
    n_blocks = -(-N_TOKENS // BLOCK_TOKENS)
    assert found.nvme_bytes <= n_blocks * full.block_bytes + 2 * (WINDOW_BLOCKS + 1) * windows.block_bytes


def test_where_the_windows_are_gone_a_hit_ends_before(client_of_few_windows: Client, gemma: Any) -> None:
    for n_shared, n_hit in ((150, 112), (90, 0), (96, 96), (97, 97), (112, 112), (113, 112)):
        prompt = torch.cat([PROMPT[:n_shared], tokens(6, 20)])[None]
        cache = cache_for(client_of_few_windows, gemma, prompt, save=False)
        assert cache.n_hit_tokens == n_hit, n_shared
        assert greedy(gemma, prompt, past_key_values=cache) == greedy(gemma, prompt)


def test_what_was_gone_is_stored_again_by_who_computes_it(client_of_few_windows: Client, gemma: Any) -> None:
    client = client_of_few_windows
    prompt = torch.cat([PROMPT[:150], tokens(6, 20)])[None]
    for n_hit in (112, 169):
        cache = cache_for(client, gemma, prompt)
        assert cache.n_hit_tokens == n_hit
        assert greedy(gemma, prompt, past_key_values=cache) == greedy(gemma, prompt)
        cache.save()
    # The blocks from 112 to 144 were there, their windows were not.
    assert cache_for(client, gemma, torch.cat([PROMPT[:140], tokens(7, 9)])[None]).n_hit_tokens == 140


def test_rows_that_are_cut_to_what_others_have_need_other_windows(client: Client, gemma: Any) -> None:
    store(client, gemma, PROMPT)
    store(client, gemma, tokens(2, 70))
    ids, mask = padded(torch.cat([PROMPT, tokens(3, 5)]), torch.cat([tokens(2, 70), tokens(4, 100)]))
    cache = cache_for(client, gemma, ids, mask)
    # The second row begins in column 35 and has 70 tokens stored: the first is cut to 105 of its 200.
    assert cache.n_hit_tokens == 35 + 70
    assert greedy(gemma, ids, attention_mask=mask, past_key_values=cache) == greedy(gemma, ids, attention_mask=mask)


def test_rows_that_are_cut_where_their_windows_are_gone(client_of_few_windows: Client, gemma: Any) -> None:
    client = client_of_few_windows
    store(client, gemma, tokens(2, 80))
    ids, mask = padded(torch.cat([PROMPT, tokens(3, 5)]), torch.cat([tokens(2, 80), tokens(4, 90)]))
    cache = cache_for(client, gemma, ids, mask)
    # The second row has 80 tokens from column 35 on. Of the first nothing ends behind 115, but behind 112.
    assert cache.n_hit_tokens == 112
    assert greedy(gemma, ids, attention_mask=mask, past_key_values=cache) == greedy(gemma, ids, attention_mask=mask)


def test_without_room_for_all_windows_those_at_the_end_are_stored(
    start_daemon: Callable[..., Any], tmp_path: Path, gemma: Any
) -> None:
    (_, windows) = parts_of(namespace_of(gemma, block_tokens=BLOCK_TOKENS).spec)
    prompt = tokens(3, 200 * BLOCK_TOKENS)
    slot_bytes = -(-windows.block_bytes // 4096) * 4096
    daemon = start_daemon(dram_bytes=(200 + 50) * slot_bytes)
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        before = COUNTERS.snapshot().get("save_skipped_windows", 0)
        cache = cache_for(client, gemma, prompt[None])
        with torch.no_grad():
            gemma(prompt[None], past_key_values=cache)
        assert not cache.save_reason
        assert cache.n_stored_blocks == 200
        assert COUNTERS.snapshot()["save_skipped_windows"] - before == 150
        cache = cache_for(client, gemma, torch.cat([prompt, tokens(4, 3)])[None], save=False)
        assert cache.n_hit_tokens == len(prompt)
