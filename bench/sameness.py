"""Whether a real model says the same with stored KV as without.

``python -m kvstore.bench.sameness --help`` has the options; a daemon must run.

Prompts of real text that share beginnings go through ``KVStoreCache``. In float32 greedy tokens after a hit must be
those without a cache. In bfloat16 an engine's own results differ with the size of its chunks, so distances are
compared: of a hit, and of 256-token chunks, both to the prompt computed in one piece; and of a hit to the same
computation from the engine's own memory, which must be none. The controls have zeros stored instead: tokens must
differ, and distances be larger than a hit's.
"""

from __future__ import annotations

import copy
import json
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvstore.bench.real_models import MODELS, load
from kvstore.bench.zeros import put_zeros
from kvstore.client import Client
from kvstore.errors import BadInputError
from kvstore.types import Root

SHARED_TOKENS = 560
"""Longer than Gemma's window of 512, and it ends inside a block."""

CHUNK_TOKENS = 256
SUFFIX_TOKENS = 24
ZEROED = "zeros are stored instead"


class Subject:
    """A model, its text as token ids, and a client. Raises BadInputError for a text that is too short."""

    def __init__(self, name: str, dtype: str, client: Client) -> None:
        import torch

        self.torch = torch
        self.model, tokenizer = load(name, dtype)
        self.name, self.client = name, client
        topics = pydoc_data.topics.topics
        text = " ".join(topics[topic] for topic in ("for", "while", "try", "with", "class", "function"))
        self.text = tokenizer(text, return_tensors="pt").input_ids[0]
        if len(self.text) < 2 * SHARED_TOKENS:
            raise BadInputError(f"the text has {len(self.text)} tokens; {2 * SHARED_TOKENS} are needed")

    def prompt(self, i: int, n_shared: int, n_suffix: int) -> Any:
        """Token ids [1, n]: the text's beginning, then another place of it for each ``i``."""
        start = SHARED_TOKENS + i * 19 % (len(self.text) - SHARED_TOKENS - n_suffix)
        return self.torch.cat([self.text[:n_shared], self.text[start : start + n_suffix]])[None]

    def cache(self, ids: Any, **settings: Any) -> Any:
        """A cache of the store for a prompt."""
        from kvstore.engine_adapter.transformers import KVStoreCache

        return KVStoreCache.for_prompt(self.client, self.model, ids, **settings)

    def says(self, ids: Any, n_new: int, cache: Any = None) -> list[int]:
        """The next ``n_new`` tokens, greedily."""
        settings = {} if cache is None else {"past_key_values": cache}
        output = self.model.generate(
            ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=n_new, min_new_tokens=n_new,
            do_sample=False, pad_token_id=0, **settings,
        )  # fmt: skip
        said: list[int] = output[0, ids.shape[1] :].tolist()
        return said

    def logits(self, ids: Any, n_last: int, cache: Any) -> Any:
        """Float32 logits [n_last, vocabulary] of the last tokens, computed with and into ``cache``."""
        with self.torch.no_grad():
            return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=n_last).logits[0].float()


