"""How ``kvstore status`` orders and words the numbers."""

from __future__ import annotations

import pytest

from kvstore.cli.status import grouped, hit_ratios, shown


def test_each_number_stands_in_one_group_and_groups_without_any_are_left_out() -> None:
    stats: dict[str, float | str] = {
        "uptime_s": 1.0, "offload_writes": 2.0, "dram_used_bytes": 3.0, "blocks": 4.0, "offloaded_blocks": 5.0,
        "dram_huge_pages": "yes",
    }  # fmt: skip
    assert list(grouped(stats)) == [
        ("", [("blocks", 4.0), ("uptime_s", 1.0)]),
        ("DRAM tier", [("dram_huge_pages", "yes"), ("dram_used_bytes", 3.0)]),
        ("DRAM to NVMe", [("offload_writes", 2.0), ("offloaded_blocks", 5.0)]),
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
    ],
)
def test_values_for_people(name: str, value: float | str, text: str) -> None:
    assert shown(name, value) == text
