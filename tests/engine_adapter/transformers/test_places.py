"""The same cache on every kind of store: a daemon's disk after a crash, a store in this process, a remote one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvstore
from kvstore.client import Client
from kvstore.config import GrpcOptions
from kvstore.engine_adapter.parts import open_namespace
from kvstore.engine_adapter.transformers import KVStoreCache, namespace_of
from tests.cases.processes import DaemonProcess
from tests.engine_adapter.transformers.models import BLOCK_TOKENS, greedy, tiny_gemma, tokens

PROMPT = tokens(1, 70)[None]


def store_and_hit(client: Client) -> None:
    """Compute and store with one cache, and begin with all of it in the next."""
    model = tiny_gemma()
    expected = greedy(model, PROMPT)
    for n_hit in (0, 69):
        cache = KVStoreCache.for_prompt(client, model, PROMPT, block_tokens=BLOCK_TOKENS)
        assert cache.n_hit_tokens == n_hit
        assert greedy(model, PROMPT, past_key_values=cache) == expected
        cache.save()
        assert not cache.save_reason


def test_a_store_in_this_process(tmp_path: Path) -> None:
    with kvstore.open(dram="16MiB") as store:
        store_and_hit(store)


def test_a_remote_store(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    listen = f"unix:{tmp_path / 'grpc.sock'}"
    start_daemon(grpc=GrpcOptions(listen=listen))
    with Client(f"grpc+{listen}", timeout_s=5.0) as client:
        store_and_hit(client)


def test_from_disk_after_the_daemon_was_killed(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, "--nvme", "64MiB")
    daemon.start()
    try:
        model = tiny_gemma()
        with Client(daemon.socket_path, timeout_s=5.0) as client:
            store_and_hit(client)
            handle = open_namespace(client, namespace_of(model, block_tokens=BLOCK_TOKENS))
            done = handle.persist(PROMPT[0].numpy(), wait_s=10.0)
            assert done.n_durable == PROMPT.shape[1] // BLOCK_TOKENS
        daemon.end()
        daemon.start()
        with Client(daemon.socket_path, timeout_s=5.0) as client:
            cache = KVStoreCache.for_prompt(client, model, PROMPT, block_tokens=BLOCK_TOKENS)
            assert cache.n_hit_tokens == PROMPT.shape[1] // BLOCK_TOKENS * BLOCK_TOKENS
            assert greedy(model, PROMPT, past_key_values=cache) == greedy(model, PROMPT)
    finally:
        daemon.end()
