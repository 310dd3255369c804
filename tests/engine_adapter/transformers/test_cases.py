"""Ways in which other KV caches failed their users, through this adapter."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from kvstore.client import Client
from kvstore.engine_adapter.transformers import KVStoreCache, explain, namespace_of
from kvstore.engine_adapter.transformers.identity import root_of
from tests.cases.processes import DaemonProcess
from tests.engine_adapter.transformers.models import BLOCK_TOKENS, greedy, tiny_gemma, tiny_llama, tokens

ROOT = Path(__file__).parents[3]
PROMPT = tokens(1, 70)[None]
TIMEOUT_S = 2.0
SLACK_S = 20.0
"""For a busy machine."""


@pytest.fixture
def client(daemon_process: DaemonProcess) -> Iterator[Client]:
    with Client(daemon_process.socket_path, timeout_s=5.0) as connected:
        yield connected


def cache_for(client: Client, model: Any, **settings: Any) -> KVStoreCache:
    return KVStoreCache.for_prompt(client, model, PROMPT, **{"block_tokens": BLOCK_TOKENS, **settings})


def store(client: Client, model: Any, **settings: Any) -> None:
    cache = cache_for(client, model, **settings)
    greedy(model, PROMPT, n_new=1, past_key_values=cache)
    assert cache.save()


def run_reader(socket_path: Path, *more: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.engine_adapter.transformers.reader", str(socket_path), "llama", "1", "70"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *more], check=False, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=100
    )


def n_held(client: Client) -> float:
    """Leases and reservations in force or not let go of, at the daemon."""
    stats = client.stats()
    names = ("leases", "reservations", "leases_ended_unacknowledged", "reservations_ended_unacknowledged")
    return sum(float(stats[name]) for name in names)


def test_case_04_three_processes_agree_whatever_their_hash_seeds(client: Client, daemon_process: DaemonProcess) -> None:
    model = tiny_llama()
    expected = greedy(model, PROMPT)
    store(client, model, extras=[], salt="")
    digest = namespace_of(model, block_tokens=BLOCK_TOKENS).digest().hex()
    for seed in ("1", "4242"):
        found = json.loads(run_reader(daemon_process.socket_path, hash_seed=seed).stdout)
        assert found == {"hit": 69, "said": expected, "why": "", "namespace": digest}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_case_05_adapters_and_salts_never_hit_each_other_in_any_tier(
    client: Client, daemon_process: DaemonProcess
) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)

    def adapted(seed: int) -> Any:
        base = tiny_llama()
        torch.manual_seed(seed)
        return peft.get_peft_model(base, config, adapter_name="the same name")

    kinds: list[tuple[Any, dict[str, Any]]] = [
        (tiny_llama(), {}), (adapted(5), {}), (adapted(6), {}), (tiny_llama(), {"salt": "a"}),
        (adapted(5), {"salt": "a"}), (tiny_llama(), {"salt": "b"}),
    ]  # fmt: skip
    said = []
    for model, settings in kinds:
        cache = cache_for(client, model, **settings)
        assert cache.n_hit_tokens == 0, settings
        said.append(greedy(model, PROMPT, past_key_values=cache))
        cache.save()
        handle = client.open(namespace_of(model, block_tokens=BLOCK_TOKENS))
        done = handle.persist(PROMPT[0].numpy(), wait_s=10.0, root=root_of(model, **settings))
        assert done.n_durable == PROMPT.shape[1] // BLOCK_TOKENS
    assert said[0] != said[1] != said[2] != said[0]
    daemon_process.end()
    daemon_process.start()
    with Client(daemon_process.socket_path, timeout_s=5.0) as later:
        for expected, (model, settings) in zip(said, kinds, strict=True):
            cache = cache_for(later, model, **settings)
            assert cache.n_hit_tokens >= 64  # from disk
            assert greedy(model, PROMPT, past_key_values=cache) == expected
        assert cache_for(later, adapted(7)).n_hit_tokens == 0
        assert cache_for(later, tiny_llama(), salt="c").n_hit_tokens == 0


def other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.engine_adapter.transformers.identity._engine", lambda: "another layout")


def test_case_06_another_dtype_or_layout_is_a_miss_that_is_explained(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama().to(torch.bfloat16)
    store(client, model)
    assert cache_for(client, model).n_hit_tokens == 69
    assert explain(client, model, block_tokens=BLOCK_TOKENS) == []

    def differing(model: Any, **identity: Any) -> str:
        identity = {"block_tokens": BLOCK_TOKENS, **identity}
        assert cache_for(client, model, **identity).n_hit_tokens == 0
        lines = explain(client, model, **identity)
        assert len(lines) == 1, lines
        return lines[0]

    half = tiny_llama().to(torch.bfloat16).to(torch.float16)
    assert "spec.groups[0].dtype: 'float16' != 'bfloat16'" in differing(half)
    assert "spec.block_tokens: 32 != 16" in differing(model, block_tokens=32)
    assert "spec.groups[0].kv_heads: 4 != 2" in differing(tiny_llama(num_key_value_heads=4).to(torch.bfloat16))
    assert "revision: 'named x" in differing(model, revision="x")
    assert explain(client, model, PROMPT, block_tokens=BLOCK_TOKENS)[0].startswith("4 of 5 blocks can be used")
    salted = explain(client, model, PROMPT, block_tokens=BLOCK_TOKENS, salt="x")
    assert salted[0] == "0 of 5 blocks can be used"
    assert not any("another salt" in line for line in salted), "salts keep users apart"
    assert (
        "has 4 blocks of the prompt (here != there): revision: 'named x"
        in explain(client, model, PROMPT, block_tokens=BLOCK_TOKENS, revision="x")[-2]
    )
    other_version(monkeypatch)
    assert "engine: 'another layout' != 'transformers" in differing(model)


def test_case_11_a_request_cancelled_while_it_loads_gives_everything_back(
    client: Client, wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    model: Any = tiny_gemma()
    expected = greedy(model, PROMPT)
    store(client, model)
    cache = cache_for(client, model)
    assert cache.n_hit_tokens == 69

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, PROMPT, past_key_values=cache)
    hook.remove()
    layers: Any = cache.layers
    assert [layer.loaded for layer in layers] == [True, True, False, False]
    assert n_held(client) > 0
    del cache, layers
    gc.collect()
    wait_until(lambda: n_held(client) == 0, "what the cancelled request held is let go of")
    again = cache_for(client, model)
    assert again.n_hit_tokens == 69
    assert greedy(model, PROMPT, past_key_values=again) == expected


def test_case_11_an_engine_killed_while_it_stores_leaves_nothing(
    client: Client, daemon_process: DaemonProcess, wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    assert run_reader(daemon_process.socket_path, "2").returncode == -signal.SIGKILL
    assert not client.stats().get("committed_blocks")
    wait_until(lambda: n_held(client) == 0, "the daemon sees the end of the engine")
    model = tiny_llama()
    cache = cache_for(client, model)
    assert cache.n_hit_tokens == 0
    expected = greedy(model, PROMPT)
    assert greedy(model, PROMPT, past_key_values=cache) == expected
    assert cache.save()
    assert greedy(model, PROMPT, past_key_values=cache_for(client, model)) == expected


def test_case_12_a_daemon_that_hangs_is_waited_for_once(client: Client, daemon_process: DaemonProcess) -> None:
    """The first request gets its miss by the deadline, those that follow at once: none computes any later for it."""
    model = tiny_llama()
    expected = greedy(model, PROMPT)
    store(client, model)
    process = daemon_process._process
    assert process is not None
    with Client(daemon_process.socket_path, timeout_s=TIMEOUT_S, required=False) as hasty:
        assert hasty.wait_healthy(20.0)
        process.send_signal(signal.SIGSTOP)
        try:
            begun_s = time.monotonic()
            n_requests = 30
            for _ in range(n_requests):
                cache = cache_for(hasty, model)
                assert cache.n_hit_tokens == 0
                assert cache.reason
            assert greedy(model, PROMPT, past_key_values=cache) == expected
            assert cache.save() == 0
            assert time.monotonic() - begun_s < TIMEOUT_S + SLACK_S < n_requests * TIMEOUT_S
        finally:
            process.send_signal(signal.SIGCONT)
    assert client.wait_healthy(20.0)
    assert cache_for(client, model).n_hit_tokens == 69
