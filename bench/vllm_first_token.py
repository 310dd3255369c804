"""vLLM's time to the first token with a prefix that another process stored, and what a miss costs.

``python -m kvstore.bench.vllm_first_token --help`` has the options.

Engines in processes of their own with a real model on this machine's CPUs: one stores, one hits, one has no store. Both
sides of a pair run next to each other, in alternating order, on prompts that nobody has seen; ratios are medians over
pairs. The clock stops when the answer is there, CPU time (all threads of the engine's process) when all is stored.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
import numpy as np

from kvstore.bench.first_token import SUFFIX_TOKENS, Took, compared
from kvstore.bench.real_models import MODELS, prepared

ANSWER_S_MAX = 600.0
MISS_NEW_TOKENS = 8
KV_CACHE_BYTES = 1 << 30


class EngineProcess:
    """An engine, with the store if there is a socket. It starts at once; entering this as a context manager waits for
    it. Calls block."""

    def __init__(self, model: Path, socket: Path | None, settings: dict[str, Any]) -> None:
        spawn = mp.get_context("spawn")
        self._end, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, model, socket, settings), daemon=True)
        self._process.start()
        self.hit_tokens = 0
        """Of the last prompt, found in the store."""

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._end.send(None)
        self._process.join(ANSWER_S_MAX)
        self._process.kill()

    def generate(self, prompt: list[int], n_new: int) -> Took:
        """What it takes to say ``n_new`` tokens, with an empty cache of the engine's own."""
        self._end.send((prompt, n_new))
        wall_s, cpu_s, self.hit_tokens = self._answer()
        return Took(wall_s, cpu_s)

    def _answer(self) -> Any:
        if not self._end.poll(ANSWER_S_MAX):
            raise click.ClickException(f"an engine did not answer within {ANSWER_S_MAX} s")
        try:
            return self._end.recv()
        except EOFError:
            raise click.ClickException("an engine has ended; what it had to say is above") from None


def _serve(end: Connection, model: Path, socket: Path | None, settings: dict[str, Any]) -> None:
    from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine

    with Engine(model, socket, **settings) as engine:

        def loaded() -> int:
            return int(engine.counters.get("load_blocks", 0)) * BLOCK_TOKENS if socket is not None else 0

        end.send(None)
        while (asked := end.recv()) is not None:
            before = loaded()
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            engine.generate([asked[0]], asked[1])
            wall_s = time.perf_counter() - begin_s
            engine.drain()
            cpu_s = time.process_time() - begin_cpu_s
            engine.forget()
            end.send((wall_s, cpu_s, loaded() - before))


class Prompts:
    """Random token ids that nobody has seen: KV costs the same, whatever they say."""

    def __init__(self, model: Path, seed: int) -> None:
        self._n_ids = int(json.loads((model / "config.json").read_text())["vocab_size"])
        self._random = np.random.default_rng(seed)

    def tokens(self, n: int) -> list[int]:
        """``n`` of them."""
        return [int(each) for each in self._random.integers(10, self._n_ids, n)]


def measure_misses(
    stores: EngineProcess, plain: EngineProcess, prompts: Prompts, prompt_tokens: int, pairs: int
) -> dict[str, Any]:
    """A prompt that nothing is stored of, and 8 new tokens: looked up and stored, against no store."""

    def side(engine: EngineProcess) -> Callable[[], Took]:
        return lambda: engine.generate(prompts.tokens(prompt_tokens), MISS_NEW_TOKENS)

    for engine in (stores, plain):
        side(engine)()  # once for the caches of everything
    figures = compared(pairs, ("miss", side(stores)), ("no_store", side(plain)))
    return {"prompt_tokens": prompt_tokens, **figures}


def measure_hits(
    stores: EngineProcess, hits: EngineProcess, plain: EngineProcess, prompts: Prompts, prefix_tokens: int, pairs: int
) -> dict[str, Any]:
    """The first token after ``prefix_tokens`` that another process stored and 64 new ones, against no store."""
    prefix = prompts.tokens(prefix_tokens)
    stores.generate(prefix, 1)
    found: list[int] = []

    def hit() -> Took:
        took = hits.generate(prefix + prompts.tokens(SUFFIX_TOKENS), 1)
        found.append(hits.hit_tokens)
        return took

    def miss() -> Took:
        return plain.generate(prefix + prompts.tokens(SUFFIX_TOKENS), 1)

    figures = compared(pairs, ("hit", hit), ("no_store", miss))
    return {"prefix_tokens": prefix_tokens, "hit_tokens": min(found), **figures}


@click.command()
@click.option("--socket", type=click.Path(path_type=Path), required=True, help="The daemon's.")
@click.option("--model", type=click.Choice(sorted(MODELS)), default="smollm2", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--prefix", "prefixes", type=int, multiple=True, default=(2048,), show_default=True)
@click.option("--pairs", type=click.IntRange(0), default=5, show_default=True, help="For each length of a prefix.")
@click.option("--miss-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--miss-pairs", type=click.IntRange(0), default=21, show_default=True)
def main(
    socket: Path,
    model: str,
    dtype: str,
    prefixes: tuple[int, ...],
    pairs: int,
    miss_tokens: int,
    miss_pairs: int,
) -> None:
    """Measure, and print one line of JSON for each figure."""
    folder = prepared(model)
    longest = max((miss_tokens, *prefixes)) + SUFFIX_TOKENS + MISS_NEW_TOKENS
    settings = {
        "dtype": dtype,
        "max_model_len": longest,
        "max_num_batched_tokens": max(longest, 2048),
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
    }
    prompts = Prompts(folder, time.time_ns())
    with ExitStack() as stack:
        started = [EngineProcess(folder, place, settings) for place in (socket, None)]
        stores, plain = map(stack.enter_context, started)
        if miss_pairs:
            figures = measure_misses(stores, plain, prompts, miss_tokens, miss_pairs)
            click.echo(json.dumps({"what": "miss", "model": model, **figures}))
        if pairs:
            hits = stack.enter_context(EngineProcess(folder, socket, settings))
            for prefix_tokens in prefixes:
                figures = measure_hits(stores, hits, plain, prompts, prefix_tokens, pairs)
                click.echo(json.dumps({"what": "hit", "model": model, **figures}))


if __name__ == "__main__":
    main()
