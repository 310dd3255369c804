"""The picture of a plan. Importing needs nothing; drawing raises ImportError without matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.bench.pictures import new_figure, save_figure
from kvstore.bench.plan import OPT, Curve, Plan
from kvstore.bench.plan_report import capacity_bytes

_GIB = 1 << 30
# The Okabe-Ito palette; OPT is black.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#666666", "#8C6D31")
_MARKS = "os^Dv<>P"


def draw_plan(path: Path, plan: Plan) -> None:
    """Token and block hit ratio over capacity, a curve a policy, with OPT above them and unlimited room as a line.

    On the left, with a prefill rate, GPU time saved stands on a second axis.
    """
    figure, (left, right) = new_figure(13.0, 5.4, columns=2, widths=(1, 1))
    for axes, unit, best in (
        (left, "token", plan.unlimited.token_hit_ratio),
        (right, "block", plan.unlimited.block_hit_ratio),
    ):
        _draw(axes, plan, unit)
        axes.axhline(best, color="#666666", linestyle=":", label=f"unlimited room ({best:.3f})")
        axes.set_ylim(0, max(best, 0.05) * 1.12)
        axes.set_ylabel(f"{unit} hit ratio")
    right.legend(fontsize=8, loc="lower right", framealpha=0.95)
    if plan.options.prefill_tokens_per_s:
        all_s = plan.unlimited.token_accesses / plan.options.prefill_tokens_per_s
        saved = left.secondary_yaxis("right", functions=(lambda y: y * all_s, lambda s: s / all_s))
        saved.set_ylabel("GPU seconds saved")
    figure.suptitle(f"What a cache would hit: {plan.name}, {plan.unlimited.requests:,} requests")
    save_figure(figure, path)


def _draw(axes: Any, plan: Plan, unit: str) -> None:
    smooth = {curve.policy: curve for curve in plan.smooth}
    for at, curve in enumerate(plan.compared):
        is_opt = curve.policy == OPT
        color = "black" if is_opt else _COLORS[at % len(_COLORS)]
        line = smooth.get(curve.policy, curve)
        style = "-" if curve.policy in smooth else "--"
        axes.plot(*_xy(plan, line, unit), style, color=color, linewidth=1.5 if is_opt else 1.1)
        mark = "*" if is_opt else _MARKS[at % len(_MARKS)]
        axes.plot(*_xy(plan, curve, unit), mark, color=color, markersize=8 if is_opt else 5, label=curve.policy)
    axes.set_xscale("log")
    unit_of_x = "GiB" if plan.options.bytes_per_token else f"% of {plan.unique_blocks:,} unique blocks"
    axes.set_xlabel(f"capacity, {unit_of_x} (log scale)")


def _xy(plan: Plan, curve: Curve, unit: str) -> tuple[list[float], list[float]]:
    x = []
    for point in curve.points:
        size = capacity_bytes(plan, point.capacity_blocks)
        x.append(100 * point.capacity_blocks / max(plan.unique_blocks, 1) if size is None else size / _GIB)
    return x, [getattr(point.counts, f"{unit}_hit_ratio") for point in curve.points]
