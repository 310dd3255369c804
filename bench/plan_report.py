"""A plan as tables for people and as one JSON object."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from kvstore.bench.plan import Plan, PlanPoint
from kvstore.bench.simulate import HitCounts
from kvstore.config import format_size


def plan_dict(plan: Plan) -> dict[str, Any]:
    """JSON-able. Sizes are null without bytes per token, times without a prefill rate."""
    return {
        "trace": plan.name,
        "requests": plan.unlimited.requests,
        "span_s": plan.span_s,
        "block_tokens": plan.block_tokens,
        "unique_blocks": plan.unique_blocks,
        "block_accesses": plan.unlimited.block_accesses,
        "prompt_tokens": plan.unlimited.token_accesses,
        "bytes_per_token": plan.options.bytes_per_token or None,
        "prefill_tokens_per_s": plan.options.prefill_tokens_per_s or None,
        "attention_doubling_tokens": plan.options.attention_doubling_tokens or None,
        "unlimited": _savings(plan, plan.unlimited),
        "textbook": plan.options.textbook,
        "policies": {curve.policy: [_point(plan, point) for point in curve.points] for curve in plan.compared},
        "curves": {curve.policy: [_point(plan, point) for point in curve.points] for curve in plan.smooth},
        "tiers": [
            {
                "policy": each.policy,
                "write_policy": plan.options.write_policy,
                "dram_blocks": each.dram_blocks,
                "nvme_blocks": each.nvme_blocks,
                "dram_block_hits": each.counts.dram_block_hits,
                "nvme_block_hits": each.counts.nvme_block_hits,
                **_savings(plan, each.counts),
            }
            for each in plan.tiers
        ],
    }


def plan_tables(plan: Plan) -> list[Table]:
    """What the trace is, hit ratios of all policies over capacities, what they save, the tiers asked for."""
    tables = [_facts(plan), _ratios(plan, "token"), _ratios(plan, "block")]
    if plan.options.prefill_tokens_per_s:
        tables.append(_saved(plan))
    if plan.tiers:
        tables.append(_tiers(plan))
    return tables


def capacity_label(plan: Plan, blocks: int) -> str:
    """A capacity as bytes if they are known, and as a share of the unique blocks."""
    share = f"{100 * blocks / max(plan.unique_blocks, 1):.3g}%"
    size = capacity_bytes(plan, blocks)
    return f"{blocks:,} blocks ({share})" if size is None else f"{format_size(size)} ({share})"


def capacity_bytes(plan: Plan, blocks: int) -> int | None:
    """Bytes of KV of so many blocks; None if a token's are unknown."""
    return blocks * plan.block_tokens * plan.options.bytes_per_token or None


def _savings(plan: Plan, counts: HitCounts) -> dict[str, float | None]:
    rate = plan.options.prefill_tokens_per_s
    return {
        "block_hit_ratio": counts.block_hit_ratio,
        "token_hit_ratio": counts.token_hit_ratio,
        "any_hit_ratio": counts.any_hit_ratio,
        "prefill_tokens_saved": counts.token_hits,
        "prefill_saved_ratio": counts.prefill_saved_ratio,
        "gpu_s_saved": counts.prefill_saved / rate if rate else None,
    }


def _point(plan: Plan, point: PlanPoint) -> dict[str, Any]:
    return {
        "capacity_blocks": point.capacity_blocks,
        "capacity_percent": 100 * point.capacity_blocks / max(plan.unique_blocks, 1),
        "capacity_bytes": capacity_bytes(plan, point.capacity_blocks),
        **_savings(plan, point.counts),
    }


def _facts(plan: Plan) -> Table:
    table = Table(title=f"Plan for {plan.name}", show_header=False)
    most = plan.unlimited
    rows = [
        ("requests", f"{most.requests:,} in {plan.span_s:,.0f} s"),
        ("prompt tokens", f"{most.token_accesses:,} in blocks of {plan.block_tokens}"),
        ("unique blocks", capacity_label(plan, plan.unique_blocks)),
        ("token hit ratio, unlimited room", f"{most.token_hit_ratio:.4f}"),
        ("block hit ratio, unlimited room", f"{most.block_hit_ratio:.4f}"),
    ]
    if rate := plan.options.prefill_tokens_per_s:
        rows.append(("GPU time saved, unlimited room", _time(plan, most.prefill_saved / rate)))
    for row in rows:
        table.add_row(*row)
    return table


def _ratios(plan: Plan, unit: str) -> Table:
    kind = ", policies on single blocks" if plan.options.textbook else ""
    table = Table(title=f"{unit.capitalize()} hit ratio over capacity{kind}")
    table.add_column("capacity")
    for curve in plan.compared:
        table.add_column(curve.policy, justify="right")
    for at, point in enumerate(plan.compared[0].points):
        ratios = (getattr(curve.points[at].counts, f"{unit}_hit_ratio") for curve in plan.compared)
        table.add_row(capacity_label(plan, point.capacity_blocks), *(f"{ratio:.4f}" for ratio in ratios))
    return table


def _saved(plan: Plan) -> Table:
    rate = plan.options.prefill_tokens_per_s
    table = Table(title=f"GPU time saved at {rate:,.0f} prefill tokens/s (share of all prefill)")
    table.add_column("capacity")
    for curve in plan.compared:
        table.add_column(curve.policy, justify="right")
    for at, point in enumerate(plan.compared[0].points):
        saved = (_time(plan, curve.points[at].counts.prefill_saved / rate) for curve in plan.compared)
        table.add_row(capacity_label(plan, point.capacity_blocks), *saved)
    return table


def _time(plan: Plan, seconds: float) -> str:
    total = plan.unlimited.prefill / plan.options.prefill_tokens_per_s
    return f"{seconds:,.0f} s ({100 * seconds / total if total else 0:.0f}%)"


def _tiers(plan: Plan) -> Table:
    options = plan.options
    title = f"DRAM {format_size(options.dram_bytes)}"
    if options.nvme_bytes:
        title += f", NVMe {format_size(options.nvme_bytes)}, written {options.write_policy}"
    table = Table("policy", "block hit", "in DRAM", "on NVMe", "token hit", "tokens saved", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in plan.tiers:
        counts, total = each.counts, max(each.counts.block_accesses, 1)
        table.add_row(
            each.policy, f"{counts.block_hit_ratio:.4f}", f"{counts.dram_block_hits / total:.4f}",
            f"{counts.nvme_block_hits / total:.4f}", f"{counts.token_hit_ratio:.4f}", f"{counts.token_hits:,}",
        )  # fmt: skip
    return table
