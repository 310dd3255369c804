"""Replay of a workload through a running daemon: every byte that is read is compared with what it must be.

Each client, per request: match, lease the longest prefix, compare all of its bytes in place, release, then
put the blocks that were absent. Several clients are processes of their own; requests are dealt round-robin
in file order. With an NVMe tier a client waits now and then until its blocks are durable, as ``ReplayOptions``
says, and the daemon may be killed on the way.
"""

from __future__ import annotations

import time
from typing import Any

from kvstore.bench import workload as work
from kvstore.bench.measure import Latency
from kvstore.bench.replay_client import OPERATIONS, ClientOptions, ClientResult, run_client
from kvstore.bench.replay_crash import Crash, CrashReport, Restartable, durable_blocks
from kvstore.bench.replay_dealing import dealt, tenant_of
from kvstore.bench.replay_fleet import run_fleet
from kvstore.bench.replay_journal import Journal
from kvstore.bench.replay_options import ReplayOptions
from kvstore.bench.replay_result import ReplayResult, counts_dict
from kvstore.bench.simulate import HitCounts, Progress
from kvstore.bench.workload import Workload
from kvstore.client import Client
from kvstore.compression.frame import FrameLayout
from kvstore.errors import BadInputError
from kvstore.tiers.nvme.layout import Geometry

__all__ = ["ReplayOptions", "ReplayResult", "counts_dict", "nvme_blocks_of", "replay"]

COMEBACK_S_MAX = 120.0


def replay(
    workload: Workload,
    options: ReplayOptions,
    connect: str,
    progress: Progress | None = None,
    daemon: Restartable | None = None,
) -> ReplayResult:
    """Run ``workload`` through the daemon at the socket ``connect``; blocks until all clients are done.

    ``daemon`` is the process behind the socket, for ``kill_at``. Raises UnavailableError if the daemon can't be
    reached at the start or did not come back, KVStoreError if a client fails.
    """
    client_options = ClientOptions(
        connect,
        options.block_bytes,
        options.seed,
        options.timeout_s,
        options.waits_every,
        COMEBACK_S_MAX if options.kill_at is not None else 0.0,
        options.attention_doubling_tokens,
        options.hbm_device if options.has_hbm else "",
    )
    crash = _planned(workload, options, client_options, daemon)
    with Client(connect, timeout_s=options.timeout_s) as client:
        before = client.stats()
        start = time.perf_counter()
        if options.n_clients == 1 and crash is None:
            results = [run_client(workload, client_options, progress)]
        else:
            results = run_fleet(workload, client_options, options.n_clients, progress, crash, options.tenants)
        wall_s = time.perf_counter() - start
        client.wait_healthy(options.timeout_s)
        stats = client.stats()
    if crash is None:  # else the daemon is another one
        stats["policy_s"] = float(stats["policy_s"]) - float(before["policy_s"])
    return _merge(workload, options, results, wall_s, stats, crash.report if crash is not None else None)


def _planned(
    workload: Workload, options: ReplayOptions, client_options: ClientOptions, daemon: Restartable | None
) -> Crash | None:
    nvme_blocks = options.nvme_capacity(workload)
    if options.kill_at is None or nvme_blocks is None:
        return None
    if daemon is None:
        raise BadInputError("kill_at (--kill-at) needs a daemon that was started for the replay")
    at_request = max(1, int(workload.n_requests * options.kill_at))
    return Crash(daemon, workload, client_options, nvme_blocks, at_request)


