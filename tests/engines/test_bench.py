"""The measurements with vLLM, on a tiny model: they run, and say what happened."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.vllm_engine import BLOCK_TOKENS, Prompt
from kvstore.bench.vllm_first_token import EngineProcess, Prompts, measure_hits, measure_misses
from kvstore.bench.vllm_sameness import bfloat16_distances, distance, float32_tokens
from tests.engines.conftest import DaemonProcess


def test_hits_of_what_another_process_stored_and_misses_are_timed(daemon: DaemonProcess, llama: Path) -> None:
    settings: dict[str, Any] = {"max_model_len": 512}
    prompts = Prompts(llama, 0)
    started = [EngineProcess(llama, socket, settings) for socket in (daemon.socket, daemon.socket, None)]
    with ExitStack() as stack:
        stores, hits, plain = map(stack.enter_context, started)
        missed = measure_misses(stores, plain, prompts, 100, 2)
        assert (missed["prompt_tokens"], missed["pairs"], stores.hit_tokens) == (100, 2, 0)
        assert min(missed["miss_s"], missed["no_store_s"], missed["cpu_ratio"]) > 0
        hit = measure_hits(stores, hits, plain, prompts, 4 * BLOCK_TOKENS, 2)
    assert (hit["prefix_tokens"], hit["hit_tokens"], hit["pairs"]) == (4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, 2)
    assert hit["ratio_95"][0] <= hit["ratio"] <= hit["ratio_95"][1]


def test_sameness_is_found_and_zeros_are_not_the_same(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt]
) -> None:
    chosen = prompts[-6:]
    whole = sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in chosen)
    figures = float32_tokens(llama, daemon.socket, chosen, 8, "own")
    same = [figures[f"same_{when}"] for when in ("while_stored", "after_hits", "after_hits_together")]
    assert same == [6, 6, 6]
    assert figures["same_with_zeros"] < 6
    assert (figures["hit_blocks"], figures["whole_blocks"], figures["failed"]) == (whole, whole, 0)
    with daemon.client() as client:
        client.clear(model="own")
    figures = bfloat16_distances(llama, daemon.socket, chosen, "own")
    assert figures["hit_blocks"] == whole
    assert figures["after_hits"]["kl_max"] < 1e-3
    assert figures["after_hits"].keys() == figures["chunked"].keys()
    assert figures["after_hits_from_own"]["kl_max"] == figures["after_hits_from_own"]["logprob_max"] == 0


def test_distances_are_of_distributions() -> None:
    sure, unsure = np.log(np.array([[0.9, 0.1], [0.5, 0.5]], np.float32))[:, None]
    assert distance(sure, sure) == {"kl_mean": 0, "kl_max": 0, "logprob_mean": 0, "logprob_max": 0, "flips": 0}
    found = distance(sure, unsure)
    assert abs(found["kl_mean"] - (0.9 * np.log(1.8) + 0.1 * np.log(0.2))) < 1e-3
    assert abs(found["logprob_max"] - np.log(1.8)) < 1e-2
    assert distance(sure, sure[:, ::-1])["flips"] == 1
