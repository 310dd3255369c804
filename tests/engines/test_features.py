"""What users of vLLM also use: each works with the store, and says what it says without."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import StructuredOutputsParams

from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine, Prompt
from kvstore.errors import BadInputError
from tests.engines.conftest import DaemonProcess, tokens
from tests.engines.models import add_tokenizer, make_deepseek
from tests.engines.processes import run_engine

StartEngine = Callable[..., Engine]

PROMPT = tokens(300, 31)
HIT_BLOCKS = 299 // BLOCK_TOKENS


def plain_sampling(**how: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, "detokenize": False, **how})


@pytest.fixture(scope="module")
def reader(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a tokenizer."""
    return add_tokenizer(Path(shutil.copytree(llama, tmp_path_factory.mktemp("reader") / "tiny")))


# Of requests -------------------------------------------------------------------------------------

REQUESTS: dict[str, Callable[[], SamplingParams]] = {
    "several answers": lambda: plain_sampling(n=3, temperature=1.0, seed=5),
    "prompt_logprobs": lambda: plain_sampling(prompt_logprobs=1),
    "logprobs": lambda: plain_sampling(logprobs=3),
    "structured output": lambda: plain_sampling(
        structured_outputs=StructuredOutputsParams(regex="[ab]{6}"), ignore_eos=False, detokenize=True
    ),
    "penalties": lambda: plain_sampling(repetition_penalty=1.3, frequency_penalty=0.5),
}


def answers_of(out: Any) -> list[list[int]]:
    return [[*each.token_ids] for each in out.outputs]


def logprobs_of(out: Any) -> list[dict[int, float]]:
    """Of the prompt's tokens or of the answer's, whichever were asked for."""
    given = out.prompt_logprobs or out.outputs[0].logprobs or []
    return [{token: each.logprob for token, each in (place or {}).items()} for place in given]


def test_requests_of_every_kind_are_answered_as_without_the_store(
    daemon: DaemonProcess, reader: Path, start_engine: StartEngine
) -> None:
    given = [{"prompt_token_ids": PROMPT}]
    engine = start_engine(reader, skip_tokenizer_init=False)
    plain = {}
    for name, sampling in REQUESTS.items():
        (plain[name],) = engine.sample(given, sampling())
        engine.forget()
    assert len(answers_of(plain["several answers"])) == 3
    assert len(logprobs_of(plain["prompt_logprobs"])) == len(PROMPT)
    assert len(logprobs_of(plain["logprobs"])) == 12
    engine = start_engine(reader, daemon.socket, skip_tokenizer_init=False)
    engine.generate([PROMPT])
    engine.forget_when_free()
    for name, sampling in REQUESTS.items():
        before = engine.counters.get("load_blocks", 0)
        (out,) = engine.sample(given, sampling())
        assert answers_of(out) == answers_of(plain[name]), name
        for here, there in zip(logprobs_of(out), logprobs_of(plain[name]), strict=True):
            assert here == pytest.approx(there, abs=1e-3), name
        engine.forget_when_free()
        loaded = engine.counters.get("load_blocks", 0) - before
        # Logits of the prompt's tokens can't be had from the store: the engine asks for none of it then. Answers that
        # begin together load each by itself.
        assert (loaded == 0) is (name == "prompt_logprobs"), name
        assert loaded % HIT_BLOCKS == 0, name
    assert not {"errors", "loads_failed", "saves_failed"} & engine.counters.keys()


# Of engines --------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "no prefix caching": {"enable_prefix_caching": False},
    "small budgets": {"max_num_batched_tokens": 48, "max_num_seqs": 4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_engines_of_every_kind_say_after_hits_what_they_say_without_the_store(
    name: str,
    daemon: DaemonProcess,
    llama: Path,
    prompts: list[Prompt],
    expected: list[list[int]],
    start_engine: StartEngine,
) -> None:
    chosen, said = prompts[-8:], expected[-8:]
    engine = start_engine(llama, daemon.socket, **SETTINGS[name])
    assert engine.generate(chosen) == said
    engine.drain()
    engine.forget()
    for prompt, each in zip(chosen, said, strict=True):
        assert engine.generate([prompt]) == [each]
        engine.drain()
        engine.forget()
    counters = engine.counters
    assert counters["load_blocks"] == sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in chosen)
    assert not {"errors", "loads_failed", "saves_failed", "save_skipped_blocks"} & counters.keys()


