"""Models, caches and a real daemon for the adapter's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.client import Client
from kvstore.engine_adapter.transformers import KVStoreCache
from tests.cases.processes import DaemonProcess
from tests.engine_adapter.transformers.models import BLOCK_TOKENS, MODELS

MakeCache = Callable[..., KVStoreCache]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices only lose by threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def daemon_process(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon in a process of its own, to be killed and started again."""
    process = DaemonProcess(tmp_path, "--nvme", "64MiB")
    process.start()
    yield process
    process.end()


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    """Each kind of model in turn: full attention, and sliding windows."""
    return MODELS[request.param]()


@pytest.fixture
def make_cache(client: Client) -> MakeCache:
    """``make_cache(model, input_ids, ...)``: as ``KVStoreCache.for_prompt`` with small blocks."""

    def make(model: Any, input_ids: torch.Tensor, *args: Any, **settings: Any) -> KVStoreCache:
        return KVStoreCache.for_prompt(client, model, input_ids, *args, **{"block_tokens": BLOCK_TOKENS, **settings})

    return make
