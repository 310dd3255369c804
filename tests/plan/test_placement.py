"""Where the DRAM tier's memory should lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.plan.placement import gpu_nodes, place
from tests.native.test_numa import machine

GPU, NIC = ("0x10de", "0x030200"), ("0x15b3", "0x020000")
AUDIO = ("0x10de", "0x040300")
"""A card's own sound device is no GPU."""


def two_nodes(folder: Path, gpus: dict[str, int], nodes: str = "0-1") -> Path:
    devices = {address: (*GPU, node) for address, node in gpus.items()}
    return machine(folder, nodes, {}, devices | {"0000:01:00.0": (*NIC, 0), "0000:3b:00.1": (*AUDIO, 0)})


@pytest.mark.parametrize(
    ("setting", "gpus", "node", "words"),
    [
        ("auto", {"0000:3b:00.0": 1, "0000:5e:00.0": 1}, 1, "near the GPU at 0000:3b:00.0"),
        ("auto", {}, None, "no GPU is seen"),
        ("auto", {"0000:3b:00.0": -1}, None, "no GPU is seen"),
        ("auto", {"0000:3b:00.0": 0, "0000:af:00.0": 1}, None, "0000:3b:00.0 near 0, 0000:af:00.0 near 1"),
        ("0", {"0000:3b:00.0": 1}, 0, "as configured"),
        ("off", {"0000:3b:00.0": 1}, None, "switched off"),
    ],
)
def test_the_node_is_that_of_the_gpus(
    tmp_path: Path, setting: str, gpus: dict[str, int], node: int | None, words: str
) -> None:
    placement = place(setting, two_nodes(tmp_path, gpus))
    assert placement.node == node
    assert words in placement.reason


@pytest.mark.parametrize("setting", ["auto", "0"])
def test_with_a_single_node_there_is_nothing_to_choose(tmp_path: Path, setting: str) -> None:
    assert place(setting, two_nodes(tmp_path, {"0000:3b:00.0": 0}, nodes="0")).node is None


def test_a_gpu_whose_own_memory_is_a_node_is_near_its_host_node(tmp_path: Path) -> None:
    """Grace Hopper: node 1 is HBM; the bus says that the GPU is near node 0."""
    sysfs = two_nodes(tmp_path, {"0009:01:00.0": 0})
    assert gpu_nodes(sysfs) == {"0009:01:00.0": 0}
    assert place("auto", sysfs).node == 0
