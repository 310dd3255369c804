"""Models with sliding windows: the engine takes blocks back behind the window, and gets what a hit needs of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as kvi

from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine, Prompt
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.vllm.shapes import GroupShape, LayerPages, group_shapes, stored_as
from kvstore.errors import BadInputError
from kvstore.hybrid import PARTS_MAX, parts_of
from kvstore.types import Shard
from tests.engines.conftest import DaemonProcess, tokens
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


def test_windows_are_loaded_and_written_to_nvme_only_where_a_hit_needs_them(
    tmp_path: Path, start_daemon: Callable[..., DaemonProcess], gemma: Path, start_engine: StartEngine
) -> None:
    daemon = start_daemon(
        *("--dram", "256MiB", "--no-prefault"),
        *("--nvme-dir", str(tmp_path / "nvme"), "--nvme", "512MiB", "--write-policy", "through"),
    )
    n_blocks, n_window_blocks = 20, -(-(WINDOW_TOKENS - 1) // BLOCK_TOKENS)
    prompt = tokens(n_blocks * BLOCK_TOKENS + 5, 4)
    said = start_engine(gemma).generate([prompt])
    engine = start_engine(gemma, daemon.socket)
    worker, scheduler = engine.worker_connector._worker, engine.scheduler_connector._scheduler
    assert worker is not None
    assert scheduler is not None
    parts = parts_of(worker._namespace.spec)
    assert [part.window_blocks for part in parts] == [0, n_window_blocks]
    full_bytes, window_bytes = (part.block_bytes for part in parts)
    assert engine.generate([prompt]) == said
    engine.drain()
    assert engine.counters["save_bytes"] == n_blocks * (full_bytes + window_bytes)
    assert scheduler._lookups is not None
    persisted = scheduler._lookups._family.persist(prompt[: n_blocks * BLOCK_TOKENS], 60)
    assert persisted.n_durable == n_blocks
    with daemon.client() as client:
        (found,) = client.namespaces()
    hit_bytes = n_blocks * full_bytes + n_window_blocks * window_bytes
    assert hit_bytes <= found.nvme_bytes < hit_bytes + (n_blocks - n_window_blocks) * window_bytes / 2
    # What is not on NVMe is gone with the daemon; a hit misses nothing.
    daemon.kill()
    daemon.start()
    engine = start_engine(gemma, daemon.socket, {"pending_wait_s": 60})
    assert engine.generate([prompt]) == said
    engine.drain()
    assert engine.counters["load_bytes"] == hit_bytes
    assert not {"errors", "loads_failed", "saves_failed"} & engine.counters.keys()


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


def layers_of(*groups: int) -> list[LayerPages]:
    """One layer for each number, which is its group; all alike."""
    return [LayerPages(group, (f"l{i}",), torch.zeros(4, 8), 0, 32, 32) for i, group in enumerate(groups)]


def test_windows_of_one_worker_are_parts_and_follow_what_every_block_has() -> None:
    groups = (GroupShape(("l0",), 95, ""), GroupShape(("l1",), 0, ""), GroupShape(("l2",), 31, ""))
    spec, layers = stored_as(32, groups, layers_of(0, 1, 2, 0, 1), Shard())
    assert [(part.window_blocks, part.block_bytes) for part in parts_of(spec)] == [(0, 64), (3, 64), (1, 32)]
    assert [(layer.names[0], layer.part) for layer in layers] == [("l1", 0), ("l4", 0), ("l0", 1), ("l3", 1), ("l2", 2)]
    places = BlockLayout.by_part(spec).layers
    assert [place.planes for place in places] == [(0,), (32,), (0,), (32,), (0,)]


@pytest.mark.parametrize(
    ("windows", "shard"),
    [((95, 0), Shard(0, 2)), ((95, 0), Shard(0, 1, 0, 2)), ((95, 31), Shard()), ((0, 0), Shard())],
)
def test_blocks_are_whole_for_several_workers_and_without_windows_beside_full_attention(
    windows: tuple[int, int], shard: Shard
) -> None:
    groups = tuple(GroupShape((f"l{i}",), window, "") for i, window in enumerate(windows))
    layers = layers_of(0, 1)
    spec, stored = stored_as(32, groups, layers, shard)
    assert (parts_of(spec), stored, spec.block_bytes) == ((), layers, 64)


def test_more_kinds_of_windows_than_a_namespace_has_parts_are_stored_whole() -> None:
    groups = (GroupShape(("l0",), 0, ""), *(GroupShape((f"l{i}",), 30 + i, "") for i in range(1, PARTS_MAX + 2)))
    layers = layers_of(*range(PARTS_MAX + 2))
    spec, stored = stored_as(64, groups, layers, Shard())
    assert (parts_of(spec), stored) == ((), layers)


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
