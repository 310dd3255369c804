"""How much a cache of what size would save for a trace: hit ratio over capacity, for policies and for the optimum.

LRU comes from stack distances, for every capacity at once; OPT is computed per capacity in time; every other policy is
simulated on the index. Hits are of whole blocks, so that all are counted alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.bench.generate import ConversationOptions, TokenTrace, generate_trace
from kvstore.bench.lru_curve import LruCurve
from kvstore.bench.opt import OptimalPolicy
from kvstore.bench.simulate import HitCounts, Progress, simulate
from kvstore.bench.textbook import simulate_textbook
from kvstore.bench.trace import Trace, load_trace
from kvstore.bench.workload import capacity_blocks
from kvstore.config import WRITE_POLICIES, format_size
from kvstore.errors import BadInputError
from kvstore.prefix_index.policies import POLICIES
from kvstore.recompute import checked_doubling_tokens

OPT = "opt"
DEFAULT_PERCENTS = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0)
CURVE_POINTS = 40
"""Capacities of the curves that cost nothing: LRU's and OPT's."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What to plan for. Without ``trace`` conversations are generated.

    ``capacities`` are those at which policies are compared: shares of the unique blocks in percent, or, with
    ``capacity_bytes``, sizes. ``bytes_per_token``: KV of a token over all layers and ranks, 0 if unknown; then nothing
    is said, or can be asked, in bytes. ``prefill_tokens_per_s``: what one GPU, or group of them, computes; 0: unknown.
    ``attention_doubling_tokens``: of the model (``kvstore.recompute``), 0 if unknown: late tokens cost more to compute.
    ``dram_bytes`` and ``nvme_bytes``: two tiers to be simulated together, 0 for none. ``textbook``: compare policies as
    the literature runs them, on single blocks.
    """

    trace: Path | None = None
    conversations: ConversationOptions = field(default_factory=ConversationOptions)
    policies: tuple[str, ...] = tuple(POLICIES)
    percents: tuple[float, ...] = DEFAULT_PERCENTS
    capacity_bytes: tuple[int, ...] = ()
    bytes_per_token: int = 0
    prefill_tokens_per_s: float = 0.0
    attention_doubling_tokens: float = 0.0
    dram_bytes: int = 0
    nvme_bytes: int = 0
    write_policy: str = "through"
    textbook: bool = False
    block_tokens: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.policies if name not in POLICIES]
        if unknown or not self.policies:
            raise BadInputError(f"policy is {', '.join(unknown)!r}; known are {', '.join(sorted(POLICIES))}")
        for percent in self.percents:
            capacity_blocks(1, percent, "--percent")
        if self.bytes_per_token < 0 or not 0 <= self.prefill_tokens_per_s < math.inf:
            raise BadInputError("bytes per token and prefill tokens per second can't be negative")
        checked_doubling_tokens(self.attention_doubling_tokens)
        if not self.bytes_per_token and (self.capacity_bytes or self.dram_bytes or self.nvme_bytes):
            raise BadInputError("capacities in bytes need --model or --bytes-per-token: how large a token's KV is")
        if self.nvme_bytes and not self.dram_bytes:
            raise BadInputError("--nvme is a tier below DRAM: give --dram, too")
        if self.write_policy not in WRITE_POLICIES:
            raise BadInputError(f"write_policy is {self.write_policy!r}; known are {', '.join(WRITE_POLICIES)}")

    def load(self) -> Trace:
        """Read or generate the requests, as whole blocks. Raises TraceError for a file that can't be used."""
        if self.trace is not None:
            return load_trace(self.trace, self.limit, self.block_tokens)
        generated: TokenTrace = generate_trace(self.conversations, self.limit)
        return generated.block_view

    def blocks(self, trace: Trace, n_bytes: int) -> int:
        """How many blocks of the trace fit in so many bytes. Raises BadInputError if not one does."""
        block_bytes = self.bytes_per_token * trace.block_tokens
        if n_bytes < block_bytes:
            raise BadInputError(
                f"{format_size(n_bytes)} can't hold one block: {trace.block_tokens} tokens of "
                f"{format_size(self.bytes_per_token)} are {format_size(block_bytes)}; give more"
            )
        return n_bytes // block_bytes

    def capacities(self, trace: Trace) -> list[int]:
        """Where policies are compared, in blocks, ascending; none beyond what the trace names."""
        if self.capacity_bytes:
            blocks = [self.blocks(trace, n_bytes) for n_bytes in self.capacity_bytes]
        else:
            blocks = [capacity_blocks(trace.unique_blocks, percent) for percent in self.percents]
        return sorted({min(each, max(trace.unique_blocks, 1)) for each in blocks})

    def steps(self, trace: Trace) -> int:
        """How many requests ``make_plan`` reports as progress in all."""
        n_policies = sum(name != "lru" for name in self.policies)
        n_tiers = len(self.policies) if self.dram_bytes else 0
        return trace.n_requests * (n_policies * len(self.capacities(trace)) + n_tiers)


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """What one capacity gives."""

    capacity_blocks: int
    counts: HitCounts


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy over capacities, ascending."""

    policy: str
    points: tuple[PlanPoint, ...]


@dataclass(frozen=True, slots=True)
class TwoTiers:
    """One policy with DRAM and, below it, NVMe; ``nvme_blocks`` is 0 where there is DRAM only."""

    policy: str
    dram_blocks: int
    nvme_blocks: int
    counts: HitCounts


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``make_plan`` finds. ``compared``: all policies and OPT at the capacities asked for; ``smooth``: LRU and OPT
    at many. ``span_s``: from the first request of the trace to its last."""

    name: str
    options: PlanOptions
    block_tokens: int
    unique_blocks: int
    span_s: float
    unlimited: HitCounts
    compared: tuple[Curve, ...]
    smooth: tuple[Curve, ...]
    tiers: tuple[TwoTiers, ...]


