"""A snapshot as Prometheus reads it.

Made on a thread beside the daemon's loop, metric by metric, and between two of them the interpreter is let go of:
the loop waits for a few dozen microseconds at most, not for the whole page.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from kvstore.http.exports import BY_METHOD, COUNTER, EXPORTS, HISTOGRAMS, INFO_TEXTS, NVME_STATES, Export
from kvstore.http.source import Phase, Pulse, Snapshot
from kvstore.metrics import Distribution

NVME_PREFIXES = ("nvme_", "onboard", "offload")

_process = ProcessCollector(registry=None)


def expose(accept: str, pulse: Pulse, snapshot: Snapshot, *, fresh: bool) -> tuple[bytes, str]:
    """The page and its content type, which ``accept`` (the header of the request) chooses from."""
    encode, content_type = choose_encoder(accept)
    return encode(_Once(families(pulse, snapshot, fresh=fresh))), content_type


def families(pulse: Pulse, snapshot: Snapshot, *, fresh: bool) -> Iterator[Metric]:
    """Every metric. Those of an NVMe tier are left out where there is none."""
    yield GaugeMetricFamily(
        "kvstore_loop_seen_seconds", "Seconds since the daemon's loop last went round.", pulse.seen_s_ago
    )
    yield GaugeMetricFamily(
        "kvstore_snapshot_fresh", "0 if the loop did not answer: the numbers are those of the scrape before.",
        float(fresh),
    )  # fmt: skip
    yield _states("kvstore_phase", "1 for where the daemon is.", "phase", list(Phase), pulse.phase)
    if snapshot.texts:
        yield _info(snapshot.texts)
    if health := snapshot.texts.get("nvme_health"):
        yield _states("kvstore_nvme_health", "1 for the state of the NVMe tier.", "state", NVME_STATES, health)
    yield from _numbers(snapshot.numbers)
    for name, help_ in HISTOGRAMS.items():
        if distribution := snapshot.histograms.get(name):
            yield _histogram(name, help_, {(): distribution})
    for name, help_ in BY_METHOD.items():
        yield _histogram(name, help_, {(method,): each for method, each in snapshot.by_method.get(name, {}).items()})
    failed = CounterMetricFamily("kvstore_requests_failed", "Requests answered with an error.", labels=["method"])
    for method, count in snapshot.failures.items():
        failed.add_metric([method], count)
    yield failed
    yield from _process.collect()


def _numbers(numbers: Mapping[str, float]) -> Iterator[Metric]:
    if not numbers:
        return
    has_nvme = "nvme_capacity_bytes" in numbers
    grouped: dict[str, list[Export]] = {}
    for export in EXPORTS:
        if has_nvme or not export.stats[0].startswith(NVME_PREFIXES):
            grouped.setdefault(export.metric, []).append(export)
    for metric, exports in grouped.items():
        yield _family(metric, exports, numbers)


def _family(metric: str, exports: list[Export], numbers: Mapping[str, float]) -> Metric:
    kind, help_, labels = exports[0].kind, exports[0].help, list(exports[0].labels)
    family = (CounterMetricFamily if kind == COUNTER else GaugeMetricFamily)(metric, help_, labels=labels)
    for export in exports:
        first, *others = (numbers.get(name, 0.0) for name in export.stats)
        family.add_metric(list(export.labels.values()), first - sum(others))
    return family


def _histogram(name: str, help_: str, distributions: Mapping[tuple[str, ...], Distribution]) -> Metric:
    labels = ["method"] if name in BY_METHOD else []
    family = HistogramMetricFamily(f"kvstore_{name}", help_, labels=labels)
    for values, each in distributions.items():
        bounds = [*map(repr, each.bounds), "+Inf"]
        family.add_metric(list(values), list(zip(bounds, each.cumulative(), strict=True)), each.total)
    return family


def _states(metric: str, help_: str, label: str, states: list[Phase] | tuple[str, ...], state: str) -> Metric:
    family = GaugeMetricFamily(metric, help_, labels=[label])
    for each in states:
        family.add_metric([str(each)], float(each == state))
    return family


def _info(texts: Mapping[str, str]) -> Metric:
    values = {name: texts.get(text, "") for name, text in INFO_TEXTS.items()}
    return InfoMetricFamily("kvstore_build", "What runs.", value=values)


class _Once(CollectorRegistry):
    """What the library's encoders take: here one page of metrics, handed over one by one."""

    def __init__(self, page: Iterator[Metric]) -> None:
        super().__init__()
        self._page = page

    def collect(self) -> Iterator[Metric]:
        for metric in self._page:
            yield metric
            time.sleep(0)