def test_guesses_from_the_prompt_are_stored_only_where_they_were_right(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """Speculative decoding by n-grams. In a process of its own: vLLM starts no second engine after it there."""
    chosen, said = prompts[-4:], expected[-4:]
    guessing = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    rounds = [chosen, *([prompt] for prompt in chosen)]
    out = run_engine(
        llama, daemon.socket, rounds, options={"save_generated": True}, speculative_config=guessing
    )  # fmt: skip
    assert out["said"] == [said, *([each] for each in said)]
    metrics = out["metrics"]
    assert metrics["vllm:kvstore_load_blocks"] == sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in chosen)
    assert metrics["vllm:kvstore_errors"] == metrics["vllm:kvstore_loads_failed"] == 0


def test_a_producer_only_stores_and_a_consumer_only_loads(
    daemon: DaemonProcess, llama: Path, prompts: list[Prompt], expected: list[list[int]], start_engine: StartEngine
) -> None:
    consumer = start_engine(llama, daemon.socket, role="kv_consumer")
    assert consumer.generate(prompts[-1:]) == expected[-1:]
    consumer.drain()
    assert not {"load_blocks", "saves", "save_blocks"} & consumer.counters.keys()
    producer = start_engine(llama, daemon.socket, role="kv_producer")
    for _ in range(2):
        assert producer.generate(prompts[-1:]) == expected[-1:]
        producer.drain()
        producer.forget()
    n_blocks = len(prompts[-1]) // BLOCK_TOKENS
    counters = producer.counters
    assert (counters["save_blocks"], counters["save_present_blocks"]) == (n_blocks, n_blocks)
    assert not {"lookups", "loads"} & counters.keys()
    consumer = start_engine(llama, daemon.socket, role="kv_consumer")
    assert consumer.generate(prompts[-1:]) == expected[-1:]
    consumer.drain()
    counters = consumer.counters
    assert counters["load_blocks"] == (len(prompts[-1]) - 1) // BLOCK_TOKENS
    assert "saves" not in counters


def test_mla_is_refused_where_vllm_does_not_go_on_behind_prefixes(daemon: DaemonProcess, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"deepseek has MLA.* run it without kvstore"):
        Engine(make_deepseek(tmp_path / "deepseek"), daemon.socket)


def test_latents_of_mla_from_the_store_are_to_the_bit_those_of_the_engines_own_cache(
    daemon: DaemonProcess, tmp_path: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM's own prefix caching, which it has for MLA elsewhere but not on CPUs, switched on here.

    Behind a prefix its backend for CPUs is off by far more than rounding: both kinds of hits are, in the same way.
    """
    update = CpuPlatform.check_and_update_config.__func__

    def keep_prefix_caching(platform: type[CpuPlatform], config: Any) -> None:
        update(platform, config)
        config.cache_config.enable_prefix_caching = config.scheduler_config.enable_chunked_prefill = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_prefix_caching))
    engine = start_engine(make_deepseek(tmp_path / "deepseek"), daemon.socket, block_size=16)
    n_blocks = 299 // 16
    # They end alike, so that what they say comes from their latents.
    asked = [PROMPT, tokens(n_blocks * 16, 32) + PROMPT[n_blocks * 16 :]]

    def says(prompt: Prompt) -> list[dict[int, float]]:
        (out,) = engine.sample([{"prompt_token_ids": prompt}], plain_sampling(logprobs=5))
        return logprobs_of(out)

    own, stored = [], []
    for prompt in asked:
        says(prompt)
        own.append(says(prompt))
        engine.forget_when_free()
    assert "load_blocks" not in engine.counters
    for prompt in asked:
        stored.append(says(prompt))
        engine.forget_when_free()
    assert stored == own
    assert own[0] != own[1]
    assert engine.counters["load_blocks"] == 2 * n_blocks
    assert not {"errors", "loads_failed", "saves_failed"} & engine.counters.keys()
