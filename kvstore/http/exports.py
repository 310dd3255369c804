"""The one table between the daemon's numbers and the metrics that Prometheus scrapes.

Numbers are named as ``kvstore status --all`` shows them. A metric is the first of its numbers less the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

COUNTER, GAUGE = "counter", "gauge"


@dataclass(frozen=True, slots=True)
class Export:
    """One sample: a number (or a difference) as a metric with labels. Samples of one metric share kind and help."""

    metric: str
    kind: str
    help: str
    stats: tuple[str, ...]
    labels: dict[str, str] = field(default_factory=dict)


def _counters(metric: str, help_: str, label: str = "", **stats: str) -> Iterator[Export]:
    yield from _exports(COUNTER, metric, help_, label, stats)


def _gauges(metric: str, help_: str, label: str = "", **stats: str) -> Iterator[Export]:
    yield from _exports(GAUGE, metric, help_, label, stats)


def _exports(kind: str, metric: str, help_: str, label: str, stats: dict[str, str]) -> Iterator[Export]:
    for value, names in stats.items():
        yield Export(f"kvstore_{metric}", kind, help_, tuple(names.split()), {label: value} if label else {})


MISS_REASONS = (
    "new", "differs", "longer", "being_written", "not_loaded", "parts", "unsampled", "evicted_dram", "evicted_nvme",
    "unwanted", "expired", "corrupt", "cleared", "no_room", "quota", "too_large", "too_long", "declined", "generated",
    "uncommitted",
)  # fmt: skip
"""What may have become of a block that is missing."""

EXPORTS: tuple[Export, ...] = (
    # Lookups
    *_counters("matches_total", "Prompts looked up, also by who only asks.", of="matches"),
    *_counters("lookups_total", "Prompts looked up to use them, by how much of them was usable.", "outcome",
               full="lookup_full_hits", partial="lookup_hits lookup_full_hits", none="lookups lookup_hits"),
    *_counters("lookup_blocks_total", "Blocks of prompts looked up to use them.", of="lookup_blocks"),
    *_counters("hit_blocks_total", "Of these, blocks that were used, by the tier they came from.", "tier",
               dram="hit_blocks hit_blocks_nvme hit_blocks_hbm", nvme="hit_blocks_nvme", hbm="hit_blocks_hbm"),
    *_counters("miss_blocks_total", "Of these, blocks that were not, by what ended the hit.", "reason",
               not_found="miss_blocks_not_found", not_asked="miss_blocks_not_asked", pending="miss_blocks_pending",
               refused="miss_blocks_refused", no_room="miss_blocks_no_room", late="miss_blocks_late",
               unreadable="miss_blocks_unreadable", corrupt="miss_blocks_corrupt", gone="miss_blocks_gone"),
    *_counters("missed_lookups_total", "Lookups that were not full, by what became of the first block that they lack; "
               "see Misses.", "reason",
               **{name: f"missed_lookups_{name}" for name in MISS_REASONS}),
    *_counters("saved_tokens_total", "Tokens found, which nobody had to compute.", of="hit_tokens"),
    *_counters("saved_bytes_total", "Bytes of KV found, which nobody had to compute.", of="hit_bytes"),
    # Stored, given up
    *_counters("committed_blocks_total", "Blocks stored by clients.", of="committed_blocks"),
    *_counters("committed_bytes_total", "Bytes stored by clients.", of="committed_bytes"),
    *_counters("duplicate_blocks_total", "Blocks that somebody else had stored meanwhile.", of="duplicate_blocks"),
    *_counters("skipped_blocks_total", "Blocks not stored: for want of room, as they hold generated tokens, or as the "
               "policy would have given them up first.", "why",
               no_room="skipped_blocks", generated="skipped_generated_blocks", declined="declined_blocks"),
    *_counters("overdue_blocks_total", "Blocks given up as their ttl was over.", of="overdue_blocks"),
    *_counters("hinted_requests_total", "Requests that came with hints.", of="hinted_requests"),
    *_counters("ended_sessions_total", "Conversations that clients said had ended.", of="ended_sessions"),
    *_counters("cleared_blocks_total", "Blocks that operators cleared.", of="cleared_blocks"),
    *_counters("evicted_blocks_total", "Copies evicted from a tier.", "tier",
               dram="evicted_blocks", nvme="nvme_evicted_blocks", hbm="hbm_evicted_blocks"),
    *_counters("dropped_blocks_total", "Of these, last copies.", "tier",
               dram="dropped_blocks", nvme="nvme_dropped_blocks"),
    *_counters("policy_seconds_total", "Time that the eviction policy worked on the daemon's thread.", of="policy_s"),
    *_gauges("policy_longest_seconds", "The longest that it did so without a break.", of="policy_s_max"),
    *_counters("moved_blocks_total", "Blocks moved within DRAM to free a region.", of="moved_blocks"),
    *_counters("recovered_blocks_total", "Blocks found at the start.", "where",
               nvme="recovered_blocks", dram="taken_over_blocks"),
    *_gauges("blocks", "Blocks that can be found, in any tier.", of="blocks"),
    *_gauges("block_parts", "What sliding and state groups of hybrid models have of blocks.", of="block_parts"),
    *_gauges("hidden_blocks", "Blocks that were cleared and are still in use.", of="hidden_blocks"),
    *_gauges("namespaces", "Namespaces known.", of="namespaces"),
    *_gauges("tenants", "Tenants that have blocks.", of="tenants"),
    # Tiers
    *_gauges("tier_capacity_bytes", "Configured capacity of a tier.", "tier",
             dram="dram_capacity_bytes", nvme="nvme_capacity_bytes", hbm="hbm_capacity_bytes"),
    *_gauges("tier_used_bytes", "Bytes of blocks in a tier.", "tier",
             dram="dram_used_bytes", nvme="nvme_used_bytes", hbm="hbm_used_bytes"),
    *_gauges("tier_free_bytes", "Room in a tier without evicting.", "tier",
             dram="dram_free_bytes", nvme="nvme_free_bytes", hbm="hbm_free_bytes"),
    *_gauges("dram_bytes", "Bytes of DRAM that hold no block that can be found, by why.", "state",
             reserved="dram_reserved_bytes", quarantined="dram_quarantined_bytes", raw="dram_raw_bytes",
             retired_mapped="dram_retired_mapped_bytes", unsettled="dram_unsettled_bytes"),
    *_gauges("dram_prefaulted_bytes", "Memory of the DRAM tier that is there already.", of="dram_prefaulted_bytes"),
    *_gauges("dram_adopted_bytes", "Regions taken over from an earlier daemon.", of="dram_adopted_bytes"),
    *_gauges("dram_regions", "Shared memory regions.", of="dram_regions"),
    *_gauges("dram_orphan_regions", "Regions whose writer is gone.", of="dram_orphan_regions"),
    *_gauges("dram_huge_pages", "1 if the tier gets huge pages.", of="dram_huge_pages"),
    *_gauges("nvme_live_capacity_bytes", "Bytes of frames that fit.", of="nvme_live_capacity_bytes"),
    *_gauges("nvme_live_frames", "Frames in use.", of="nvme_live_frames"),
    *_gauges("nvme_segment_bytes", "Size of a segment.", of="nvme_segment_bytes"),
    *_gauges("nvme_segments", "Segment files.", of="nvme_segments"),
    *_gauges("nvme_free_segments", "Of these, empty.", of="nvme_free_segments"),
    *_gauges("nvme_catalog_bytes", "Size of the catalog.", of="nvme_catalog_bytes"),
    *_gauges("nvme_names_to_remove", "Frames freed whose names are still in the catalog.", of="nvme_names_to_remove"),
    *_gauges("nvme_direct_io", "1 if the page cache is bypassed.", of="nvme_direct_io"),
    *_gauges("nvme_rebuilt", "1 if the catalog was rebuilt at the start.", of="nvme_rebuilt"),
    *_counters("nvme_written_frames_total", "Frames written and named.", of="nvme_written_frames"),
    *_counters("nvme_written_bytes_total", "Bytes of these.", of="nvme_written_bytes"),
    *_counters("nvme_read_frames_total", "Frames read.", of="nvme_read_frames"),
    *_counters("nvme_moved_frames_total", "Frames appended again to free a segment.", of="nvme_moved_frames"),
    *_counters("nvme_moved_bytes_total", "Bytes of these.", of="nvme_moved_bytes"),
    *_counters("nvme_failed_frames_total", "Frames that the disk failed at.", "operation",
               write="nvme_failed_writes", read="nvme_failed_reads", move="nvme_unreadable_frames"),
    *_counters("nvme_quarantined_frames_total", "Bad frames, never served again.", of="nvme_quarantined_frames"),
    *_counters("nvme_dropped_at_start_total", "Frames, names and segments that could not be used at the start.", "why",
               segment="nvme_removed_segments", corrupt="nvme_dropped_corrupt", misplaced="nvme_dropped_misplaced",
               older="nvme_dropped_older", unlisted="nvme_dropped_unlisted", orphan="nvme_dropped_orphans"),
    *_counters("scrubbed_frames_total", "Frames that were read to see whether they are well.", of="scrubbed_frames"),
    *_counters("scrub_bad_frames_total", "Of these, those that are not.", "why",
               corrupt="scrub_corrupt_blocks", unreadable="scrub_unreadable_blocks"),
    *_counters("scrub_contradictions_total", "Tables of the daemon that contradict each other.",
               of="scrub_contradictions"),
    # Writing behind
    *_counters("offloaded_blocks_total", "Blocks made durable.", of="offloaded_blocks"),
    *_counters("offloaded_bytes_total", "Bytes of these.", of="offloaded_bytes"),
    *_counters("offload_lost_blocks_total", "Blocks that were not written to NVMe.", "why",
               skipped="offload_skipped_blocks", failed="offload_failed_blocks", declined="offload_declined_blocks"),
    *_counters("offload_late_writes_total", "Writes that took longer than the I/O timeout.", of="offload_late_writes"),
    *_gauges("offload_pending_blocks", "Blocks waiting or being written.", of="offload_pending_blocks"),
    *_gauges("offload_pending_bytes", "Bytes of these.", of="offload_pending_bytes"),
    *_gauges("offload_queued_blocks", "Of these, blocks waiting.", of="offload_queued_blocks"),
    *_gauges("offload_writes", "Batches being written.", of="offload_writes"),
    *_gauges("offload_suspended", "1 while nothing is written: disk full, failing or stuck.", of="offload_suspended"),
    # Reading back
    *_counters("onboarded_blocks_total", "Blocks read from NVMe into DRAM.", of="onboarded_blocks"),
    *_counters("onboarded_bytes_total", "Bytes of these.", of="onboarded_bytes"),
    *_counters("onboard_lost_blocks_total", "Blocks that were not read, or not for good.", "why",
               refused="onboard_refused_blocks", no_room="onboard_no_room_blocks",
               unreadable="onboard_unreadable_blocks", corrupt="onboard_corrupt_blocks"),
    *_counters("onboard_late_reads_total", "Reads that took longer than the I/O timeout.", of="onboard_late_reads"),
    *_counters("onboard_repeated_reads_total", "Reads that were made once more.", of="onboard_repeated_reads"),
    *_gauges("onboard_reads", "Batches being read.", of="onboard_reads"),
    *_gauges("onboard_waiting_blocks", "Blocks asked for and not there yet.", of="onboard_waiting_blocks"),
    *_gauges("onboard_queued_bytes", "Bytes of these.", of="onboard_queued_bytes"),
    *_gauges("onboard_bytes_per_second", "Estimated speed of reading.", of="onboard_bytes_per_s"),
    *_gauges("onboard_stuck", "1 while a read has not returned in its time.", of="onboard_stuck"),
    # HBM
    *_gauges("hbm_blocks", "Blocks with a copy in HBM.", of="hbm_blocks"),
    *_gauges("hbm_held_blocks", "Copies in HBM that are gone but for who still reads them.", of="hbm_held_blocks"),
    *_gauges("hbm_bytes", "Bytes of HBM that hold no copy that can be found, by why.", "state",
             reserved="hbm_reserved_bytes", quarantined="hbm_quarantined_bytes",
             retired_mapped="hbm_retired_mapped_bytes", lost="hbm_lost_bytes"),
    *_gauges("hbm_regions", "Regions of HBM.", of="hbm_regions"),
    *_counters("hbm_promoted_blocks_total", "Blocks copied to HBM.", of="hbm_promoted_blocks"),
    *_counters("hbm_promoted_bytes_total", "Bytes of these.", of="hbm_promoted_bytes"),
    *_counters("hbm_lost_blocks_total", "Blocks that were not copied to HBM.", "why",
               skipped="hbm_skipped_blocks", no_room="hbm_no_room_blocks", failed="hbm_failed_blocks"),
    *_gauges("hbm_copies", "Batches being copied to HBM, or waiting for it.", of="hbm_copies"),
    *_gauges("hbm_queued_blocks", "Blocks waiting or being copied to HBM.", of="hbm_queued_blocks"),
    *_gauges("hbm_queued_bytes", "Bytes of these.", of="hbm_queued_bytes"),
    *_gauges("hbm_suspended", "1 while HBM is not used, as the device failed.", of="hbm_suspended"),
    # Claims and clients
    *_gauges("claims", "Leases, reservations and pins in force.", "kind",
             lease="leases", reservation="reservations", pin="pins"),
    *_gauges("pinned_bytes", "Bytes of blocks that have pins.", of="pinned_bytes"),
    *_gauges("pin_room_bytes", "Most that pins may hold.", of="pin_room_bytes"),
    *_counters("refused_pins_total", "Pins that would have been above a quota.", of="refused_pins"),
    *_gauges("claims_unacknowledged", "Ended, but the client has not said that it stopped using them.", "kind",
             lease="leases_ended_unacknowledged", reservation="reservations_ended_unacknowledged"),
    *_counters("expired_claims_total", "Whose time was up before they were let go of.", "kind",
               lease="expired_leases", reservation="expired_reservations"),
    *_gauges("sessions", "Clients.", "state", live="sessions", lingering="sessions_lingering"),
    *_gauges("grpc_sessions", "Clients over gRPC, which count as sessions, too.", of="grpc_sessions"),
    *_counters("grpc_refused_calls_total", "Calls turned away as too many were running.", of="grpc_refused_calls"),
    *_counters("grpc_cut_calls_total", "Reads and Writes cut off past their deadline.", of="grpc_cut_calls"),
    *_counters("grpc_bytes_total", "Bytes of blocks over gRPC.", "direction",
               read="grpc_read_bytes", written="grpc_written_bytes"),
    *_counters("grpc_damaged_chunks_total", "Chunks that came with other bytes than their checksums say.",
               of="grpc_damaged_blocks"),
    # The daemon
    *_gauges("jobs_running", "Reads and writes in the hands of threads.", of="jobs_running"),
    *_counters("jobs_failed_total", "Reads and writes that ended as none may.", of="jobs_failed"),
    *_gauges("uptime_seconds", "Since the daemon started.", of="uptime_s"),
    *_gauges("loop_lag_max_seconds", "The longest the loop was late lately.", of="loop_lag_s_max"),
)  # fmt: skip

LEFT_OUT: dict[str, str] = {
    "hit_ratio": "worked out by `kvstore status`",
    "dram_hit_ratio": "worked out by `kvstore status`",
    "nvme_hit_ratio": "worked out by `kvstore status`",
    "hbm_hit_ratio": "worked out by `kvstore status`",
    "hbm_device": "shown by `kvstore status`",
}
"""Numbers and texts that are no metrics, and why."""

INFO_TEXTS: dict[str, str] = {
    "version": "server_version",
    "policy": "policy",
    "epoch": "epoch",
    "copy_backend": "dram_copy_backend",
}
"""Labels of ``kvstore_build_info``, and the texts they come from."""

NVME_STATES = ("ok", "full", "failing")
"""One sample of ``kvstore_nvme_health`` each."""

TEXTS_TOLD_ELSEWHERE = {
    "nvme_health",
    "dram_huge_pages_note",
    "dram_isolation",
    "dram_memory_failure",
    "hbm_memory_failure",
}
"""Texts that a metric or ``/ready`` tells of in its own way."""

BY_METHOD: dict[str, str] = {
    "request_seconds": "Time that the daemon worked on a request that was answered at once.",
    "request_wait_seconds": "Time until the answer to a request that waited, for blocks, room or events.",
}
TENANT_METRICS: dict[str, tuple[str, str, str]] = {
    "tenant_used_bytes": (GAUGE, "used_bytes", "What a tenant has in a tier."),
    "tenant_share_bytes": (GAUGE, "share_bytes", "Its share of the tier, among the tenants that have blocks there."),
    "tenant_evicted_blocks_total": (COUNTER, "n_evicted", "Its copies that went for its own sake."),
    "tenant_suffered_evictions_total": (COUNTER, "n_suffered", "Its copies that went for the sake of others."),
    "tenant_caused_evictions_total": (COUNTER, "n_caused", "Copies of others that went for its sake."),
}
"""By metric: its kind, the field of ``TenantSample`` and its help. Labels are the tenant and the tier."""

TENANT_LABELS_MAX = 32
"""So many tenants have samples of their own, as long as the daemon lives: those that had most when the places were
given. The others are together ``OTHER_TENANTS``."""
OTHER_TENANTS = "other"

HISTOGRAMS: dict[str, str] = {
    "loop_lag_seconds": "How late the daemon was for its own clock, twenty times a second.",
}


def exported_stats() -> set[str]:
    """The numbers and texts that metrics are made of."""
    return {name for export in EXPORTS for name in export.stats} | set(INFO_TEXTS.values()) | TEXTS_TOLD_ELSEWHERE


def metrics_markdown() -> str:
    """A table of every metric, for docs/OPERATIONS.md."""
    rows = ["| metric | labels | numbers | what it is |", "|---|---|---|---|"]
    merged: dict[str, tuple[str, dict[str, None], list[str]]] = {}
    for export in EXPORTS:
        help_, labels, stats = merged.setdefault(export.metric, (export.help, {}, []))
        labels |= {f'{name}="{value}"': None for name, value in export.labels.items()}
        stats.append(" - ".join(f"`{name}`" for name in export.stats))
    for metric, (help_, labels, stats) in merged.items():
        rows.append(f"| `{metric}` | {', '.join(f'`{label}`' for label in labels)} | {', '.join(stats)} | {help_} |")
    states = ", ".join(f'`state="{state}"`' for state in NVME_STATES)
    texts = ", ".join(f"`{text}`" for text in INFO_TEXTS.values())
    rows += [
        f"| `kvstore_nvme_health` | {states} | `nvme_health` | 1 for the state that the NVMe tier is in. |",
        f"| `kvstore_build_info` | {', '.join(f'`{name}`' for name in INFO_TEXTS)} | {texts} | 1; what runs. |",
        "| `kvstore_requests_failed_total` | `method` | | Requests answered with an error. |",
        "| `kvstore_phase` | `phase` | | 1 for where the daemon is: starting, serving, draining. |",
        "| `kvstore_loop_seen_seconds` | | | Seconds since the daemon's loop last went round. |",
        "| `kvstore_snapshot_fresh` | | | 0 if the loop did not answer: the numbers are those of the scrape before. |",
    ]
    rows += [f"| `kvstore_{name}` | `tenant`, `tier` | | {help_} |" for name, (_, _, help_) in TENANT_METRICS.items()]
    rows += [f"| `kvstore_{name}` (histogram) | `method` | | {help_} |" for name, help_ in BY_METHOD.items()]
    rows += [f"| `kvstore_{name}` (histogram) | | | {help_} |" for name, help_ in HISTOGRAMS.items()]
    return "\n".join(rows)
