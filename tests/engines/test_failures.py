"""A daemon that is down, hangs or dies at the worst moment costs hits and never a request, or one wrong token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine, Prompt
from kvstore.engine_adapter.vllm.worker import WorkerSide
from tests.engines.conftest import DaemonProcess, tokens

StartEngine = Callable[..., Engine]

SHORT = {"lookup_timeout_s": 0.2, "transfer_timeout_s": 0.5, "load_timeout_s": 1.0}
"""Deadlines as they are in use, more or less: these tests are about their end."""


def worker_of(engine: Engine) -> WorkerSide:
    worker = engine.worker_connector._worker
    assert worker is not None
    return worker


def before_loads(engine: Engine, do: Callable[[], object]) -> None:
    """Have something happen once, between the promise of a load and its begin."""
    worker = worker_of(engine)
    start = worker.start_loads

    def hooked() -> None:
        if worker.orders is not None and worker.orders.loads:
            worker.start_loads = start  # type: ignore[method-assign]
            do()
        start()

    worker.start_loads = hooked  # type: ignore[method-assign]


def test_without_a_daemon_the_engine_starts_and_serves(
    tmp_path: Path, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    engine = start_engine(llama, tmp_path / "nobody.sock")
    assert engine.generate(prompts) == expected
    engine.drain()
    assert engine.counters["lookups_failed"] == len(prompts)
    assert "errors" not in engine.counters


def test_a_daemon_that_comes_up_later_is_used(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    daemon.kill()
    engine = start_engine(llama, daemon.socket)
    assert engine.generate(prompts[:3]) == expected[:3]
    engine.drain()
    engine.forget()
    daemon.start()
    worker, scheduler = worker_of(engine), engine.scheduler_connector._scheduler
    assert scheduler is not None
    for client in (worker._loader, worker._saver, scheduler._client):
        assert client.wait_healthy(60)
    assert engine.generate(prompts[3:6]) == expected[3:6]
    engine.drain()
    engine.forget()
    assert engine.generate(prompts[3:6]) == expected[3:6]
    assert engine.counters["load_blocks"] > 0


@pytest.mark.parametrize("load_async", [True, False])
@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_a_daemon_that_fails_during_a_load(
    load_async: bool,
    fault: str,
    daemon: DaemonProcess,
    llama: Path,
    prompts: list[Prompt],
    expected: list[list[int]],
    start_engine: StartEngine,
) -> None:
    engine = start_engine(llama, daemon.socket, {**SHORT, "load_async": load_async})
    engine.generate(prompts)
    engine.drain()
    engine.forget()
    before_loads(engine, daemon.kill if fault == "kill" else daemon.pause)
    assert engine.generate(prompts) == expected
    counters = engine.counters
    assert counters["loads_failed"] >= 1
    assert "errors" not in counters
    engine.drain()
    # The engine goes on without it.
    assert engine.generate(prompts[:4]) == expected[:4]


def test_a_daemon_that_hangs_while_blocks_are_saved(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    engine = start_engine(llama, daemon.socket, SHORT)
    worker = worker_of(engine)
    start = worker.start_saves

    def hooked() -> None:
        if worker.orders is not None and worker.orders.saves:
            worker.start_saves = start  # type: ignore[method-assign]
            daemon.pause()
        start()

    worker.start_saves = hooked  # type: ignore[method-assign]
    assert engine.generate(prompts) == expected
    engine.drain()
    assert engine.counters["saves_failed"] >= 1
    daemon.go_on()
    assert worker._saver.wait_healthy(60)
    with daemon.client() as client:
        stats = client.stats()
    assert stats["reservations"] == 0


@pytest.mark.parametrize("load_async", [True, False])
def test_what_was_computed_from_a_failed_load_is_never_stored(
    load_async: bool, daemon: DaemonProcess, llama: Path, start_engine: StartEngine
) -> None:
    """The lease of a promised load ends: the engine computes the blocks, and stores what came of those only."""
    head, rest = tokens(320, 21), tokens(330, 22)
    plain = start_engine(llama).generate([head + rest])
    engine = start_engine(llama, daemon.socket, {"load_async": load_async})
    engine.generate([head])
    engine.drain()
    engine.forget()
    scheduler = engine.scheduler_connector._scheduler
    assert scheduler is not None

    def end_leases() -> None:
        for tracked in scheduler._tracked.values():
            assert tracked.loading is not None
            tracked.loading.release()

    before_loads(engine, end_leases)
    assert engine.generate([head + rest]) == plain
    engine.drain()
    assert engine.counters["loads_failed"] == 1
    engine.forget()
    before = engine.counters.get("load_blocks", 0)
    assert engine.generate([head + rest]) == plain
    assert engine.counters["load_blocks"] - before == 649 // BLOCK_TOKENS


def test_policy_fail_fails_the_request_and_no_other(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    """It is the engine's own default; the option gives it back to those who want it."""
    engine = start_engine(llama, daemon.socket, {"on_load_failure": "fail"})
    assert engine.core.vllm_config.kv_transfer_config.kv_load_failure_policy == "fail"
    assert engine.core.scheduler.recompute_kv_load_failures is False
    assert engine.generate(prompts[:2]) == expected[:2]