def same_tokens(subject: Subject, n_prompts: int, n_new: int) -> dict[str, Any]:
    """Greedy tokens with the store and without, of prompts that share 33 to 560 leading tokens."""
    lengths = [SHARED_TOKENS, 64, SHARED_TOKENS - 1, 63, 65, 128, 200, 33, 301, 129, 96, 160]
    n_hits = n_hit_tokens = n_tokens = n_same = n_control = 0
    for i in range(n_prompts):
        n_shared = lengths[i % len(lengths)]
        ids = subject.prompt(i, n_shared, 5 + i % 4)
        expected = subject.says(ids, n_new)
        cache = subject.cache(ids)
        if i and cache.n_hit_tokens < n_shared:
            raise click.ClickException(f"prompt {i} hit {cache.n_hit_tokens} of {n_shared} tokens: {cache.reason}")
        n_hits += cache.n_hit_tokens > 0
        n_hit_tokens += cache.n_hit_tokens
        n_tokens += ids.shape[1]
        n_same += subject.says(ids, n_new, cache) == expected
        cache.save()
        if i < len(lengths) // 3:
            n_control += subject.says(ids, n_new, with_zeros(subject, ids)) != expected
        click.echo(f"{subject.name} float32: {i + 1} of {n_prompts} prompts, {n_same} say the same", err=True)
    return {
        "prompts": n_prompts, "hits": n_hits, "hit_tokens": n_hit_tokens, "tokens": n_tokens, "same": n_same,
        "new_tokens": n_new, "controls": min(n_prompts, len(lengths) // 3), "controls_differ": n_control,
    }  # fmt: skip


def with_zeros(subject: Subject, ids: Any) -> Any:
    """A cache that hit all of a prompt but its last token, in zeros, under a salt of its own."""
    from kvstore.engine_adapter.transformers import namespace_of

    tokens = ids[0].numpy()
    put_zeros(subject.client, namespace_of(subject.model, tenant=subject.client.tenant), tokens, Root(salt=ZEROED))
    cache = subject.cache(ids, salt=ZEROED, save=False)
    if cache.n_hit_tokens != len(tokens) - 1:
        raise click.ClickException(f"the control hit {cache.n_hit_tokens} of {len(tokens) - 1} tokens: {cache.reason}")
    return cache


def distances(subject: Subject, n_prompts: int) -> dict[str, Any]:
    """Mean KL of next-token distributions over the last 24 tokens of prompts that share 560.

    ``kl_zeros``, the control, is of the last token of the last prompt.
    """
    from transformers import DynamicCache

    prefix = subject.text[None, :SHARED_TOKENS]
    first = subject.cache(prefix)
    subject.logits(prefix, 1, first)
    first.save()
    chunks = DynamicCache(config=subject.model.config)
    n_chunked = SHARED_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
    for chunk in prefix[:, :n_chunked].split(CHUNK_TOKENS, dim=1):
        subject.logits(chunk, 1, chunks)
    of_chunks, of_hits, of_the_same = [], [], []
    for i in range(n_prompts):
        ids = subject.prompt(i, SHARED_TOKENS, SUFFIX_TOKENS)
        at_once = subject.logits(ids, SUFFIX_TOKENS, None)
        chunked = subject.logits(ids[:, n_chunked:], SUFFIX_TOKENS, copy.deepcopy(chunks))
        split = subject.logits(ids[:, SHARED_TOKENS:], SUFFIX_TOKENS, copy.deepcopy(first))
        cache = subject.cache(ids, save=False)
        if cache.n_hit_tokens != SHARED_TOKENS:
            raise click.ClickException(f"{cache.n_hit_tokens} of {SHARED_TOKENS} tokens hit: {cache.reason}")
        hit = subject.logits(ids[:, SHARED_TOKENS:], SUFFIX_TOKENS, cache)
        of_chunks.append(divergence(at_once, chunked))
        of_hits.append(divergence(at_once, hit))
        of_the_same.append(float((hit - split).abs().max()))
        click.echo(f"{subject.name} bfloat16: {i + 1} of {n_prompts} prompts", err=True)
    zeros = subject.logits(ids[:, -1:], 1, with_zeros(subject, ids))
    return {
        "prompts": n_prompts, "kl_chunks": _mean(of_chunks), "kl_hit": _mean(of_hits),
        "kl_zeros": _mean([divergence(at_once[-1:], zeros)]),
        "max_logit_difference_to_same_split": max(of_the_same),
    }  # fmt: skip


def divergence(expected: Any, given: Any) -> float:
    """Mean KL of ``given`` from ``expected``, logits [tokens, vocabulary] both."""
    p, q = expected.log_softmax(-1), given.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def _mean(values: Sequence[float]) -> float:
    return float(f"{np.mean(values):.3g}")


@click.command()
@click.option("--socket", type=click.Path(path_type=Path), help="The daemon's.  [default: the usual one]")
@click.option("--model", "names", type=click.Choice(sorted(MODELS)), multiple=True, default=sorted(MODELS))
@click.option("--prompts", type=click.IntRange(1), default=24, show_default=True, help="In float32.")
@click.option("--new-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--noise-prompts", type=click.IntRange(0), default=8, show_default=True, help="In bfloat16.")
@click.option("--output", type=click.Path(path_type=Path), help="A JSON file for the figures.")
def main(
    socket: Path | None, names: Sequence[str], prompts: int, new_tokens: int, noise_prompts: int, output: Path | None
) -> None:
    """Compare, and print a table (how far it is: to stderr); exits with 3 if anything differs that must not, or a
    control does not."""
    rows = []
    with Client(socket, timeout_s=30.0) as client:
        for name in names:
            row: dict[str, Any] = {"model": name}
            row["float32"] = same_tokens(Subject(name, "float32", client), prompts, new_tokens)
            if noise_prompts:
                row["bfloat16"] = distances(Subject(name, "bfloat16", client), noise_prompts)
            rows.append(row)
    click.echo(
        "| model | same tokens | hits | tokens found | controls differ | KL chunks | hits | zeros | same split |"
    )
    click.echo("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        click.echo(_table_row(row))
    if output is not None:
        output.write_text(json.dumps(rows, indent=1) + "\n")
    if not all(map(holds, rows)):
        raise SystemExit(3)


def holds(row: dict[str, Any]) -> bool:
    """Whether a row of the report says what it must."""
    exact, noisy = row["float32"], row.get("bfloat16")
    exactly = exact["same"] == exact["prompts"] and exact["controls_differ"] == exact["controls"]
    return exactly and (
        noisy is None or (noisy["max_logit_difference_to_same_split"] == 0 and noisy["kl_hit"] < noisy["kl_zeros"])
    )


def _table_row(row: dict[str, Any]) -> str:
    exact, noisy = row["float32"], row.get("bfloat16", {})
    return (
        f"| {row['model']} | {exact['same']} of {exact['prompts']} | {exact['hits']} | {exact['hit_tokens']} of "
        f"{exact['tokens']} | {exact['controls_differ']} of {exact['controls']} | {noisy.get('kl_chunks', '')} | "
        f"{noisy.get('kl_hit', '')} | {noisy.get('kl_zeros', '')} | "
        f"{noisy.get('max_logit_difference_to_same_split', '')} |"
    )


if __name__ == "__main__":
    main()
