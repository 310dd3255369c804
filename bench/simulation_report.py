"""A simulation at one capacity, with the curve over capacities around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore.bench.generate import TokenTrace
from kvstore.bench.replay import ReplayOptions, counts_dict
from kvstore.bench.simulate import DEFAULT_PERCENTS, HitCounts, Progress, SweepPoint, simulate, sweep
from kvstore.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """``counts`` at the capacities asked for, ``points`` of the curve of one tier.

    ``whole_block_counts`` and ``whole_block_points`` are a cache of whole blocks only, for workloads with
    token ids (None and empty for others, whose hits are whole blocks anyway).
    """

    name: str
    policy: str
    capacity_blocks: int
    unique_blocks: int
    counts: HitCounts
    points: tuple[SweepPoint, ...]
    whole_block_counts: HitCounts | None
    whole_block_points: tuple[SweepPoint, ...]
    nvme_capacity_blocks: int | None = None
    hbm_capacity_blocks: int | None = None
    write_policy: str = "through"

    def to_dict(self) -> dict[str, Any]:
        """One JSON-able object with the keys of a real replay; no byte was read."""
        whole = self.whole_block_counts
        tiers: dict[str, dict[str, Any]] = {}
        if self.hbm_capacity_blocks is not None:
            tiers["hbm"] = {"capacity_blocks": self.hbm_capacity_blocks, "block_hits": self.counts.hbm_block_hits}
        if self.nvme_capacity_blocks is not None or self.hbm_capacity_blocks is not None:
            tiers["dram"] = {"capacity_blocks": self.capacity_blocks, "block_hits": self.counts.dram_block_hits}
        if self.nvme_capacity_blocks is not None:
            tiers["nvme"] = {"capacity_blocks": self.nvme_capacity_blocks, "block_hits": self.counts.nvme_block_hits}
        return {
            "mode": "simulate",
            "trace": self.name,
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "nvme_capacity_blocks": self.nvme_capacity_blocks,
            "hbm_capacity_blocks": self.hbm_capacity_blocks,
            "write_policy": self.write_policy,
            "unique_blocks": self.unique_blocks,
            **counts_dict(self.counts),
            "mismatches": 0,
            "tiers": tiers,
            "whole_blocks_only": None if whole is None else counts_dict(whole),
            "curve": curve_dict(self.points),
        }


def curve_dict(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """A sweep, JSON-able."""
    return [
        {
            "capacity_percent": point.capacity_percent,
            "capacity_blocks": point.capacity_blocks,
            "block_hit_ratio": point.counts.block_hit_ratio,
            "token_hit_ratio": point.counts.token_hit_ratio,
            "any_hit_ratio": point.counts.any_hit_ratio,
        }
        for point in points
    ]


def run_simulation(
    workload: Workload,
    options: ReplayOptions,
    percents: Sequence[float] = DEFAULT_PERCENTS,
    progress: Progress | None = None,
) -> SimulationReport:
    """Simulate at the capacities of ``options`` and, DRAM alone, at ``percents``; ``progress`` counts over all runs."""
    capacity, policy = options.capacity(workload), options.policy
    nvme_blocks, write_policy = options.nvme_capacity(workload), options.write_policy
    hbm_blocks = options.hbm_capacity(workload)
    has_tokens = isinstance(workload, TokenTrace)
    whole: HitCounts | None = None
    whole_points: list[SweepPoint] = []
    run = partial(
        simulate, workload, policy, capacity, nvme_blocks, write_policy, hbm_blocks=hbm_blocks,
        attention_doubling_tokens=options.attention_doubling_tokens, progress=progress,
    )  # fmt: skip
    run_curve = partial(
        sweep, workload, policy, percents,
        attention_doubling_tokens=options.attention_doubling_tokens, progress=progress,
    )  # fmt: skip
    counts, points = run(), run_curve()
    if has_tokens:
        whole, whole_points = run(partial=False), run_curve(partial=False)
    return SimulationReport(
        name=workload.name,
        policy=policy,
        capacity_blocks=capacity,
        unique_blocks=workload.unique_blocks,
        counts=counts,
        points=tuple(points),
        whole_block_counts=whole,
        whole_block_points=tuple(whole_points),
        nvme_capacity_blocks=nvme_blocks,
        hbm_capacity_blocks=hbm_blocks,
        write_policy=write_policy,
    )


def simulation_steps(workload: Workload, percents: Sequence[float] = DEFAULT_PERCENTS) -> int:
    """How many requests ``run_simulation`` reports as progress in all."""
    return workload.n_requests * (1 + len(percents)) * (2 if isinstance(workload, TokenTrace) else 1)
