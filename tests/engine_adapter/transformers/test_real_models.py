"""Real models, where their packages are installed: SmolLM2 135M (full attention) and Gemma 3 270M (windows of 512).

A short version of ``python -m kvstore.bench.sameness``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.bench import real_models
from kvstore.bench.sameness import Subject, distances, same_tokens
from kvstore.client import Client

MIB = 1 << 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(params=sorted(real_models.MODELS))
def name(request: pytest.FixtureRequest) -> str:
    """Each real model in turn, skipped with what to install."""
    chosen: str = request.param
    if need := real_models.missing(chosen):
        pytest.skip(f"{chosen} is not installed: {need}")
    return chosen


@pytest.fixture
def big_client(start_daemon: Callable[..., Any]) -> Iterator[Client]:
    daemon = start_daemon(dram_bytes=512 * MIB)
    with Client(daemon.config.socket_path, timeout_s=10.0) as client:
        yield client


def test_the_same_words_in_float32_and_others_with_other_bytes(big_client: Client, name: str) -> None:
    figures = same_tokens(Subject(name, "float32", big_client), n_prompts=3, n_new=8)
    assert figures["hits"] == 2
    assert figures["same"] == figures["prompts"] == 3
    assert figures["controls_differ"] == figures["controls"] == 3


def test_in_bfloat16_a_hit_is_no_noisier_than_chunks_are(big_client: Client, name: str) -> None:
    """The engine's own results differ with the size of its chunks. A stored prefix must not add to that."""
    figures = distances(Subject(name, "bfloat16", big_client), n_prompts=1)
    assert figures["max_logit_difference_to_same_split"] == 0
    assert figures["kl_hit"] <= 2 * figures["kl_chunks"] < figures["kl_zeros"]
