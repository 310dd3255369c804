"""The page that Prometheus reads: what a linter would say, and that every number is there or left out on purpose."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from kvstore.client import Client
from kvstore.http.exports import (
    BY_METHOD,
    COUNTER,
    EXPORTS,
    HISTOGRAMS,
    LEFT_OUT,
    exported_stats,
    metrics_markdown,
)
from kvstore.http.exposition import expose
from kvstore.http.source import Phase, Pulse, Snapshot
from kvstore.metrics import Histogram

ROOT = Path(__file__).parents[2]
PULSE = Pulse(Phase.SERVING, 0.01, 5.0)
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UNITS_NOT_OF_THE_BASE = re.compile(
    r"_(ms|us|milliseconds|microseconds|minutes|hours|kib|mib|gib|kb|mb|gb|percent)(_|$)"
)


def distribution(*values: float) -> Any:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    return histogram.snapshot()


def a_snapshot() -> Snapshot:
    numbers = {name: float(index) for index, name in enumerate(sorted(exported_stats()))}
    return Snapshot(
        numbers
        | {"hit_blocks": 13.0, "hit_blocks_nvme": 4.0, "hit_blocks_hbm": 3.0}
        | {"lookup_hits": 7.0, "lookup_full_hits": 5.0, "lookups": 9.0},
        {"nvme_health": "full", "server_version": "1.2", "policy": 'l"r\nu', "epoch": "7", "dram_copy_backend": "avx2"},
        {"loop_lag_seconds": distribution(0.001, 0.5)},
        {
            "request_seconds": {"lease": distribution(1e-5, 1e-5, 99.0), "match": distribution()},
            "request_wait_seconds": {"lease": distribution(0.1)},
        },
        {"lease": 3},
    )


def page(snapshot: Snapshot, accept: str = "", *, fresh: bool = True) -> dict[str, Metric]:
    text, content_type = expose(accept, PULSE, snapshot, fresh=fresh)
    reader = parse_openmetrics if "openmetrics" in content_type else parse
    return {family.name: family for family in reader(text.decode())}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    found = [
        each.value
        for family in families.values()
        for each in family.samples
        if each.name == sample and labels.items() <= each.labels.items()
    ]
    assert len(found) == 1, (sample, labels, found)
    return float(found[0])


def test_numbers_come_back_under_their_metrics() -> None:
    families = page(a_snapshot())
    assert value(families, "kvstore_hit_blocks_total", tier="dram") == 6
    assert value(families, "kvstore_hit_blocks_total", tier="nvme") == 4
    assert value(families, "kvstore_hit_blocks_total", tier="hbm") == 3
    assert [value(families, "kvstore_lookups_total", outcome=each) for each in ("full", "partial", "none")] == [5, 2, 2]
    assert value(families, "kvstore_nvme_health", state="full") == 1
    assert value(families, "kvstore_nvme_health", state="ok") == 0
    assert value(families, "kvstore_build_info", version="1.2", policy='l"r\nu') == 1
    assert value(families, "kvstore_requests_failed_total", method="lease") == 3
    assert value(families, "kvstore_phase", phase="serving") == 1
    assert value(families, "kvstore_snapshot_fresh") == 1
    assert value(families, "kvstore_request_seconds_bucket", method="lease", le="2e-05") == 2
    assert value(families, "kvstore_request_seconds_bucket", method="lease", le="30.0") == 2
    assert value(families, "kvstore_request_seconds_bucket", method="lease", le="+Inf") == 3
    assert value(families, "kvstore_request_seconds_count", method="lease") == 3
    assert value(families, "kvstore_request_seconds_sum", method="lease") == pytest.approx(99.00002)
    assert value(families, "kvstore_loop_lag_seconds_count") == 2
    assert value(families, "process_resident_memory_bytes") > 0


def test_the_newer_format_is_given_to_who_asks_for_it() -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    text, content_type = expose(accept, PULSE, a_snapshot(), fresh=True)
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    assert value(page(a_snapshot(), accept), "kvstore_hit_blocks_total", tier="dram") == 6


def test_a_linter_finds_nothing() -> None:
    families = page(a_snapshot())
    ours = {name: family for name, family in families.items() if name.startswith("kvstore_")}
    assert len(ours) > 60
    for name, family in ours.items():
        assert NAME.fullmatch(name), name
        assert family.documentation.endswith("."), name
        assert not UNITS_NOT_OF_THE_BASE.search(name), name
        samples = {sample.name for sample in family.samples}
        assert all((sample.endswith("_total")) == (family.type == "counter") for sample in samples), name
        assert not (
            family.type != "histogram" and any(sample.endswith(("_bucket", "_count", "_sum")) for sample in samples)
        )
        keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(keys) == len(set(keys)), name
        for sample in family.samples:
            assert not {"le", "quantile", "job", "instance"} & set(sample.labels) or family.type == "histogram", name


def test_samples_of_one_metric_agree_on_what_it_is() -> None:
    for metric in {export.metric for export in EXPORTS}:
        same = [export for export in EXPORTS if export.metric == metric]
        assert len({(export.kind, export.help, tuple(export.labels)) for export in same}) == 1, metric
        assert len({tuple(export.labels.items()) for export in same}) == len(same), metric
        assert metric.endswith("_total") == (same[0].kind == COUNTER), metric
    assert not {f"kvstore_{name}" for name in (*BY_METHOD, *HISTOGRAMS)} & {export.metric for export in EXPORTS}


def test_counters_are_there_before_they_are_raised_and_an_absent_tier_is_not() -> None:
    families = page(Snapshot({"blocks": 1.0}, {"policy": "lru"}))
    assert value(families, "kvstore_evicted_blocks_total", tier="dram") == 0
    assert value(families, "kvstore_miss_blocks_total", reason="corrupt") == 0
    assert not [name for name in families if "nvme" in name or "onboard" in name or "offload" in name or "hbm" in name]


def test_without_any_numbers_what_is_known_is_told() -> None:
    families = page(Snapshot(), fresh=False)
    assert value(families, "kvstore_snapshot_fresh") == 0
    assert value(families, "kvstore_loop_seen_seconds") == 0.01
    assert "kvstore_blocks" not in families


def test_every_number_is_exported_or_left_out_on_purpose(
    start_daemon: Callable[..., Any], nvme: dict[str, Any]
) -> None:
    with Client(start_daemon(**nvme).config.socket_path, timeout_s=5.0) as client:
        given = set(client.stats())
    table = (ROOT / "docs" / "OPERATIONS.md").read_text().partition("\n## Numbers\n")[2].partition("\n## ")[0]
    lines = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for line in lines for name in re.findall(r"`([a-z_]+)`", line)}
    assert {"lookup_blocks", "nvme_moved_frames"} <= documented
    told = exported_stats() | set(LEFT_OUT)
    assert not (given | documented) - told, "give these a row in EXPORTS, or say in LEFT_OUT why not"
    assert not told - (given | documented), "these are no numbers of the daemon (any more)"
    assert not exported_stats() & set(LEFT_OUT)


def test_the_table_in_the_documents_is_the_table() -> None:
    assert metrics_markdown() in (ROOT / "docs" / "OPERATIONS.md").read_text()


def test_queries_in_the_documents_are_of_metrics_that_there_are() -> None:
    section = (
        (ROOT / "docs" / "OPERATIONS.md").read_text().partition("\n## Health and metrics\n")[2].partition("\n## ")[0]
    )
    queries = section.partition("| question | query |")[2].partition("<!-- table: metrics -->")[0]
    asked = set(re.findall(r"kvstore_[a-z_]+", queries))
    given = {sample.name for family in page(a_snapshot()).values() for sample in family.samples}
    assert len(asked) > 8
    assert asked <= given
