"""Engines in processes of their own: what one stored the next one finds, also of two workers, and of one that died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.conftest import DaemonProcess
from tests.engines.engine import BLOCK_TOKENS, Engine, Prompt

ROOT = Path(__file__).parents[2]
PROCESS_S = 240.0

StartEngine = Callable[..., Engine]


def run_engine(
    model: Path, socket: Path | None, rounds: list[list[Prompt]], *, seed: int = 0, die_in_layer: int | None = None,
    options: dict[str, Any] | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """What an engine process says; empty if it died. Fails after ``PROCESS_S``: workers that fail hang the engine."""
    answer = Path(tempfile.mkdtemp()) / "answer.json"
    told = {
        "model": str(model), "socket": str(socket or ""), "options": options or {}, "settings": settings,
        "rounds": rounds, "n": 12, "die_in_layer": die_in_layer, "answer": str(answer),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.engine_process", json.dumps(told)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(seed), "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        stdout=sys.stderr,
    )
    try:
        process.wait(PROCESS_S)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        pytest.fail(f"the engine did not end within {PROCESS_S} s")
    if die_in_layer is not None:
        assert process.returncode == -signal.SIGKILL
        return {}
    assert process.returncode == 0
    said: dict[str, Any] = json.loads(answer.read_text())
    return said


def test_another_process_hits_what_the_first_stored(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    first = run_engine(llama, daemon.socket, [prompts], seed=1)
    assert first["said"] == [expected]
    metrics = first["metrics"]
    assert metrics["vllm:kvstore_save_blocks"] > 0
    assert metrics["vllm:external_prefix_cache_hits"] == 0
    second = run_engine(llama, daemon.socket, [[prompt] for prompt in prompts], seed=2)
    assert [said for (said,) in second["said"]] == expected
    # Every whole block of every prompt, one prompt at a time.
    whole = sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in prompts)
    metrics = second["metrics"]
    assert metrics["vllm:kvstore_load_blocks"] == whole
    assert metrics["vllm:external_prefix_cache_hits"] == whole * BLOCK_TOKENS
    assert metrics["vllm:kvstore_lookups"] >= len(prompts)
    assert metrics["vllm:kvstore_errors"] == metrics["vllm:kvstore_loads_failed"] == 0


def test_an_engine_that_dies_while_it_saves_leaves_nothing_visible(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    run_engine(llama, daemon.socket, [prompts[-1:]], die_in_layer=2)
    with daemon.client() as client:
        again = threading.Event()
        for _ in range(1200):
            stats = client.stats()
            if stats["reservations"] == 0:
                break
            again.wait(0.05)
        assert (stats["reservations"], stats["blocks"]) == (0, 0)
    engine = start_engine(llama, daemon.socket)
    assert engine.generate(prompts[-1:]) == expected[-1:]
    engine.drain()
    assert "load_blocks" not in engine.counters
    assert engine.counters["save_blocks"] == len(prompts[-1]) // BLOCK_TOKENS


def test_two_workers_load_what_both_have_stored(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]]
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
    # One worker's blocks are none of an engine with one worker.
    alone = run_engine(llama, daemon.socket, [chosen])
    assert alone["said"] == [expected[-6:]]
    assert alone["metrics"]["vllm:kvstore_load_blocks"] == 0
