"""Ways in which other KV caches failed their users, through vLLM: cases 4 to 6, 11 and 12 of the public reports.

4: keys differ between processes. 5: what differs in adapter, weights or salt hits. 6: KV of another number format,
block size, layout or number of ranks hits (ranks: test_processes.py). 11: cancelled requests and killed engines keep
memory. 12: a backend that hangs makes requests hang.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine, Prompt
from kvstore.engine_adapter.vllm.guard import logger
from tests.engines.conftest import DaemonProcess, namespaces, tokens
from tests.engines.models import change_one_weight, make_lora
from tests.engines.processes import run_engine

StartEngine = Callable[..., Engine]

PROMPT = tokens(300, 11)
HIT_BLOCKS = 299 // BLOCK_TOKENS
WAIT_S = 60.0


def loaded(engine: Engine, **how: Any) -> tuple[list[int], float]:
    """The prompt's tokens, and how many blocks came from the store for it."""
    before = engine.counters.get("load_blocks", 0)
    (said,) = engine.generate([PROMPT], **how)
    engine.drain()
    engine.forget()
    return said, engine.counters.get("load_blocks", 0) - before


def daemon_says(daemon: DaemonProcess, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The daemon's figures once they are so. Fails after ``WAIT_S``."""
    again = threading.Event()
    with daemon.client() as client:
        for _ in range(int(WAIT_S / 0.05)):
            stats: dict[str, Any] = client.stats()
            if is_so(stats):
                return stats
            again.wait(0.05)
    pytest.fail(f"the daemon's figures did not come to be so within {WAIT_S} s: {stats}")


# 4 -----------------------------------------------------------------------------------------------


def test_case_04_three_processes_agree_on_every_key_whatever_their_hash_seed(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """Also with what else identifies a request being left out, None, or empty."""
    first = run_engine(llama, daemon.socket, [prompts], seed=1)
    assert first["said"] == [expected]
    assert first["metrics"]["vllm:kvstore_save_blocks"] > 0
    assert first["metrics"]["vllm:external_prefix_cache_hits"] == 0
    with daemon.client() as client:
        stored = {each.digest: each.n_blocks for each in client.namespaces()}
    assert len(stored) == 1
    one_by_one = [[prompt] for prompt in prompts]
    whole = sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in prompts)
    ways: list[tuple[int | str, dict[str, Any]]] = [
        (2, {"cache_salt": None}),
        ("random", {"cache_salt": None, "multi_modal_data": None}),
    ]
    with ThreadPoolExecutor(len(ways)) as pool:
        others = [
            pool.submit(run_engine, llama, daemon.socket, one_by_one, seed=seed, more=more) for seed, more in ways
        ]
    for other in (each.result() for each in others):
        assert [said for (said,) in other["said"]] == expected
        metrics = other["metrics"]
        assert metrics["vllm:kvstore_load_blocks"] == whole
        assert metrics["vllm:external_prefix_cache_hits"] == whole * BLOCK_TOKENS
        assert metrics["vllm:kvstore_lookups"] >= len(prompts)
        assert metrics["vllm:kvstore_errors"] == metrics["vllm:kvstore_loads_failed"] == 0
    with daemon.client() as client:
        assert {each.digest: each.n_blocks for each in client.namespaces()} == stored


# 5 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_case_05_adapters_and_salts_never_hit_each_other(
    tier: str,
    tmp_path: Path,
    start_daemon: Callable[..., DaemonProcess],
    llama: Path,
    start_engine: StartEngine,
) -> None:
    """The second time from memory, or from NVMe after the daemon was killed."""
    disk = ("--nvme-dir", str(tmp_path / "nvme"), "--nvme", "512MiB", "--write-policy", "through")
    daemon = start_daemon("--dram", "256MiB", "--no-prefault", *(disk if tier == "nvme" else ()))
    one = LoRARequest("one", 1, str(make_lora(tmp_path / "one", llama, 1)))
    two = LoRARequest("two", 2, str(make_lora(tmp_path / "two", llama, 2)))
    ways: list[dict[str, Any]] = [
        {},
        {"lora": one},
        {"lora": two},
        {"salt": "a"},
        {"salt": "b"},
        {"lora": one, "salt": "a"},
    ]
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    engine = start_engine(llama, daemon.socket, {"pending_wait_s": WAIT_S}, **settings)
    first = [loaded(engine, **way) for way in ways]
    assert [n for _, n in first] == [0] * len(ways)
    assert len({tuple(said) for said, _ in first[:3]}) == 3
    if tier == "nvme":
        n_blocks = len(ways) * (len(PROMPT) // BLOCK_TOKENS)
        again = threading.Event()
        with daemon.client() as client:
            for _ in range(int(WAIT_S / 0.05)):
                if sum(each.n_nvme_blocks for each in client.namespaces()) == n_blocks:
                    break
                again.wait(0.05)
        daemon.kill()
        daemon.start()
        engine = start_engine(llama, daemon.socket, {"pending_wait_s": WAIT_S}, **settings)
    assert [loaded(engine, **way) for way in ways] == [(said, HIT_BLOCKS) for said, _ in first]
    assert loaded(engine, salt="c")[1] == 0
    other = start_engine(llama, daemon.socket, {"tenant": "other"})
    assert loaded(other) == (first[0][0], 0)


def test_case_05_an_adapter_of_the_same_name_with_other_weights_does_not_hit(
    daemon: DaemonProcess, llama: Path, tmp_path: Path, start_engine: StartEngine
) -> None:
    path = tmp_path / "adapter"
    settings = {"enable_lora": True, "max_lora_rank": 8}
    make_lora(path, llama, 1)
    said, _ = loaded(start_engine(llama, daemon.socket, **settings), lora=LoRARequest("same", 1, str(path)))
    make_lora(path, llama, 2)
    other, n = loaded(start_engine(llama, daemon.socket, **settings), lora=LoRARequest("same", 1, str(path)))
    assert (n, other != said) == (0, True)
    make_lora(path, llama, 1)
    assert loaded(start_engine(llama, daemon.socket, **settings), lora=LoRARequest("same", 1, str(path))) == (
        said,
        HIT_BLOCKS,
    )


# 6 -----------------------------------------------------------------------------------------------


def test_case_06_other_formats_blocks_configs_and_weights_do_not_hit_and_the_field_is_named(
    daemon: DaemonProcess, llama: Path, tmp_path: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, _ = loaded(start_engine(llama, daemon.socket, dtype="bfloat16"))
    copied = Path(shutil.copytree(llama, tmp_path / llama.name))
    assert loaded(start_engine(copied, daemon.socket, dtype="bfloat16")) == (said, HIT_BLOCKS)
    known = namespaces(daemon)
    assert len(known) == 1
    (stored,) = known.values()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "float16"}, "spec.groups[0].dtype: 'bfloat16' != 'float16'"),
        ({"block_size": 64}, "spec.block_tokens: 32 != 64"),
        ({"hf_overrides": {"rms_norm_eps": 1e-3}}, "revision: "),
    ]
    told: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *facts: told.append(text % facts))
    for changed, says in changes:
        told.clear()
        assert loaded(start_engine(llama, daemon.socket, **{"dtype": "bfloat16", **changed}))[1] == 0, changed
        assert any("not the same" in line and says.split(":")[0] in line for line in told), told
        (other,) = [each for digest, each in namespaces(daemon).items() if digest not in known]
        known[other.digest()] = other
        differences = stored.differences(other)
        assert any(each.startswith(says) for each in differences), differences
        if not says.startswith("spec"):
            assert len(differences) == 1
    change_one_weight(copied)
    assert loaded(start_engine(copied, daemon.socket, dtype="bfloat16"))[1] == 0
    (other,) = [each for digest, each in namespaces(daemon).items() if digest not in known]
    assert [each.partition(":")[0] for each in stored.differences(other)] == ["revision"]


