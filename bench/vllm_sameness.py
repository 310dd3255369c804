"""Whether vLLM says the same after hits as without the store, with a real model.

``python -m kvstore.bench.vllm_sameness --help`` has the options.

float32: greedy tokens of prompts that share beginnings, served together, must be identical. bfloat16: what the model
says next must be no further from what one pass says than what vLLM itself says when it computes the prompt in chunks.
The control: with zeros in place of the stored bytes the tokens are others.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from kvstore.bench.real_models import MODELS, prepared
from kvstore.bench.zeros import put_zeros
from kvstore.client import Client

N_HEADS = 3
CHUNK_TOKENS = 64

LogProbs = NDArray[np.float32]


def make_prompts(folder: Path, n: int, longest_tokens: int) -> list[list[int]]:
    """Prompts of English text: beginnings of different lengths of three texts, and an end of each one's own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    pages = sorted(topics.values(), key=len)
    heads = [tokenizer.encode(text)[:longest_tokens] for text in pages[-N_HEADS:]]
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    prompts = []
    for i in range(n):
        part = longest_tokens * (i // N_HEADS + 1) * N_HEADS // n
        own = tokenizer.encode(pages[i], add_special_tokens=False)[:24]
        prompts.append(begin + heads[i % N_HEADS][len(begin) : part] + own)
    return prompts


def zero_what_is_stored(client: Client, model: str, prompts: list[list[int]]) -> None:
    """Zeros in place of all that is stored of a model, for the whole blocks of these prompts."""
    (found,) = client.namespaces(model=model)
    namespace = found.namespace
    if namespace is None:
        raise click.ClickException("the daemon does not know what the engine's namespace is")
    client.clear(digest_prefix=found.digest.hex())
    for prompt in prompts:
        n = len(prompt) // namespace.spec.block_tokens
        put_zeros(client, namespace, prompt[: n * namespace.spec.block_tokens])


def float32_tokens(folder: Path, socket: Path, prompts: list[list[int]], n_new: int, model: str) -> dict[str, Any]:
    """Tokens without the store, while it is filled, after hits, and after hits of zeros."""
    from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine

    with Engine(folder) as engine:
        plain = engine.generate(prompts, n_new)
    with Engine(folder, socket, {"model": model}) as engine:
        stored = engine.generate(prompts, n_new)
        before = engine.counters.get("load_blocks", 0)
        one_by_one = []
        for prompt in prompts:
            engine.forget_when_free()
            one_by_one += engine.generate([prompt], n_new)
        loaded = engine.counters.get("load_blocks", 0) - before
        engine.forget_when_free()
        together = engine.generate(prompts, n_new)
        counters = engine.counters
        engine.forget_when_free()
        with Client(socket, timeout_s=10.0) as client:
            zero_what_is_stored(client, model, prompts)
        zeroed = engine.generate(prompts, n_new)
    return {
        "dtype": "float32",
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": n_new,
        "hit_blocks": int(loaded),
        "whole_blocks": sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in prompts),
        "same_while_stored": _n_same(plain, stored),
        "same_after_hits": _n_same(plain, one_by_one),
        "same_after_hits_together": _n_same(plain, together),
        "same_with_zeros": _n_same(plain, zeroed),
        "failed": int(sum(counters.get(name, 0) for name in ("errors", "loads_failed", "saves_failed"))),
    }