def _merge(
    workload: Workload,
    options: ReplayOptions,
    results: list[ClientResult],
    wall_s: float,
    stats: dict[str, Any],
    crash: CrashReport | None,
) -> ReplayResult:
    counts = HitCounts()
    of_tenants: dict[str, HitCounts] = {}
    for number, result in enumerate(results):
        counts.add(result.counts)
        of_tenants.setdefault(tenant_of(number, options.tenants), HitCounts()).add(result.counts)
    journal = Journal.merged(
        (result.journal, dealt(workload, len(results), number, options.tenants))
        for number, result in enumerate(results)
    )
    seconds = {name: [s for r in results for s in r.seconds[name]] for name in OPERATIONS}
    bytes_read = sum(r.bytes_read for r in results)
    bytes_written = sum(r.bytes_written for r in results)
    tiers = _tiers(stats)
    nvme_blocks = nvme_blocks_of(workload, options.block_bytes, stats)
    tiers["dram"] |= {
        "block_hits": counts.dram_block_hits,
        "bytes_read": bytes_read - (counts.nvme_block_hits + counts.hbm_block_hits) * options.block_bytes,
        "bytes_written": bytes_written,
    }
    if "hbm" in tiers:
        tiers["hbm"] |= {
            "block_hits": counts.hbm_block_hits,
            "bytes_read": counts.hbm_block_hits * options.block_bytes,
        }
    if "nvme" in tiers:
        tiers["nvme"] |= {
            "block_hits": counts.nvme_block_hits,
            "bytes_read": counts.nvme_block_hits * options.block_bytes,
        }
    return ReplayResult(
        name=workload.name,
        counts=counts,
        unique_blocks=workload.unique_blocks,
        # What the daemon really has; one that was running before may have more or less than was asked for.
        capacity_blocks=int(stats["dram_capacity_bytes"]) // work.dram_capacity_bytes(1, options.block_bytes),
        clients=options.n_clients,
        tenants=of_tenants if options.tenants > 1 else {},
        block_bytes=options.block_bytes,
        policy=options.policy,
        mismatches=sum(r.mismatches for r in results) + (crash.mismatches if crash is not None else 0),
        skipped_blocks=sum(r.skipped_blocks for r in results),
        late_blocks=sum(r.late_blocks for r in results),
        unanswered=sum(r.unanswered for r in results),
        ended_leases=sum(r.ended_leases for r in results),
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        wall_s=wall_s,
        read_gb_per_s=_rate(bytes_read, sum(seconds["lease"]) + sum(seconds["verify"]), options.n_clients),
        write_gb_per_s=_rate(bytes_written, sum(seconds["put"]), options.n_clients),
        latencies={name: Latency.from_seconds(values) for name, values in seconds.items() if values},
        tiers=tiers,
        nvme_capacity_blocks=nvme_blocks,
        hbm_capacity_blocks=_hbm_blocks(options.block_bytes, stats),
        nvme_overhead=float(stats["nvme_capacity_bytes"]) / (nvme_blocks * options.block_bytes) - 1
        if nvme_blocks
        else 0.0,
        write_policy=options.write_policy,
        durable_every=options.waits_every,
        durable_blocks=durable_blocks(workload, journal),
        crash=crash,
        policy_us_per_block=float(stats["policy_s"]) / max(counts.block_accesses, 1) * 1e6,
    )


def _tiers(stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The daemon's numbers by tier; what moves blocks between them belongs to NVMe."""
    tiers = {
        tier: {name.removeprefix(f"{tier}_"): value for name, value in stats.items() if name.startswith(f"{tier}_")}
        for tier in ("dram", "hbm")
        if f"{tier}_capacity_bytes" in stats
    }
    prefixes = ("nvme_", "offload", "onboard")
    nvme = {name.removeprefix("nvme_"): value for name, value in stats.items() if name.startswith(prefixes)}
    return tiers | ({"nvme": nvme} if nvme else {})


def _hbm_blocks(block_bytes: int, stats: dict[str, Any]) -> int | None:
    """Blocks that the daemon's HBM tier has room for."""
    if "hbm_capacity_bytes" not in stats:
        return None
    return int(stats["hbm_capacity_bytes"]) // work.dram_capacity_bytes(1, block_bytes)


def nvme_blocks_of(workload: Workload, block_bytes: int, stats: dict[str, Any]) -> int | None:
    """Frames that the daemon's NVMe tier has room for: a little more than was asked for, as it is cut in segments, and
    its catalog has room for so many names."""
    if "nvme_live_capacity_bytes" not in stats:
        return None
    namespace = work.namespace(workload, block_bytes, "any")
    frame_bytes = FrameLayout.of(namespace.spec, namespace.row_bytes, namespace.digest()).frame_bytes
    return Geometry(int(stats["nvme_capacity_bytes"]), int(stats["nvme_segment_bytes"])).n_frames(frame_bytes)


def _rate(n_bytes: int, busy_s: float, clients: int) -> float:
    """GB/s of all clients together, from the time they spent in the operation."""
    return n_bytes * clients / busy_s / 1e9 if busy_s else 0.0