def make_plan(trace: Trace, options: PlanOptions, progress: Progress | None = None) -> Plan:
    """Plan for a trace; ``progress`` is called with the number of simulated requests since the last call."""
    told = options.attention_doubling_tokens
    lru, opt = LruCurve(trace, told), OptimalPolicy(trace, told)
    capacities = options.capacities(trace)
    run = simulate_textbook if options.textbook else simulate
    compared = []
    for policy in options.policies:
        points = [
            PlanPoint(
                blocks,
                lru.hits(blocks)
                if policy == "lru"
                else run(trace, policy, blocks, attention_doubling_tokens=told, progress=progress),
            )
            for blocks in capacities
        ]
        compared.append(Curve(policy, tuple(points)))
    compared.append(Curve(OPT, tuple(PlanPoint(blocks, opt.hits(blocks)) for blocks in capacities)))
    many = _spread(trace.unique_blocks)
    smooth = (
        Curve("lru", tuple(PlanPoint(blocks, lru.hits(blocks)) for blocks in many)),
        Curve(OPT, tuple(PlanPoint(blocks, opt.hits(blocks)) for blocks in many)),
    )
    times = [request.timestamp_s for request in trace.requests]
    return Plan(
        name=trace.name,
        options=options,
        block_tokens=trace.block_tokens,
        unique_blocks=trace.unique_blocks,
        span_s=max(times) - min(times),
        unlimited=lru.hits(trace.unique_blocks),
        compared=tuple(compared),
        smooth=smooth,
        tiers=tuple(_two_tiers(trace, options, progress)) if options.dram_bytes else (),
    )


def _two_tiers(trace: Trace, options: PlanOptions, progress: Progress | None) -> list[TwoTiers]:
    dram = options.blocks(trace, options.dram_bytes)
    nvme = options.blocks(trace, options.nvme_bytes) if options.nvme_bytes else None
    told, write_policy = options.attention_doubling_tokens, options.write_policy
    return [
        TwoTiers(
            policy, dram, nvme or 0,
            simulate(trace, policy, dram, nvme, write_policy, attention_doubling_tokens=told, progress=progress),
        )
        for policy in options.policies
    ]  # fmt: skip


def _spread(most: int) -> Sequence[int]:
    """Capacities up to ``most`` in equal ratios, from a thousandth on."""
    least = max(1, most // 1000)
    ratios = (i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS))
    return sorted({max(1, round(least * (max(most, 1) / least) ** ratio)) for ratio in ratios})
