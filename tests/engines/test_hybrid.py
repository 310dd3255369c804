"""Models with sliding windows: the engine takes blocks back behind the window, and gets what a hit needs of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1 import kv_cache_interface as kvi

from kvstore.engine_adapter.vllm.shapes import group_shapes
from kvstore.errors import BadInputError
from tests.engines.conftest import DaemonProcess, tokens
from tests.engines.engine import BLOCK_TOKENS, Engine, Prompt
from tests.engines.models import make_gemma

StartEngine = Callable[..., Engine]

WINDOW_TOKENS = 96


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("gemma") / "tiny", WINDOW_TOKENS)


def test_tokens_after_hits_are_those_without(
    daemon: DaemonProcess, gemma: Path, prompts: list[Prompt], start_engine: StartEngine
) -> None:
    settings = {"max_num_batched_tokens": 256, "max_num_seqs": 16}
    said = start_engine(gemma, **settings).generate(prompts)
    engine = start_engine(gemma, daemon.socket, **settings)
    assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) == 2
    assert engine.generate(prompts) == said
    engine.drain()
    engine.forget()
    assert engine.generate(prompts[::-1]) == said[::-1]
    counters = engine.counters
    assert counters["load_blocks"] > len(prompts)
    assert not {"errors", "loads_failed", "saves_failed"} & counters.keys()


def test_a_failed_load_is_computed(daemon: DaemonProcess, gemma: Path, start_engine: StartEngine) -> None:
    prompt = tokens(500, 3)
    # Whatever is asked for: the engine can't be told of a failure inside of the batch.
    engine = start_engine(gemma, daemon.socket, {"load_async": False})
    said = engine.generate([prompt])
    engine.drain()
    engine.forget()
    worker, scheduler = engine.worker_connector._worker, engine.scheduler_connector._scheduler
    assert worker is not None
    assert scheduler is not None
    start = worker.start_loads

    def end_the_lease_first() -> None:
        for tracked in scheduler._tracked.values():
            if tracked.loading is not None:
                tracked.loading.release()
        start()

    worker.start_loads = end_the_lease_first  # type: ignore[method-assign]
    assert engine.generate([prompt]) == said
    assert engine.counters["loads_failed"] == 1
    engine.drain()
    worker.start_loads = start  # type: ignore[method-assign]
    engine.forget()
    assert engine.generate([prompt]) == said
    assert engine.counters["load_blocks"] == 499 // BLOCK_TOKENS


def test_layers_that_keep_a_state_are_refused() -> None:
    state = object.__new__(kvi.MambaSpec)
    object.__setattr__(state, "block_size", 16)
    config: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["m.0"], kv_cache_spec=state)])
    with pytest.raises(BadInputError, match=r"m\.0.*MambaSpec"):
        group_shapes(config, SimpleNamespace())


def test_groups_with_blocks_of_their_own_size_are_refused() -> None:
    groups = [
        SimpleNamespace(layer_names=[name], kv_cache_spec=SimpleNamespace(block_size=size))
        for name, size in (("a", 16), ("b", 32))
    ]
    config: Any = SimpleNamespace(kv_cache_groups=groups)
    with pytest.raises(BadInputError, match=r"\[16, 32\].*--block-size"):
        group_shapes(config, SimpleNamespace())


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(BadInputError, match="decode_context_parallel_size is 2"):
        group_shapes(SimpleNamespace(kv_cache_groups=[]), SimpleNamespace(decode_context_parallel_size=2))
