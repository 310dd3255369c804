"""A real vLLM engine in this process, scheduler and worker together, with or without the store.

For tests and measurements with vLLM for CPUs; docs/engines/vllm.md says how it is installed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Before vLLM is imported, unless the caller says otherwise. In one process an engine starts in seconds; with more
# threads it fights itself on busy cores.
os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
    }
)

from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.lora.request import LoRARequest

from kvstore.engine_adapter.vllm import KVStoreConnector

BLOCK_TOKENS = 32
KV_CACHE_BYTES = 256 << 20
"""Room for a few thousand tokens of a small model, so that several engines fit into a machine."""

Prompt = list[int]


class Engine:
    """One engine at a time. ``options`` and ``role``: of the connector; without a socket there is no connector."""

    def __init__(
        self,
        model: Path,
        socket: Path | None = None,
        options: dict[str, Any] | None = None,
        role: str = "kv_both",
        **settings: Any,
    ) -> None:
        transfer = None if socket is None else transfer_config(socket, options or {}, role)
        self.llm = LLM(
            str(model),
            **{
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "dtype": "float32",
                "block_size": BLOCK_TOKENS,
                "max_model_len": 2048,
                "kv_cache_memory_bytes": KV_CACHE_BYTES,
                "disable_log_stats": False,
                "kv_transfer_config": transfer,
                **settings,
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def core(self) -> Any:
        """The engine's inner loop and all that hangs on it."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler_connector(self) -> KVStoreConnector:
        """The connector as the scheduler has it."""
        connector = self.core.scheduler.connector
        assert isinstance(connector, KVStoreConnector)  # noqa: S101 - there was a socket
        return connector

    @property
    def worker_connector(self) -> KVStoreConnector:
        """The connector as the worker has it."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, KVStoreConnector)  # noqa: S101 - there was a socket
        return connector

    @property
    def counters(self) -> dict[str, float]:
        """What both sides of the connector have counted, by name."""
        both: dict[str, float] = {}
        for connector in (self.scheduler_connector, self.worker_connector):
            for name, amount in connector.counted().items():
                both[name] = both.get(name, 0) + amount
        return both

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that only the store can give hits."""
        assert self.llm.reset_prefix_cache()  # noqa: S101 - it is idle

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int = 12,
        *,
        salt: str | None = None,
        lora: LoRARequest | None = None,
        more: dict[str, Any] | None = None,
    ) -> list[list[int]]:
        """Greedy tokens for each prompt. ``more`` is what else each prompt says."""
        more = {**(more or {}), **({"cache_salt": salt} if salt else {})}
        given = [{"prompt_token_ids": prompt, **more} for prompt in prompts]
        out = self.sample(given, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False), lora)
        return [list(each.outputs[0].token_ids) for each in out]

    def complete(self, texts: Sequence[str], n: int = 12) -> list[str]:
        """The greedy answers to texts; the model needs a tokenizer, the engine ``skip_tokenizer_init=False``."""
        out = self.sample([*texts], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
        return [str(each.outputs[0].text) for each in out]

    def sample(
        self, prompts: Sequence[Any], sampling: SamplingParams, lora: LoRARequest | None = None
    ) -> list[RequestOutput]:
        """What the engine gives for prompts as it takes them."""
        out: list[RequestOutput] = self.llm.generate([*prompts], sampling, use_tqdm=False, lora_request=lora)
        assert all(each.finished for each in out)  # noqa: S101 - the engine's promise
        return out

    def drain(self) -> None:
        """Step until saves that are under way have been reported."""
        while self.core.scheduler.has_requests():
            self.core.step_fn()

    def forget_when_free(self) -> None:
        """``drain`` and ``forget``, also where reports of saves may have been lost."""
        self.drain()
        self.forget()

    def close(self) -> None:
        """End the engine, so that another can begin."""
        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self.llm
        gc.collect()


def transfer_config(socket: Path, options: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """``--kv-transfer-config``. Deadlines are wide, as several engines may share two cores."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.engine_adapter.vllm",
        "kv_role": role,
        "kv_connector_extra_config": {
            "socket": str(socket),
            "lookup_timeout_s": 2.0,
            "transfer_timeout_s": 5.0,
            "load_timeout_s": 30.0,
            **options,
        },
    }
