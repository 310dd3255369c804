"""Real models, where their packages are installed: SmolLM2 135M (full attention) and Gemma 3 270M (windows of 512)."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore.bench import real_models
from kvstore.client import Client
from kvstore.engine_adapter.transformers import KVStoreCache
from tests.engine_adapter.transformers.models import greedy

MIB = 1 << 20
CHUNK_TOKENS = 256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(params=sorted(real_models.MODELS))
def name(request: pytest.FixtureRequest) -> str:
    """Each real model in turn, skipped with what to install."""
    chosen: str = request.param
    if need := real_models.missing(chosen):
        pytest.skip(f"{chosen} is not installed: {need}")
    return chosen


@pytest.fixture
def big_client(start_daemon: Callable[..., Any]) -> Any:
    daemon = start_daemon(dram_bytes=512 * MIB)
    with Client(daemon.config.socket_path, timeout_s=10.0) as client:
        yield client


def texts(tokenizer: Any) -> Any:
    """Token ids [n] of text that comes with Python."""
    text = " ".join(pydoc_data.topics.topics[name] for name in ("for", "while", "try", "with", "class", "function"))
    return tokenizer(text, return_tensors="pt").input_ids[0]


def cache_for(client: Client, model: Any, ids: torch.Tensor) -> KVStoreCache:
    return KVStoreCache.for_prompt(client, model, ids)


def test_the_same_words_in_float32(big_client: Client, name: str) -> None:
    model, tokenizer = real_models.load(name)
    ids = texts(tokenizer)
    # Longer than Gemma's window, ends inside a block; what follows comes from elsewhere in the text.
    for i, (n_shared, start) in enumerate([(550, 1500), (550, 1000), (301, 1300)]):
        prompt = torch.cat([ids[:n_shared], ids[start : start + 12]])[None]
        cache = cache_for(big_client, model, prompt)
        assert cache.n_hit_tokens >= (n_shared if i else 0)
        assert greedy(model, prompt, n_new=8, past_key_values=cache) == greedy(model, prompt, n_new=8), n_shared
        cache.save()
        assert not cache.save_reason


def divergence(expected: torch.Tensor, given: torch.Tensor) -> float:
    """Mean KL of next-token distributions, logits [tokens, vocabulary]."""
    p, q = expected.float().log_softmax(-1), given.float().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@torch.no_grad()
def test_in_bfloat16_a_hit_is_no_noisier_than_chunks_are(big_client: Client, name: str) -> None:
    """The engine's own results differ with the size of its chunks. A stored prefix must not add to that."""
    model, tokenizer = real_models.load(name, "bfloat16")
    ids = texts(tokenizer)
    chunked, hit = [], []
    for start in (900, 1100):
        prompt = torch.cat([ids[:550], ids[start : start + 40]])[None]
        expected = model(prompt).logits[0, 550:]
        chunks: Any = None
        for part in prompt.split(CHUNK_TOKENS, dim=1):
            done = model(part, past_key_values=chunks, use_cache=True)
            chunks = done.past_key_values
        chunked.append(divergence(expected, done.logits[0, -len(expected) :]))
        first = cache_for(big_client, model, prompt[:, :551])
        if not first.n_hit_tokens:
            model(prompt[:, :551], past_key_values=first)
            first.save()
        cache = cache_for(big_client, model, prompt)
        assert cache.n_hit_tokens >= 550
        logits = model(prompt[:, cache.n_hit_tokens :], past_key_values=cache).logits[0]
        hit.append(divergence(expected[-len(logits) :], logits))
    assert sum(chunked) > 0
    assert sum(hit) <= 2 * sum(chunked), (hit, chunked)
