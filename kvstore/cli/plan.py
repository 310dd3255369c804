"""``kvstore plan``: what a cache of which size would save for a trace, before it is bought."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvstore.bench.generate import ConversationOptions
from kvstore.bench.kv_sizes import MODELS, attention_doubling_tokens, bytes_per_token
from kvstore.bench.plan import DEFAULT_PERCENTS, PlanOptions, make_plan
from kvstore.bench.plan_picture import draw_plan
from kvstore.bench.plan_report import plan_dict, plan_tables
from kvstore.bench.report import prepare, print_tables, progress_bar, save
from kvstore.cli.params import SIZE, FiniteRange, json_option, output_option
from kvstore.config import WRITE_POLICIES
from kvstore.errors import BadInputError
from kvstore.prefix_index.policies import POLICIES
from kvstore.recompute import LEAST_DOUBLING_TOKENS


@click.command("plan", short_help="What a cache of which size would save for a trace.")
@click.argument("trace", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(sorted(POLICIES)),
    help="Eviction policies to compare; may be given several times.  [default: all]",
)
@click.option(
    "--percent",
    "percents",
    multiple=True,
    type=float,
    help="Capacities to compare at, in % of the trace's unique blocks.  [default: 1, 2, 5, 10, 25, 50]",
)
@click.option("--capacity", "capacity_bytes", multiple=True, type=SIZE, help="The same as sizes, such as 64GiB.")
@click.option(
    "--model", help=f"Whose KV it is: gives the bytes per token. Its config.json, or one of {', '.join(MODELS)}."
)
@click.option("--bytes-per-token", "token_bytes", type=SIZE, help="Bytes of KV of a token, over all layers and ranks.")
@click.option(
    "--prefill-tokens-per-s",
    type=FiniteRange(min=0, min_open=True),
    default=None,
    help="What one GPU, or group of them, computes: says what time hits save.",
)
@click.option(
    "--attention-doubling-tokens",
    "doubling_tokens",
    type=FiniteRange(min=LEAST_DOUBLING_TOKENS),
    default=None,
    help="Position at which attention costs the model as much as all the rest of a token.  [default: the --model's]",
)
@click.option("--dram", "dram_bytes", type=SIZE, default=0, help="Simulate this much DRAM,")
@click.option("--nvme", "nvme_bytes", type=SIZE, default=0, help="and so much NVMe below it.")
@click.option(
    "--write-policy",
    type=click.Choice(WRITE_POLICIES),
    default="through",
    show_default=True,
    help="When blocks are written to NVMe.",
)
@click.option(
    "--textbook",
    is_flag=True,
    help="Run policies on single blocks, with no regard to prefixes, as published tables of hit ratios do.",
)
@click.option("--block-tokens", type=click.IntRange(1), help="Tokens per block.  [default: the trace's, else 512]")
@click.option("--limit", type=click.IntRange(1), help="Only the first N requests.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of generated requests.")
@click.option("--no-picture", is_flag=True, help="Draw no picture.")
@output_option
@json_option
def plan_command(
    trace: Path | None,
    policies: tuple[str, ...],
    percents: tuple[float, ...],
    capacity_bytes: tuple[int, ...],
    model: str | None,
    token_bytes: int | None,
    prefill_tokens_per_s: float | None,
    doubling_tokens: float | None,
    dram_bytes: int,
    nvme_bytes: int,
    write_policy: str,
    textbook: bool,
    block_tokens: int | None,
    limit: int | None,
    seed: int,
    no_picture: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Hit ratio over capacity for TRACE (Mooncake or Alibaba JSON lines), or for generated conversations.

    Compares eviction policies with the most that any could hit, and says how much prefill that saves. With a model or
    the bytes per token capacities are bytes.
    """
    if model is not None and token_bytes is not None:
        raise BadInputError("give --model or --bytes-per-token, not both")
    if percents and capacity_bytes:
        raise BadInputError("give --percent or --capacity, not both")
    if output is not None:
        prepare(output)
    conversations = ConversationOptions(seed=seed, **({"block_tokens": block_tokens} if block_tokens else {}))
    options = PlanOptions(
        trace=trace,
        conversations=conversations,
        policies=policies or tuple(POLICIES),
        percents=percents or DEFAULT_PERCENTS,
        capacity_bytes=capacity_bytes,
        bytes_per_token=bytes_per_token(model) if model is not None else token_bytes or 0,
        prefill_tokens_per_s=prefill_tokens_per_s or 0.0,
        attention_doubling_tokens=doubling_tokens or (attention_doubling_tokens(model) if model is not None else 0.0),
        dram_bytes=dram_bytes,
        nvme_bytes=nvme_bytes,
        write_policy=write_policy,
        textbook=textbook,
        block_tokens=block_tokens,
        limit=limit,
    )
    requests = options.load()
    with progress_bar("simulating", options.steps(requests)) as progress:
        plan = make_plan(requests, options, progress)
    if as_json:
        click.echo(json.dumps(plan_dict(plan), indent=2))
    else:
        print_tables(plan_tables(plan))
    if output is not None:
        plot = None if no_picture else lambda path: draw_plan(path, plan)
        for line in save(output, plan_dict(plan), plot):
            click.echo(line, err=True)