def bfloat16_distances(folder: Path, socket: Path, prompts: list[list[int]], model: str) -> dict[str, Any]:
    """How far the next token's distribution is from one pass's: after chunks of the engine, after hits in its own
    prefix cache, and after hits in the store, which should be those of its own to the last bit."""
    from kvstore.bench.vllm_engine import Engine

    alone: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 1, "max_logprobs": -1}
    with Engine(folder, **alone, enable_prefix_caching=False) as engine:
        one_pass = next_token(engine, prompts)
    with Engine(folder, **alone, max_num_batched_tokens=CHUNK_TOKENS, enable_prefix_caching=False) as engine:
        chunked = next_token(engine, prompts)
    with Engine(folder, **alone) as engine:
        engine.generate(prompts, 1)
        own_hits = next_token(engine, prompts, forgetting=False)
    with Engine(folder, socket, {"model": model}, **alone) as engine:
        engine.generate(prompts, 1)
        engine.forget_when_free()
        before = engine.counters.get("load_blocks", 0)
        hits = next_token(engine, prompts)
        loaded = engine.counters["load_blocks"] - before
    return {
        "dtype": "bfloat16",
        "prompts": len(prompts),
        "hit_blocks": int(loaded),
        "chunked": distance(one_pass, chunked),
        "after_own_hits": distance(one_pass, own_hits),
        "after_hits": distance(one_pass, hits),
        "after_hits_from_own": distance(own_hits, hits),
    }


def next_token(engine: Any, prompts: list[list[int]], *, forgetting: bool = True) -> LogProbs:
    """Log probabilities of all tokens as the first one after each prompt, float32 [prompts, tokens]; one at a time.

    ``forgetting``: the engine's own prefix cache is emptied after each.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    rows = []
    for prompt in prompts:
        (out,) = engine.sample([{"prompt_token_ids": prompt}], sampling)
        (said,) = out.outputs[0].logprobs
        row = np.empty(len(said), np.float32)
        row[list(said)] = [each.logprob for each in said.values()]
        rows.append(row)
        if forgetting:
            engine.forget_when_free()
    return np.stack(rows)


def distance(reference: LogProbs, other: LogProbs) -> dict[str, float]:
    """Kullback-Leibler divergence from ``reference`` (mean, most), change of the most likely token's log probability
    (mean, most), and how many prompts are followed by another token."""
    sure = reference.astype(np.float64)
    kl = (np.exp(sure) * (sure - other)).sum(axis=1)
    best = sure.argmax(axis=1)[:, None]
    change = np.abs(np.take_along_axis(sure - other, best, axis=1))
    return {
        "kl_mean": float(f"{kl.mean():.3g}"),
        "kl_max": float(f"{kl.max():.3g}"),
        "logprob_mean": float(f"{change.mean():.3g}"),
        "logprob_max": float(f"{change.max():.3g}"),
        "flips": int((other.argmax(axis=1)[:, None] != best).sum()),
    }


def _n_same(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


@click.command()
@click.option("--socket", type=click.Path(path_type=Path), required=True, help="The daemon's.")
@click.option("--model", type=click.Choice(sorted(MODELS)), default="smollm2", show_default=True)
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(["float32", "bfloat16"]), default=("float32", "bfloat16")
)
@click.option("--prompts", "n_prompts", type=click.IntRange(N_HEADS), default=24, show_default=True)
@click.option("--longest", "longest_tokens", type=click.IntRange(1), default=640, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=16, show_default=True)
def main(
    socket: Path, model: str, dtypes: tuple[str, ...], n_prompts: int, longest_tokens: int, new_tokens: int
) -> None:
    """Compare, and print one line of JSON for each number format. Exit code 3 if the tokens are not the same.

    What is stored meanwhile is the run's own, and cleared at its end.
    """
    folder = prepared(model)
    prompts = make_prompts(folder, n_prompts, longest_tokens)
    own = f"sameness of {model} {uuid.uuid4().hex}"
    wrong = False
    with Client(socket, timeout_s=10.0) as client:
        try:
            for dtype in dtypes:
                if dtype == "float32":
                    figures = float32_tokens(folder, socket, prompts, new_tokens, own)
                    same = [figures[f"same_{when}"] for when in ("while_stored", "after_hits", "after_hits_together")]
                    wrong |= min(same) < len(prompts) or figures["same_with_zeros"] == len(prompts)
                else:
                    figures = bfloat16_distances(folder, socket, prompts, own)
                click.echo(json.dumps({"model": model, **figures}))
        finally:
            client.clear(model=own)
    if wrong:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
