"""Hits give the tokens that computing gives, and they are hits: of what this engine stored, and of what another did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine, Prompt
from tests.engines.conftest import DaemonProcess, tokens

StartEngine = Callable[..., Engine]


def whole_blocks(prompts: list[Prompt]) -> int:
    """Blocks that a store which has all prompts can give: one token of each is computed."""
    return sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in prompts)


@pytest.mark.parametrize("load_async", [True, False])
def test_tokens_after_hits_are_those_without(
    load_async: bool,
    daemon: DaemonProcess,
    llama: Path,
    prompts: list[Prompt],
    expected: list[list[int]],
    start_engine: StartEngine,
) -> None:
    engine = start_engine(llama, daemon.socket, {"load_async": load_async})
    assert engine.generate(prompts) == expected
    engine.drain()
    engine.forget()
    assert engine.generate(prompts[::-1]) == expected[::-1]
    counters = engine.counters
    # Prompts with a common head, loaded in one step: later ones find it in the engine's own cache.
    assert 0 < counters["load_blocks"] <= whole_blocks(prompts)
    assert counters["save_blocks"] > 0
    assert not {"errors", "loads_failed", "saves_failed", "save_skipped_blocks"} & counters.keys()
    cached = engine.llm.get_metrics()
    hits = {metric.name: metric.value for metric in cached if hasattr(metric, "value")}
    assert hits["vllm:external_prefix_cache_hits"] == counters["load_blocks"] * BLOCK_TOKENS


def test_bytes_in_the_store_are_what_the_engine_computes_with(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    """The control: where the store has zeros, the tokens are others."""
    engine = start_engine(llama, daemon.socket)
    connector = engine.scheduler_connector
    namespace = engine.worker_connector._namespace
    assert namespace is not None
    namespace = replace(namespace, revision=connector._revision)
    with daemon.client() as client:
        handle = client.open(namespace)
        prompt = prompts[-1]
        n_blocks = (len(prompt) - 1) // BLOCK_TOKENS
        zeros = np.zeros((n_blocks, namespace.spec.block_bytes), np.uint8)
        assert handle.put(prompt[: n_blocks * BLOCK_TOKENS], zeros).n_stored == n_blocks
    assert engine.generate([prompt]) != expected[-1:]
    assert engine.counters["load_blocks"] == n_blocks


def test_long_prompts_are_saved_chunk_by_chunk(daemon: DaemonProcess, llama: Path, start_engine: StartEngine) -> None:
    prompt = tokens(900, 7)
    plain = start_engine(llama).generate([prompt])
    engine = start_engine(llama, daemon.socket, max_num_batched_tokens=96, max_num_seqs=8)
    assert engine.generate([prompt]) == plain
    engine.drain()
    assert engine.counters["saves"] >= 9
    assert engine.counters["save_blocks"] == 900 // BLOCK_TOKENS
    engine.forget()
    assert engine.generate([prompt]) == plain
    assert engine.counters["load_blocks"] == 899 // BLOCK_TOKENS


def test_a_prompt_of_whole_blocks_leaves_the_last_one_to_compute(
    daemon: DaemonProcess, llama: Path, start_engine: StartEngine
) -> None:
    prompts = [tokens(5 * BLOCK_TOKENS, 8), tokens(BLOCK_TOKENS, 9), tokens(3, 10)]
    plain = start_engine(llama).generate(prompts)
    engine = start_engine(llama, daemon.socket)
    for _ in range(2):
        assert engine.generate(prompts) == plain
        engine.drain()
        engine.forget()
    assert engine.counters["load_blocks"] == 4
    assert engine.counters["save_blocks"] == 6
