"""Two processes, and a daemon that dies, stops or was never there: misses, and never anything that generate sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.client import Client
from kvstore.engine_adapter.transformers import KVStoreCache
from tests.cases.processes import DaemonProcess
from tests.engine_adapter.transformers.models import BLOCK_TOKENS, MODELS, greedy, tokens

ROOT = Path(__file__).parents[3]
PROMPT = tokens(1, 70)[None]


@pytest.fixture
def client(daemon_process: DaemonProcess) -> Iterator[Client]:
    with Client(daemon_process.socket_path, timeout_s=5.0) as connected:
        yield connected


def cache_for(client: Client, model: Any, prompt: torch.Tensor = PROMPT) -> KVStoreCache:
    return KVStoreCache.for_prompt(client, model, prompt, block_tokens=BLOCK_TOKENS)


def store(client: Client, model: Any) -> None:
    cache = cache_for(client, model)
    greedy(model, PROMPT, past_key_values=cache)
    assert cache.save()


def read_elsewhere(socket_path: Path, kind: str, hash_seed: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine_adapter.transformers.reader", str(socket_path), kind, "1", "70"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=100)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_second_process_hits_what_the_first_stored(client: Client, daemon_process: DaemonProcess, kind: str) -> None:
    model = MODELS[kind]()
    expected = greedy(model, PROMPT)
    store(client, model)
    found = read_elsewhere(daemon_process.socket_path, kind, "7")
    assert (found["hit"], found["said"], found["why"]) == (69, expected, "")


def test_this_process_hits_what_another_stored(client: Client, daemon_process: DaemonProcess) -> None:
    assert read_elsewhere(daemon_process.socket_path, "gemma", "0")["hit"] == 0
    model = MODELS["gemma"]()
    cache = cache_for(client, model)
    assert cache.n_hit_tokens == 69
    assert greedy(model, PROMPT, past_key_values=cache) == greedy(model, PROMPT)


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_daemon_killed_between_the_hit_and_its_use(client: Client, daemon_process: DaemonProcess, kind: str) -> None:
    model = MODELS[kind]()
    expected = greedy(model, PROMPT)
    store(client, model)
    cache = cache_for(client, model)
    daemon_process.end(signal.SIGKILL)
    assert cache.n_hit_tokens == 69
    assert greedy(model, PROMPT, past_key_values=cache) == expected
    assert not cache_for(client, model).n_hit_tokens
    assert cache_for(client, model).reason


def test_a_client_closed_between_the_hit_and_its_use(client: Client) -> None:
    model = MODELS["llama"]()
    expected = greedy(model, PROMPT)
    store(client, model)
    cache = cache_for(client, model)
    client.close()
    assert greedy(model, PROMPT, past_key_values=cache) == expected


@pytest.mark.parametrize("layer", [0, 2])
def test_a_daemon_killed_in_the_middle_of_a_forward(client: Client, daemon_process: DaemonProcess, layer: int) -> None:
    model: Any = MODELS["gemma"]()
    expected = greedy(model, PROMPT)
    cache = cache_for(client, model)
    model.model.layers[layer].mlp.register_forward_hook(lambda *_: daemon_process.end(signal.SIGKILL) and None)
    assert greedy(model, PROMPT, past_key_values=cache) == expected
    assert cache.save() == 0
    assert cache.save_reason


def test_a_client_closed_in_the_middle_of_a_forward(client: Client) -> None:
    """The slots that are being filled stay mapped."""
    model: Any = MODELS["llama"]()
    expected = greedy(model, PROMPT)
    cache = cache_for(client, model)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: client.close())
    assert greedy(model, PROMPT, past_key_values=cache) == expected
    assert cache.save() == 0


def test_a_stopped_daemon_is_a_miss_by_the_deadline(client: Client, daemon_process: DaemonProcess) -> None:
    model = MODELS["llama"]()
    expected = greedy(model, PROMPT)
    store(client, model)
    process = daemon_process._process
    assert process is not None
    hasty = Client(daemon_process.socket_path, timeout_s=0.3, required=False)
    assert hasty.wait_healthy(20.0)
    process.send_signal(signal.SIGSTOP)
    try:
        cache = cache_for(hasty, model)
        assert cache.n_hit_tokens == 0
        assert cache.reason
        assert greedy(model, PROMPT, past_key_values=cache) == expected
        assert cache.save() == 0
        assert cache.save_reason
    finally:
        process.send_signal(signal.SIGCONT)
        hasty.close()
    assert client.wait_healthy(20.0)
    assert cache_for(client, model).n_hit_tokens == 69


def test_a_daemon_that_never_was(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    with Client(tmp_path / "nobody.sock", timeout_s=0.2, required=False) as client:
        cache = cache_for(client, model)
        assert greedy(model, PROMPT, past_key_values=cache) == greedy(model, PROMPT)
        assert cache.save() == 0
        assert cache.save_reason


def test_a_store_without_room_skips_and_says_so(tmp_path: Path) -> None:
    process = DaemonProcess(tmp_path, "--dram", "1MiB", "--nvme", "64MiB")
    process.start()
    try:
        with Client(process.socket_path, timeout_s=5.0) as client:
            model: Any = MODELS["llama"]()
            prompt = tokens(2, 3000)[None]
            cache = cache_for(client, model, prompt)
            assert greedy(model, prompt, n_new=1, past_key_values=cache) == greedy(model, prompt, n_new=1)
            assert cache.save_reason
            assert 0 < cache_for(client, model, prompt).n_hit_tokens < 2999
    finally:
        process.end()


def test_a_forked_child_is_told_before_it_reads(client: Client) -> None:
    model = MODELS["llama"]()
    store(client, model)
    cache = cache_for(client, model)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            layer: Any = cache.layers[0]
            _ = layer.keys
        except Exception as error:
            said = str(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert "look them up in the child" in pipe.read()
    assert os.waitpid(child, 0)[1] == 0