# 11 ----------------------------------------------------------------------------------------------


def test_case_11_requests_that_are_aborted_leave_nothing_behind(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    """Aborted while they wait, load, compute and save, at every step of a few requests."""
    engine = start_engine(llama, daemon.socket, max_num_batched_tokens=128, max_num_seqs=4)
    llm_engine, core = engine.llm.llm_engine, engine.core
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    n_blocks_free = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for n_steps in range(12):
        for i in range(4):
            llm_engine.add_request(f"{n_steps}-{i}", {"prompt_token_ids": prompts[-1 - i]}, sampling)
        for _ in range(n_steps):
            llm_engine.step()
        core.abort_requests(list(core.scheduler.requests))
        llm_engine.output_processor.abort_requests([f"{n_steps}-{i}" for i in range(4)], internal=False)
        engine.drain()
        if n_steps % 2:
            engine.forget()
        assert not core.scheduler.requests
    assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == n_blocks_free
    scheduler, worker = engine.scheduler_connector._scheduler, engine.worker_connector._worker
    assert scheduler is not None
    assert worker is not None
    assert (scheduler._tracked, scheduler._orphans, scheduler._ended) == ({}, {}, set())
    assert (worker._async_loads, worker._saves, worker._ended) == ({}, {}, set())
    with daemon.client() as client:
        stats = client.stats()
    assert (stats["leases"], stats["reservations"]) == (0, 0)
    engine.forget()
    assert engine.generate(prompts) == expected
    assert "errors" not in engine.counters


def test_case_11_an_engine_that_is_killed_while_it_saves_leaves_nothing_visible(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    run_engine(llama, daemon.socket, [prompts[-1:]], die=("save", 2))
    assert daemon_says(daemon, lambda stats: stats["reservations"] == 0)["blocks"] == 0
    engine = start_engine(llama, daemon.socket)
    assert engine.generate(prompts[-1:]) == expected[-1:]
    engine.drain()
    assert "load_blocks" not in engine.counters
    assert engine.counters["save_blocks"] == len(prompts[-1]) // BLOCK_TOKENS


def test_case_11_an_engine_that_is_killed_while_it_loads_holds_nothing(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    """Its lease would go on for an hour."""
    engine = start_engine(llama, daemon.socket)
    assert engine.generate(prompts[-1:]) == expected[-1:]
    engine.drain()
    run_engine(llama, daemon.socket, [prompts[-1:]], die=("load", 2), options={"lease_s": 3600})
    assert daemon_says(daemon, lambda stats: stats["leases"] == 0)["leases_ended_unacknowledged"] == 0
    with daemon.client() as client:
        assert [each.n_pinned_blocks for each in client.namespaces()] == [0]
    engine.forget()
    assert engine.generate(prompts[-1:]) == expected[-1:]
    assert engine.counters["load_blocks"] == (len(prompts[-1]) - 1) // BLOCK_TOKENS


# 12 ----------------------------------------------------------------------------------------------


def test_case_12_a_daemon_that_hangs_costs_one_deadline_and_no_more(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    """Lookups are all that the engine's thread ever waits for: of many, the first waits, for its deadline."""
    limit_s = 0.2
    engine = start_engine(llama, daemon.socket, {"lookup_timeout_s": limit_s, "transfer_timeout_s": 0.5})
    daemon.pause()
    for _ in range(3):
        assert engine.generate(prompts) == expected
        engine.forget_when_free()
    counters = engine.counters
    assert counters["lookups_failed"] + counters.get("lookups_skipped", 0) == 3 * len(prompts)
    assert limit_s <= counters["lookup_seconds"] < 3 * limit_s
    assert "errors" not in counters
    daemon.go_on()
    worker, scheduler = engine.worker_connector._worker, engine.scheduler_connector._scheduler
    assert worker is not None
    assert scheduler is not None
    for client in (worker._loader, worker._saver, scheduler._client):
        assert client.wait_healthy(WAIT_S)
    for _ in range(2):
        assert engine.generate(prompts[-1:]) == expected[-1:]
        engine.forget_when_free()
    assert engine.counters["load_blocks"] == (len(prompts[-1]) - 1) // BLOCK_TOKENS
