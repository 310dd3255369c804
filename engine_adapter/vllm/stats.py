"""What the connector did, on its way into vLLM's log and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS: Mapping[str, str] = {
    "lookups": "Questions about a prompt that the daemon answered or should have answered.",
    "lookups_failed": "Lookups without an answer in time: misses.",
    "lookups_skipped": "Lookups not made because the daemon had been slow several times in a row.",
    "lookups_pending": "Lookups that found blocks on NVMe, and so made a request wait.",
    "lookups_pending_too_long": "Requests that stopped waiting for blocks on NVMe.",
    "lookup_seconds": "Time spent in lookups on the scheduler's thread.",
    "loads": "Loads done and verified.",
    "load_blocks": "Blocks loaded.",
    "load_bytes": "Bytes loaded, on this worker.",
    "load_seconds": "Time spent in loads, on their own threads.",
    "loads_failed": "Loads that failed; their blocks were computed.",
    "load_failed_blocks": "Blocks of failed loads.",
    "saves": "Saves done, in full or in part.",
    "saves_failed": "Saves that stored nothing of what they had.",
    "save_blocks": "Blocks stored.",
    "save_present_blocks": "Blocks to be saved that were stored already.",
    "save_skipped_blocks": "Blocks that were not stored.",
    "save_bytes": "Bytes stored, on this worker.",
    "save_seconds": "Time spent in saves, on their own threads.",
    "jobs_refused": "Loads and saves that were not begun because too many waited.",
    "errors": "Errors inside of the connector that the engine was kept from.",
}
"""What is counted, and what it means."""


class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Counters since the last report; ``data`` is name -> amount."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begin anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """What is worth a line in the log."""
        shown: dict[str, int | float] = {name: round(amount, 6) for name, amount in self.data.items()}
        for kind in ("load", "save"):
            seconds = self.data.get(f"{kind}_seconds", 0)
            if seconds:
                shown[f"{kind}_gb_per_s"] = round(self.data.get(f"{kind}_bytes", 0) / seconds / 1e9, 3)
        return shown

    def is_empty(self) -> bool:
        """Whether there is anything to report."""
        return not self.data


class Reporter:
    """Gives what was counted since it was last asked."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def since(self, now: Mapping[str, float]) -> KVStoreStats | None:
        """``now``: a snapshot of counters. None if nothing has changed."""
        changed = {name: amount - self._last.get(name, 0) for name, amount in now.items()}
        changed = {name: amount for name, amount in changed.items() if amount}
        self._last = dict(now)
        return KVStoreStats(data=changed) if changed else None


class KVStorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:kvstore_*`` counters, one for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._counters: dict[tuple[str, int], Any] = {}
        for name, text in COUNTERS.items():
            metric = counter(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
            for engine, labels in per_engine_labelvalues.items():
                self._counters[name, engine] = metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report; names that this version doesn't know are left out."""
        for name, amount in transfer_stats_data.items():
            if (counter := self._counters.get((name, engine_idx))) is not None:
                counter.inc(amount)
