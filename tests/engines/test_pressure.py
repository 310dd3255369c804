"""Too little room: in the engine, which preempts, and in the store's memory, so that blocks come from NVMe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine, Prompt
from tests.engines.conftest import DaemonProcess, tokens

StartEngine = Callable[..., Engine]


@pytest.mark.parametrize("load_async", [True, False])
def test_requests_that_are_preempted_give_the_same_tokens(
    load_async: bool, daemon: DaemonProcess, llama: Path, start_engine: StartEngine
) -> None:
    """A third of the blocks that all need at the end: some are preempted, and find again what they stored."""
    prompts = [tokens(200, 40 + i) for i in range(8)]
    said = start_engine(llama).generate(prompts, 150)
    engine = start_engine(
        llama,
        daemon.socket,
        {"load_async": load_async, "save_generated": True},
        num_gpu_blocks_override=36,
        max_model_len=512,
    )
    requests = engine.core.scheduler.requests
    preempted: set[str] = set()
    step = engine.core.step_fn

    def watched() -> object:
        out = step()
        preempted.update(request_id for request_id, request in requests.items() if request.num_preemptions)
        return out

    engine.core.step_fn = watched
    for _ in range(2):
        assert engine.generate(prompts, 150) == said
    assert len(preempted) >= 2
    counters = engine.counters
    assert counters["load_blocks"] > 0
    assert not {"errors", "loads_failed"} & counters.keys()
    engine.drain()
    # What was stored along the way is good: another engine, with room, finds it.
    engine = start_engine(llama, daemon.socket)
    assert engine.generate(prompts, 150) == said
    assert engine.counters["load_blocks"] >= len(prompts) * (199 // BLOCK_TOKENS)


def test_generated_tokens_are_stored_if_wanted(daemon: DaemonProcess, llama: Path, start_engine: StartEngine) -> None:
    prompt = tokens(70, 5)
    for wanted in (False, True):
        engine = start_engine(llama, daemon.socket, {"save_generated": wanted})
        (said,) = engine.generate([prompt], 100)
        engine.drain()
        engine.forget()
        before = engine.counters.get("load_blocks", 0)
        engine.generate([prompt + said], 1)
        # The last token was never computed with, so its KV is not there.
        n_stored = (len(prompt) + (len(said) - 1 if wanted else 0)) // BLOCK_TOKENS
        assert engine.counters["load_blocks"] - before == n_stored


def test_blocks_come_from_nvme(
    tmp_path: Path,
    start_daemon: Callable[..., DaemonProcess],
    llama: Path,
    prompts: list[Prompt],
    expected: list[list[int]],
    start_engine: StartEngine,
) -> None:
    """The memory is gone with its daemon; the next one has the blocks on NVMe only."""
    daemon = start_daemon(
        *("--dram", "256MiB", "--no-prefault"),
        *("--nvme-dir", str(tmp_path / "nvme"), "--nvme", "512MiB", "--write-policy", "through"),
    )
    engine = start_engine(llama, daemon.socket)
    assert engine.generate(prompts) == expected
    engine.drain()
    connector, worker = engine.scheduler_connector, engine.worker_connector._worker
    assert connector._scheduler is not None
    assert worker is not None
    lookups = connector._scheduler._lookups
    assert lookups is not None
    for prompt in prompts:
        whole = len(prompt) // BLOCK_TOKENS
        assert lookups._family.persist(prompt[: whole * BLOCK_TOKENS], 60).n_durable == whole
    daemon.kill()
    daemon.start()
    engine = start_engine(llama, daemon.socket, {"pending_wait_s": 60})
    assert engine.generate(prompts) == expected
    counters = engine.counters
    assert counters["lookups_pending"] >= 1
    # Prompts of one step load what they have in common once each.
    assert counters["load_blocks"] >= sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in prompts)
    (by_source,) = [metric for metric in engine.llm.get_metrics() if metric.name.endswith("external_prefix_cache_hits")]
    assert by_source.value == counters["load_blocks"] * BLOCK_TOKENS


def test_a_request_does_not_wait_for_nvme_beyond_its_time(
    tmp_path: Path,
    start_daemon: Callable[..., DaemonProcess],
    llama: Path,
    prompts: list[Prompt],
    expected: list[list[int]],
    start_engine: StartEngine,
) -> None:
    daemon = start_daemon(
        *("--dram", "256MiB", "--no-prefault"),
        *("--nvme-dir", str(tmp_path / "nvme"), "--nvme", "512MiB", "--write-policy", "through"),
    )
    engine = start_engine(llama, daemon.socket)
    engine.generate(prompts[-1:])
    engine.drain()
    scheduler = engine.scheduler_connector._scheduler
    assert scheduler is not None
    assert scheduler._lookups is not None
    whole = len(prompts[-1]) // BLOCK_TOKENS
    assert scheduler._lookups._family.persist(prompts[-1][: whole * BLOCK_TOKENS], 60).n_durable == whole
    daemon.kill()
    daemon.start()
    engine = start_engine(llama, daemon.socket, {"pending_wait_s": 0})
    assert engine.generate(prompts[-1:]) == expected[-1:]
    assert engine.counters["lookups_pending_too_long"] == 1


def test_blocks_of_a_finished_request_stay_until_its_save_has_read_them(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], start_engine: StartEngine
) -> None:
    engine = start_engine(llama, daemon.socket)
    scheduler, worker = engine.core.scheduler, engine.worker_connector._worker
    assert worker is not None
    pool = scheduler.kv_cache_manager.block_pool
    n_free = pool.get_num_free_blocks()
    paged: Any = worker._paged
    save, go_on = paged.save, threading.Event()

    def held(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return save(*arguments)

    paged.save = held
    engine.generate(prompts[-1:], 2)
    for _ in range(20):
        engine.core.step_fn()
    assert len(scheduler.requests) == 1
    assert n_free - pool.get_num_free_blocks() >= len(prompts[-1]) // BLOCK_TOKENS
    go_on.set()
    engine.drain()
    assert pool.get_num_free_blocks() == n_free
    assert engine.counters["save_blocks"] == len(prompts[-1]) // BLOCK_TOKENS
