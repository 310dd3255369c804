"""Time to the first token with a stored prefix and without, and what a miss costs.

``python -m kvstore.bench.first_token --help`` has the options.

Real models on this machine's CPUs with transformers. Both sides of a pair run next to each other, in alternating order,
on prompts that end differently each time; ratios are medians over pairs. A hit's time begins before the store is asked,
and ends, as a miss's, when all that was computed is stored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from kvstore.bench.measure import paired
from kvstore.bench.real_models import MODELS, load
from kvstore.client import Client

SUFFIX_TOKENS = 64


class Took(NamedTuple):
    """Seconds on the clock, and of all cores for this process: those don't depend on what else runs here."""

    wall_s: float
    cpu_s: float


class Rig:
    """A model, a client, and prompts that nobody has seen."""

    def __init__(self, model: Any, client: Client, seed: int) -> None:
        import torch

        self.torch = torch
        self.model, self.client = model, client
        self._random = np.random.default_rng(seed)

    def tokens(self, n: int) -> Any:
        """Random token ids [n]: KV costs the same, whatever they say."""
        return self.torch.from_numpy(self._random.integers(10, self.model.config.vocab_size, n))

    def generate(self, ids: Any, n_new: int, stored: bool) -> tuple[Took, Any]:
        """How long it takes until ``n_new`` tokens are there, and the cache."""
        from kvstore.engine_adapter.transformers import KVStoreCache

        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        cache = KVStoreCache.for_prompt(self.client, self.model, ids) if stored else None
        settings = {"past_key_values": cache} if cache is not None else {}
        # All answers have the same length: no token ends one.
        self.model.generate(
            ids, max_new_tokens=n_new, min_new_tokens=n_new, do_sample=False, pad_token_id=0, **settings
        )
        if cache is not None:
            cache.save()
        return Took(time.perf_counter() - begin_s, time.process_time() - begin_cpu_s), cache


def measure_hits(rig: Rig, prefix_tokens: int, pairs: int) -> dict[str, Any]:
    """Time to the first token after ``prefix_tokens`` stored ones and 64 new ones, against no cache."""
    prefix = rig.tokens(prefix_tokens)
    rig.generate(prefix[None], 1, stored=True)
    hits: list[int] = []

    def prompt() -> Any:
        return rig.torch.cat([prefix, rig.tokens(SUFFIX_TOKENS)])[None]

    def hit() -> Took:
        took, cache = rig.generate(prompt(), 1, stored=True)
        hits.append(cache.n_hit_tokens)
        return took

    figures = compared(pairs, ("hit", hit), ("no_cache", lambda: rig.generate(prompt(), 1, stored=False)[0]))
    if min(hits) < prefix_tokens:
        raise click.ClickException(f"only {min(hits)} of {prefix_tokens} tokens hit: is the daemon's --dram too small?")
    return {"prefix_tokens": prefix_tokens, **figures}


def measure_misses(rig: Rig, prompt_tokens: int, new_tokens: int, pairs: int) -> dict[str, Any]:
    """A prompt that nothing is stored of, and ``new_tokens`` more: looked up and stored, against no cache."""

    def side(stored: bool) -> Callable[[], Took]:
        return lambda: rig.generate(rig.tokens(prompt_tokens)[None], new_tokens, stored=stored)[0]

    for each in (side(True), side(False)):
        each()  # once for the caches of everything
    figures = compared(pairs, ("miss", side(True)), ("no_cache", side(False)))
    return {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, **figures}


def compared(pairs: int, left: tuple[str, Callable[[], Took]], right: tuple[str, Callable[[], Took]]) -> dict[str, Any]:
    """Medians of both sides in seconds, and of the pairs' ratios with their 95 % interval (bootstrap)."""
    took: dict[str, list[Took]] = {left[0]: [], right[0]: []}

    def timed(name: str, function: Callable[[], Took]) -> Callable[[int], float]:
        def run(_: int) -> float:
            took[name].append(function())
            return took[name][-1].wall_s

        return run

    paired(pairs, timed(*left), timed(*right))
    times = np.array([took[left[0]], took[right[0]]])  # [side, pair, wall and cpu]
    ratios = times[0] / times[1]
    picked = np.random.default_rng(0).integers(0, pairs, (2000, pairs))
    low, high = np.percentile(np.median(ratios[picked], axis=1), [2.5, 97.5], axis=0)
    wall, cpu = np.median(ratios, axis=0)
    return {
        f"{left[0]}_s": round(float(np.median(times[0, :, 0])), 3),
        f"{right[0]}_s": round(float(np.median(times[1, :, 0])), 3),
        "ratio": round(float(wall), 4),
        "ratio_95": [round(float(low[0]), 4), round(float(high[0]), 4)],
        "cpu_ratio": round(float(cpu), 4),
        "cpu_ratio_95": [round(float(low[1]), 4), round(float(high[1]), 4)],
        "pairs": pairs,
    }


@click.command()
@click.option("--socket", type=click.Path(path_type=Path), help="The daemon's.  [default: the usual one]")
@click.option("--model", type=click.Choice(sorted(MODELS)), default="smollm2", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--prefix", "prefixes", type=int, multiple=True, default=(2048, 8128), show_default=True)
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True, help="For each length of a prefix.")
@click.option("--miss-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--miss-new-tokens", type=click.IntRange(1), default=8, show_default=True, help="Computed after those.")
@click.option("--miss-pairs", type=click.IntRange(0), default=21, show_default=True)
def main(
    socket: Path | None,
    model: str,
    dtype: str,
    prefixes: tuple[int, ...],
    pairs: int,
    miss_tokens: int,
    miss_new_tokens: int,
    miss_pairs: int,
) -> None:
    """Measure, and print one line of JSON for each figure."""
    with Client(socket, timeout_s=10.0) as client:
        rig = Rig(load(model, dtype)[0], client, time.time_ns())
        if miss_pairs:
            click.echo(json.dumps({"what": "miss", **measure_misses(rig, miss_tokens, miss_new_tokens, miss_pairs)}))
        for prefix_tokens in prefixes:
            click.echo(json.dumps({"what": "hit", **measure_hits(rig, prefix_tokens, pairs)}))


if __name__ == "__main__":
    main()
