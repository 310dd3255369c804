"""What the engine gets from the connector besides tokens: events, resets, and quiet when something inside fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored

from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine, Prompt, transfer_config
from kvstore.engine_adapter.vllm import KVStoreConnector
from kvstore.errors import ConfigError
from tests.engines.conftest import KV_CACHE_BYTES, DaemonProcess, tokens
from tests.engines.models import VOCABULARY

StartEngine = Callable[..., Engine]


def test_after_a_reset_nothing_is_found_that_was_stored_before(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    engine = start_engine(llama, daemon.socket)
    engine.generate(prompts[-1:])
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.generate(prompts[-1:]) == expected[-1:]
    assert "load_blocks" not in engine.counters
    engine.drain()
    engine.forget()
    # What it stored since, it finds.
    assert engine.generate(prompts[-1:]) == expected[-1:]
    assert engine.counters["load_blocks"] == (len(prompts[-1]) - 1) // BLOCK_TOKENS
    # Others go on with what there was.
    other = start_engine(llama, daemon.socket)
    assert other.generate(prompts[-1:]) == expected[-1:]
    assert other.counters["load_blocks"] == (len(prompts[-1]) - 1) // BLOCK_TOKENS


def test_events_tell_what_is_stored(daemon: DaemonProcess, llama: Path, start_engine: StartEngine) -> None:
    engine = start_engine(
        llama,
        daemon.socket,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        max_num_batched_tokens=96,
        max_num_seqs=8,
    )
    connector = engine.scheduler_connector
    taken: list[Any] = []
    take = connector.take_events

    def watched() -> list[Any]:
        events = [*take()]
        taken.extend(events)
        return events

    connector.take_events = watched  # type: ignore[method-assign]
    prompt = tokens(300, 3)
    hashes: list[Any] = []
    finished = connector.request_finished_all_groups

    def remember(request: Any, block_ids: Any) -> Any:
        hashes[:] = request.block_hashes
        return finished(request, block_ids)

    connector.request_finished_all_groups = remember  # type: ignore[method-assign]
    engine.generate([prompt], 40)
    engine.drain()
    engine.llm.reset_prefix_cache(reset_connector=True)
    engine.generate([tokens(8, 4)], 2)
    *stored, cleared = taken
    assert isinstance(cleared, AllBlocksCleared)
    assert all(isinstance(event, BlockStored) and event.medium == "KVSTORE" for event in stored)
    assert [token for event in stored for token in event.token_ids] == prompt[: 300 // BLOCK_TOKENS * BLOCK_TOKENS]
    told = [each for event in stored for each in event.block_hashes]
    assert len(told) == 300 // BLOCK_TOKENS
    assert [event.parent_block_hash for event in stored] == [None, *(event.block_hashes[-1] for event in stored[:-1])]


def test_embeddings_in_place_of_tokens_hit_only_the_same(
    daemon: DaemonProcess, llama: Path, start_engine: StartEngine
) -> None:
    engine = start_engine(llama, daemon.socket, enable_prompt_embeds=True)
    noise = torch.Generator().manual_seed(1)
    one = torch.randn(200, 256, generator=noise)
    two = one.clone()
    two[100] += 1
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def said(embeds: torch.Tensor) -> tuple[list[int], float]:
        before = engine.counters.get("load_blocks", 0)
        (out,) = engine.llm.generate([{"prompt_embeds": embeds}], sampling, use_tqdm=False)
        engine.drain()
        engine.forget()
        return list(out.outputs[0].token_ids), engine.counters.get("load_blocks", 0) - before

    first = said(one)
    assert first[1] == 0
    assert said(one) == (first[0], 199 // BLOCK_TOKENS)
    # The embedding that differs is in block 3.
    assert said(two)[1] == 3


@pytest.mark.parametrize(
    ("side", "name"),
    [
        ("scheduler", "matched"),
        ("scheduler", "allocated"),
        ("scheduler", "add_saves"),
        ("scheduler", "heard"),
        ("scheduler", "finished"),
        ("worker", "start_loads"),
        ("worker", "start_saves"),
        ("worker", "take_report"),
    ],
)
def test_an_error_inside_does_not_reach_the_engine(
    side: str,
    name: str,
    daemon: DaemonProcess,
    llama: Path,
    prompts: list[Prompt],
    expected: list[list[int]],
    shared_engine: Callable[[], Engine],
) -> None:
    """Each entry fails in every second call, while blocks are stored and found."""
    engine = shared_engine()
    connector = engine.scheduler_connector if side == "scheduler" else engine.worker_connector
    part = getattr(connector, f"_{side}")
    works = getattr(part, name)
    calls = 0

    def fails(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise RuntimeError("on purpose")
        return works(*arguments)

    before = engine.counters
    setattr(part, name, fails)
    try:
        for _ in range(2):
            assert engine.generate(prompts[:8]) == expected[:8]
            engine.forget_when_free()
    finally:
        setattr(part, name, works)
    assert engine.counters["errors"] > before.get("errors", 0)
    # And when it works again, all works again.
    assert engine.generate(prompts[8:12]) == expected[8:12]
    engine.forget_when_free()
    now = engine.counters.get("load_blocks", 0)
    assert engine.generate(prompts[8:12]) == expected[8:12]
    assert engine.counters["load_blocks"] > now
    engine.forget_when_free()


@pytest.fixture(scope="module")
def shared_engine(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One engine for tests that leave it as it was; its daemon lives as long."""
    running: list[Any] = []

    def get() -> Engine:
        if not running:
            daemon = DaemonProcess(tmp_path_factory.mktemp("shared"), "--dram", "256MiB", "--no-prefault")
            running.extend((daemon, Engine(llama, daemon.socket, kv_cache_memory_bytes=KV_CACHE_BYTES)))
        engine: Engine = running[1]
        return engine

    yield get
    if running:
        running[1].close()
        running[0].kill()


def test_options_that_do_not_exist_stop_the_engine(tmp_path: Path, llama: Path) -> None:
    config = transfer_config(tmp_path / "none.sock", {"lookup_timeout": 1})
    with pytest.raises(ConfigError, match=r"'lookup_timeout'.*lookup_timeout_s"):
        Engine(llama, tmp_path / "none.sock", {"lookup_timeout": 1})
    assert config["kv_role"] == "kv_both"


def test_vllm_is_told_what_it_asks_a_connector() -> None:
    assert KVStoreConnector.requires_piecewise_for_cudagraph({}) is False
    assert KVStoreConnector.requires_piecewise_for_cudagraph({"load_async": False}) is True
    assert VOCABULARY > 0
