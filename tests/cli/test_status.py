"""How ``kvstore status`` orders and words the numbers."""

from __future__ import annotations

import pytest

from kvstore.cli.status import grouped, hit_ratios, miss_reasons, shown, summary


def test_each_number_stands_in_one_group_and_groups_without_any_are_left_out() -> None:
    stats: dict[str, float | str] = {
        "uptime_s": 1.0, "offload_writes": 2.0, "dram_used_bytes": 3.0, "blocks": 4.0, "offloaded_blocks": 5.0,
        "dram_huge_pages": "yes",
    }  # fmt: skip
    assert list(grouped(stats)) == [
        ("", [("blocks", "4"), ("uptime_s", "1")]),
        ("DRAM tier", [("dram_huge_pages", "yes"), ("dram_used_bytes", "3 B")]),
        ("DRAM to NVMe", [("offload_writes", "2"), ("offloaded_blocks", "5")]),
    ]


def test_the_share_of_each_tier() -> None:
    assert hit_ratios({"lookup_blocks": 0.0}) == {}
    assert hit_ratios({"lookup_blocks": 10.0, "hit_blocks": 4.0}) == {"hit_ratio": 0.4, "dram_hit_ratio": 0.4}
    both = hit_ratios({"lookup_blocks": 10.0, "hit_blocks": 4.0, "hit_blocks_nvme": 1.0, "nvme_used_bytes": 0.0})
    assert both == {"hit_ratio": 0.4, "dram_hit_ratio": 0.3, "nvme_hit_ratio": 0.1}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("dram_used_bytes", 3 << 20, "3.0 MiB"),
        ("onboard_bytes_per_s", 1.5 * (1 << 30), "1.5 GiB/s"),
        ("hit_ratio", 0.35351, "0.3535"),
        ("blocks", 1234567.0, "1,234,567"),
        ("policy", "lru", "lru"),
        ("dram_memory_failure", "", "none"),
    ],
)
def test_values_for_people(name: str, value: float | str, text: str) -> None:
    assert shown(name, value) == text


DRAM_ONLY: dict[str, float | str] = {
    "server_version": "9.9", "policy": "lru", "uptime_s": 3661.5, "sessions": 2.0, "blocks": 7.0,
    "dram_used_bytes": 1 << 20, "dram_capacity_bytes": 4 << 20, "dram_huge_pages_note": "", "dram_isolation": "client",
    "dram_memory_failure": "",
}  # fmt: skip


def test_the_summary_of_one_tier_has_a_few_lines_in_words() -> None:
    groups = dict(summary(DRAM_ONLY))
    assert list(groups) == ["", "DRAM tier"]
    assert dict(groups[""])["up for"] == "1:01:01"
    assert dict(groups[""])["blocks found"] == "nothing looked up yet"
    assert dict(groups["DRAM tier"])["used"] == "1.0 MiB of 4.0 MiB"
    assert "memory failure" not in dict(groups["DRAM tier"])


def test_the_summary_tells_what_is_wrong() -> None:
    wrong = {
        **DRAM_ONLY, "dram_memory_failure": "no memory", "nvme_health": "full", "offload_suspended": 1.0,
        "offload_skipped_blocks": 5.0, "hit_ratio": 0.25, "onboard_stuck": 1.0,
    }  # fmt: skip
    groups = dict(summary(wrong))
    assert dict(groups[""])["blocks found"] == "25.0%"
    assert dict(groups["DRAM tier"])["memory failure"] == "no memory"
    assert dict(groups["NVMe tier"])["health"] == "full, writes pause, a read is stuck"
    assert dict(groups["NVMe tier"])["writes skipped, failed"] == "5, 0"


def test_why_prompts_miss_in_a_few_words() -> None:
    assert miss_reasons(DRAM_ONLY) == "none"
    counted = {"evicted_dram": 60.0, "differs": 30.0, "new": 8.0, "longer": 2.0, "quota": 0.0}
    stats = {f"missed_lookups_{name}": n for name, n in counted.items()}
    assert miss_reasons(DRAM_ONLY | stats) == "60% evicted dram, 30% differs, 8% new"
    assert dict(dict(summary(DRAM_ONLY | stats))[""])["first block missing of the others"].startswith("60%")
