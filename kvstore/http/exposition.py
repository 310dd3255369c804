"""A snapshot as Prometheus reads it. Made on a thread beside the daemon's loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder

from kvstore.http.exports import BY_METHOD, COUNTER, EXPORTS, GAUGE, HISTOGRAMS, INFO_TEXTS, NVME_STATES, TENANT_METRICS
from kvstore.http.source import Phase, Pulse, Snapshot
from kvstore.http.text_format import HISTOGRAM, INFO, Family, labelled, number, write
from kvstore.metrics import Distribution

TIER_PREFIXES = {"nvme": ("nvme_", "onboard", "offload"), "hbm": ("hbm_",)}
"""How numbers begin that there are with a tier only."""

_process = ProcessCollector(registry=None)


def expose(accept: str, pulse: Pulse, snapshot: Snapshot, *, fresh: bool) -> tuple[bytes, str]:
    """The page and its content type, which ``accept`` (the header of the request) chooses from."""
    content_type: str = choose_encoder(accept)[1]
    openmetrics = content_type.startswith("application/openmetrics-text")
    return write(families(pulse, snapshot, fresh=fresh), openmetrics=openmetrics), content_type


def families(pulse: Pulse, snapshot: Snapshot, *, fresh: bool) -> Iterator[Family]:
    """Every metric. Those of an NVMe or an HBM tier are left out where there is none."""
    yield _gauge("kvstore_loop_seen_seconds", "Seconds since the daemon's loop last went round.", pulse.seen_s_ago)
    yield _gauge(
        "kvstore_snapshot_fresh", "0 if the loop did not answer: the numbers are those of the scrape before.", fresh
    )
    yield _states("kvstore_phase", "1 for where the daemon is.", "phase", list(Phase), pulse.phase)
    if snapshot.texts:
        labels = {name: snapshot.texts.get(text, "") for name, text in INFO_TEXTS.items()}
        yield Family("kvstore_build", INFO, "What runs.", [(labelled("kvstore_build_info", labels), 1.0)])
    if health := snapshot.texts.get("nvme_health"):
        yield _states("kvstore_nvme_health", "1 for the state of the NVMe tier.", "state", NVME_STATES, health)
    yield from _numbers(snapshot.numbers)
    if snapshot.tenants:
        for name, (kind, field, help_) in TENANT_METRICS.items():
            of_tenants = [
                (labelled(f"kvstore_{name}", {"tenant": each.tenant, "tier": each.tier}), float(getattr(each, field)))
                for each in snapshot.tenants
            ]
            yield Family(f"kvstore_{name}".removesuffix("_total"), kind, help_, of_tenants)
    for name, help_ in HISTOGRAMS.items():
        if distribution := snapshot.histograms.get(name):
            yield _histogram(f"kvstore_{name}", help_, {"": distribution})
    for name, help_ in BY_METHOD.items():
        yield _histogram(f"kvstore_{name}", help_, snapshot.by_method.get(name, {}))
    yield Family(
        "kvstore_requests_failed", COUNTER, "Requests answered with an error.",
        [(_of_method("kvstore_requests_failed_total", method), n) for method, n in snapshot.failures.items()],
    )  # fmt: skip
    for metric in _process.collect():
        samples = [(labelled(sample.name, sample.labels), sample.value) for sample in metric.samples]
        yield Family(metric.name, metric.type, metric.documentation, samples)


@cache
def _plan(absent: tuple[str, ...]) -> tuple[tuple[str, str, str, tuple[tuple[str, tuple[str, ...]], ...]], ...]:
    """Of each metric of numbers: name, kind, help; of each of its samples, what stands before it, and its numbers."""
    grouped: dict[str, tuple[str, str, list[tuple[str, tuple[str, ...]]]]] = {}
    for export in EXPORTS:
        if not export.stats[0].startswith(absent):
            samples = grouped.setdefault(export.metric, (export.kind, export.help, []))[2]
            samples.append((labelled(export.metric, export.labels), export.stats))
    return tuple(
        (metric.removesuffix("_total"), kind, help_, tuple(samples))
        for metric, (kind, help_, samples) in grouped.items()
    )


def _numbers(numbers: Mapping[str, float]) -> Iterator[Family]:
    if not numbers:
        return
    tiers = (each for tier, each in TIER_PREFIXES.items() if f"{tier}_capacity_bytes" not in numbers)
    for name, kind, help_, samples in _plan(tuple(prefix for each in tiers for prefix in each)):
        yield Family(name, kind, help_, [(before, _difference(numbers, stats)) for before, stats in samples])


def _difference(numbers: Mapping[str, float], stats: tuple[str, ...]) -> float:
    value = numbers.get(stats[0], 0.0)
    for name in stats[1:]:
        value -= numbers.get(name, 0.0)
    return value


def _histogram(name: str, help_: str, distributions: Mapping[str, Distribution]) -> Family:
    """One histogram for each method, or one under no method's name."""
    samples: list[tuple[str, float]] = []
    for method, each in distributions.items():
        buckets, count, total = _histogram_names(name, method, each.bounds)
        cumulative = each.cumulative()
        samples += zip(buckets, cumulative, strict=True)
        samples += ((count, cumulative[-1]), (total, each.total))
    return Family(name, HISTOGRAM, help_, samples)


@lru_cache(maxsize=256)
def _histogram_names(name: str, method: str, bounds: tuple[float, ...]) -> tuple[tuple[str, ...], str, str]:
    """What stands before the buckets, the count and the sum."""
    labels = {"method": method} if method else {}
    buckets = [labelled(f"{name}_bucket", {**labels, "le": number(bound)}) for bound in (*bounds, float("inf"))]
    return tuple(buckets), labelled(f"{name}_count", labels), labelled(f"{name}_sum", labels)


def _of_method(sample: str, method: str) -> str:
    return labelled(sample, {"method": method})


def _gauge(name: str, help_: str, value: float) -> Family:
    return Family(name, GAUGE, help_, [(name, value)])


def _states(name: str, help_: str, label: str, states: Iterable[str], state: str) -> Family:
    samples = [(labelled(name, {label: str(each)}), float(each == state)) for each in states]
    return Family(name, GAUGE, help_, samples)
