"""The HBM tier: what its options refuse, before and when a daemon starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvstore.clock import ManualClock
from kvstore.config import MIB, DaemonConfig, HbmOptions
from kvstore.errors import ConfigError
from kvstore.server.compose import close_store, make_store


@pytest.mark.parametrize(
    ("options", "settings", "says"),
    [
        ({"device": "cuda:0"}, ("hbm.device", "hbm.capacity_bytes"), "give --hbm-device and --hbm"),
        ({"capacity_bytes": MIB}, ("hbm.device", "hbm.capacity_bytes"), "give --hbm-device and --hbm"),
        ({"device": "cuda:0", "capacity_bytes": 5}, ("hbm.capacity_bytes",), "5 bytes is too small"),
        ({"device": "cuda:0", "capacity_bytes": -MIB}, ("hbm.capacity_bytes",), "too small"),
        ({"device": "cuda:0", "capacity_bytes": MIB, "promote_hits": 0}, ("hbm.promote_hits",), "1 to 255"),
        ({"promote_hits": 3}, ("hbm.promote_hits",), "has no effect"),
    ],
)
def test_what_hbm_can_not_be(options: dict[str, Any], settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        HbmOptions(**options)
    assert caught.value.settings == settings


@pytest.mark.parametrize(
    ("device", "capacity_bytes", "says"),
    [
        ("gpu", MIB, "--hbm-device gpu: there is no device 'gpu'"),
        ("cuda:x", MIB, "--hbm-device cuda:x"),
        ("cuda:7", MIB, "--hbm-device cuda:7"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(
    tmp_path: Path, device: str, capacity_bytes: int, says: str
) -> None:
    config = DaemonConfig(tmp_path / "s", dram_bytes=MIB, prefault=False, hbm=HbmOptions(device, capacity_bytes))
    with pytest.raises(ConfigError, match=says) as caught:
        make_store(config, ManualClock())
    assert caught.value.settings == ("hbm.device",)


def test_a_simulated_device_has_to_fit_this_machine_beside_dram(tmp_path: Path) -> None:
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    DaemonConfig(tmp_path / "s", dram_bytes=MIB, hbm=HbmOptions("cuda:0", physical_bytes))
    with pytest.raises(ConfigError, match=r"made of this machine's memory.*lower --hbm"):
        DaemonConfig(tmp_path / "s", dram_bytes=MIB, hbm=HbmOptions("simulated", physical_bytes))


def test_a_daemon_inside_its_client_has_nobody_to_share_with() -> None:
    with pytest.raises(ConfigError, match="serves other processes only"):
        DaemonConfig(None, hbm=HbmOptions("simulated", MIB))


def test_a_store_has_the_tier_that_was_asked_for(tmp_path: Path) -> None:
    options = HbmOptions("simulated", 4 * MIB, promote_hits=3)
    store = make_store(DaemonConfig(tmp_path / "s", dram_bytes=8 * MIB, prefault=False, hbm=options), ManualClock())
    assert store.hbm is not None
    assert store.hbm.tier.capacity_bytes == 4 * MIB
    assert store.hbm.promoter.queue_bytes_max == MIB
    assert store.index.policy.name == "hazard, lru in HBM"
    store.check()
    close_store(store)


def test_the_queue_never_pins_much_of_dram(tmp_path: Path) -> None:
    config = DaemonConfig(tmp_path / "s", dram_bytes=8 * MIB, prefault=False, hbm=HbmOptions("simulated", 64 * MIB))
    store = make_store(config, ManualClock())
    assert store.hbm is not None
    assert store.hbm.promoter.queue_bytes_max == MIB
    close_store(store)
