"""Settings of the NVMe tier: defaults, limits, and words that name the option and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.config import GIB, MIB, DaemonConfig
from kvstore.errors import ConfigError

HERE: dict[str, Any] = {"nvme_dir": Path("/mnt/kv"), "nvme_bytes": GIB}


def config(**settings: Any) -> DaemonConfig:
    return DaemonConfig(**{"socket_path": Path("/run/d.sock"), "dram_bytes": 64 * MIB, **settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dram_bytes": 64 * MIB}, 16 * MIB),
        ({"dram_bytes": 64 * MIB, "write_behind_bytes": 5 * MIB}, 5 * MIB),
        ({"dram_bytes": 1 * MIB}, MIB // 4),
    ],
)
def test_what_may_wait_fits_the_dram_tier(settings: dict[str, Any], expected: int) -> None:
    assert config(**HERE, **settings).write_behind_bytes_effective == expected


def test_what_may_wait_is_a_gibibyte_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda _: 1 << 24)
    assert config(dram_bytes=64 * GIB).write_behind_bytes_effective == GIB


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nvme_dir": Path("/mnt/kv")}, "--nvme-dir and --nvme"),
        ({"nvme_bytes": GIB}, "--nvme-dir and --nvme"),
        ({**HERE, "nvme_bytes": 4096}, "4096"),
        ({**HERE, "nvme_bytes": -1}, "-1"),
        ({**HERE, "nvme_dir": Path()}, "--nvme-dir"),
        ({**HERE, "nvme_dir": Path("a\0b")}, "--nvme-dir"),
        ({**HERE, "write_policy": "around"}, "through, back, selective"),
        ({**HERE, "recovery": "some"}, "none, normal, strict"),
        ({**HERE, "selective_hits": 0}, "--selective-hits"),
        ({**HERE, "selective_hits": 256}, "256"),
        ({**HERE, "write_behind_bytes": 65 * MIB}, "--write-behind"),
        ({**HERE, "write_behind_bytes": -1}, "-1"),
        ({**HERE, "io_timeout_s": 0.0}, "--io-timeout"),
        ({**HERE, "io_timeout_s": float("nan")}, "nan"),
        ({**HERE, "drain_s": -1.0}, "--drain"),
        ({**HERE, "drain_s": float("inf")}, "inf"),
        ({**HERE, "nvme_dir": Path()}, "empty"),
        ({**HERE, "write_behind_bytes": 4 * GIB}, r"4\.0 GiB.*64\.0 MiB"),
        ({**HERE, "selective_hits": 3}, "--selective-hits needs --write-policy selective"),
        ({"write_policy": "back"}, "--write-policy needs --nvme-dir"),
        ({"write_policy": "selective", "selective_hits": 3}, "--write-policy needs --nvme-dir"),
        ({"selective_hits": 3}, "--selective-hits needs --nvme-dir"),
        ({"recovery": "strict"}, "--recovery needs --nvme-dir"),
        ({"write_behind_bytes": MIB}, "--write-behind needs --nvme-dir"),
        ({"io_timeout_s": 3.0}, "--io-timeout needs --nvme-dir"),
        ({"drain_s": 3.0}, "--drain needs --nvme-dir"),
    ],
)
def test_what_cant_work_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**settings)
