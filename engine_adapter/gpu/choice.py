"""Which way copies go, decided by what each takes at their sizes: measured by ``measure``, kept true by ``observe``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from kvstore.device.copy_kernels import COPY_BLOCKS
from kvstore.device.seam import Device
from kvstore.engine_adapter.gpu.block_counts import fewest_blocks, measure_blocks
from kvstore.engine_adapter.gpu.kernel_copies import KernelCopies, measure_spread, move_pieces, read_in_place
from kvstore.plan.bandwidth import SIZES, TOTAL_BYTES, BandwidthTable, copy_movers, make_curve
from kvstore.plan.bandwidth import measure as measure_bandwidth
from kvstore.plan.calibration import Calibration
from kvstore.plan.ways import Direction, Mover, Way

SPREAD_GB_PER_S = 300.0
"""How fast a kernel moves small runs inside of device memory, until that is measured."""
LAUNCH_S = 10e-6
"""What one more kernel costs."""


class Route(StrEnum):
    """How copies get between host memory and pages."""

    DIRECT = "direct"
    """The copy engine, run by run, in one call."""
    KERNEL = "kernel"
    """A kernel reads or writes mapped host memory."""
    STAGED = "staged"
    """The copy engine moves what is contiguous in host memory, and a kernel the runs inside of device memory."""


WAYS = {Route.DIRECT: Way.BATCH, Route.KERNEL: Way.KERNEL, Route.STAGED: Way.BATCH}
"""What of a calibration says how long the part of a route takes that crosses the link."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The routes' costs. ``spread_gb_per_s``: see ``SPREAD_GB_PER_S``. ``only``: those that are taken by choice.
    ``copy_blocks``: with so many thread blocks kernels copy over the link.
    """

    calibration: Calibration
    spread_gb_per_s: float = SPREAD_GB_PER_S
    only: Sequence[Route] = tuple(Route)
    copy_blocks: int = COPY_BLOCKS

    def expected_s(self, route: Route, direction: Direction, n_bytes: int, n_runs: int, n_spans: int) -> float:
        """Seconds for ``n_runs`` runs that are ``n_spans`` contiguous spans of host memory."""
        n = n_spans if route is Route.STAGED else n_runs
        link_s = self.calibration.expected_s(direction, WAYS[route], n_bytes / n, n)
        if route is not Route.STAGED:
            return link_s
        return link_s + LAUNCH_S + n_bytes / (self.spread_gb_per_s * 1e9)

    def routes(self, direction: Direction, n_bytes: int, n_runs: int, n_spans: int) -> list[Route]:
        """All, what is expected to take least first."""
        return sorted(self.only, key=lambda route: self.expected_s(route, direction, n_bytes, n_runs, n_spans))

    def observe(self, route: Route, direction: Direction, n_bytes: int, n_runs: int, took_s: float) -> None:
        """Copies by one route took so long, alone on their stream. Of a staged one nothing is learnt."""
        if route is not Route.STAGED and n_runs:
            self.calibration.observe(direction, WAYS[route], n_bytes / n_runs, n_runs, took_s)


def measure(
    device: Device, *, sizes: Sequence[int] = SIZES, total_bytes: int = TOTAL_BYTES, repeats: int = 7
) -> Choice:
    """Costs as measured on a device; blocks for some seconds, and uses memory as ``plan.bandwidth.measure`` does."""
    with KernelCopies(device, total_bytes // min(sizes), 1) as kernels:
        blocks = fewest_blocks(measure_blocks(device, kernels, min(sizes), total_bytes, repeats))
        move = partial(move_pieces, kernels, blocks=blocks)
        by_kernel = {Way.KERNEL: move, Way.ZERO_COPY: partial(read_in_place, kernels)}
        movers: dict[Way, Mover] = {**copy_movers(device), **by_kernel}
        table = measure_bandwidth(device, movers, sizes=sizes, total_bytes=total_bytes, repeats=repeats)
        spread_gb_per_s = measure_spread(device, kernels, min(sizes), total_bytes, repeats)
        return Choice(Calibration(table), spread_gb_per_s, copy_blocks=blocks)


def unmeasured() -> Choice:
    """Costs that are of no device in particular, to begin with: PCIe 4 with 16 lanes, as published for GPUs on it.

    The copy engine takes some 2 us a run, a kernel moves small ones at most of the link's rate.
    """
    curves = {}
    for direction in Direction:
        curves[direction, Way.BATCH] = make_curve((4096, 1 << 16, 1 << 20), (2.0, 16.0, 24.0), 10e-6)
        curves[direction, Way.KERNEL] = make_curve((4096, 1 << 16, 1 << 20), (16.0, 19.0, 20.0), 15e-6)
    return Choice(Calibration(BandwidthTable(curves)))
