"""The NUMA node of the DRAM tier: from the setting to the pages."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvstore.clock import SystemClock
from kvstore.config import DaemonConfig
from kvstore.config.here import check_here
from kvstore.errors import ConfigError
from kvstore.native import numa
from kvstore.plan.placement import Placement
from kvstore.server import compose
from kvstore.server.compose import close_store, make_store

MIB = 1 << 20

needs_numa = pytest.mark.skipif(numa.nodes() == (), reason="this kernel tells of no NUMA nodes")


@needs_numa
def test_memory_comes_from_the_node_that_the_setting_comes_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvstore.server")
    node = numa.nodes()[0]
    asked: list[str] = []
    preferred: list[int] = []

    def chosen(setting: str) -> Placement:
        asked.append(setting)
        return Placement(node, "as the test says")

    monkeypatch.setattr(compose, "place", chosen)
    real = numa.prefer_node

    def prefer(address: int, length_bytes: int, wanted: int) -> None:
        preferred.append(wanted)
        real(address, length_bytes, wanted)

    monkeypatch.setattr(numa, "prefer_node", prefer)
    store = make_store(DaemonConfig(None, dram_bytes=4 * MIB, prefault=False, numa_node=str(node)), SystemClock())
    try:
        slots = store.dram.allocate(1, "default", MIB, 2)
        (region_id,) = np.unique(store.dram.locate(slots).region_ids).tolist()
        region = store.dram.region(region_id)
        region.mapping.populate()
        assert (numa.page_nodes(region.address, region.size_bytes) == node).all()
    finally:
        close_store(store)
    assert asked == [str(node)]
    assert set(preferred) == {node}
    assert [record.__dict__["fields"] for record in caplog.records if record.__dict__["event"] == "placement"] == [
        {"node": node, "reason": "as the test says"}
    ]


@needs_numa
def test_a_node_that_this_machine_lacks_is_refused_before_anything_is_made() -> None:
    missing = str(max(numa.nodes()) + 1)
    config = DaemonConfig(None, dram_bytes=4 * MIB, numa_node=missing)
    for refusing in (check_here, lambda config: make_store(config, SystemClock())):
        with pytest.raises(ConfigError, match=f"--numa-node is {missing}; this machine has 0") as caught:
            refusing(config)
        assert caught.value.settings == ("numa_node",)


@pytest.mark.parametrize("value", ["", "near", "-1", "1024", "0,1", "٣", "1.0"])
def test_what_is_no_node_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="--numa-node is"):
        DaemonConfig(None, numa_node=value)


@pytest.mark.parametrize("value", ["auto", "off", "0", "1023"])
def test_words_and_numbers_are_nodes(value: str) -> None:
    assert DaemonConfig(None, numa_node=value).numa_node == value
