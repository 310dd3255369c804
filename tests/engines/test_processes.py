"""Engines with several workers: each stores its shard, and a hit is what all of them have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine, Prompt
from tests.engines.conftest import DaemonProcess, namespaces
from tests.engines.processes import run_engine


def test_case_06_two_workers_load_what_both_have_stored_and_one_worker_none_of_it(
    daemon: DaemonProcess,
    llama: Path,
    prompts: list[Prompt],
    expected: list[list[int]],
    start_engine: Callable[..., Engine],
) -> None:
    """Tensor parallel: each has half of the heads. A shard that lacks a block makes it a miss for both."""
    chosen = prompts[-6:]
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    out = run_engine(llama, daemon.socket, [chosen, chosen], **settings)
    assert out["said"] == [expected[-6:]] * 2
    metrics = out["metrics"]
    assert metrics["vllm:kvstore_load_blocks"] > 0
    assert metrics["vllm:kvstore_load_blocks"] % 2 == 0
    assert metrics["vllm:kvstore_errors"] == metrics["vllm:kvstore_loads_failed"] == 0
    two = namespaces(daemon)
    assert len(two) == 2
    alone = start_engine(llama, daemon.socket)
    assert alone.generate(chosen) == expected[-6:]
    alone.drain()
    assert alone.counters["save_blocks"] > 0
    assert "load_blocks" not in alone.counters
    (one,) = [each for digest, each in namespaces(daemon).items() if digest not in two]
    for shard in two.values():
        assert "shard.tp_size: 1 != 2" in one.differences(shard)


def test_stages_of_a_pipeline_load_what_both_have_stored(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """Pipeline parallel: each has half of the layers. vLLM for CPUs can do that only where it traces models first."""
    chosen = prompts[-3:]
    settings: dict[str, Any] = {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    }
    out = run_engine(llama, daemon.socket, [chosen, chosen], **settings)
    assert out["said"] == [expected[-3:]] * 2
    metrics = out["metrics"]
    whole = sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in chosen)
    assert metrics["vllm:external_prefix_cache_hits"] == whole * BLOCK_TOKENS
    assert metrics["vllm:kvstore_load_blocks"] == 2 * whole
    assert metrics["vllm:kvstore_errors"] == metrics["vllm:kvstore_loads_failed"] == 0
