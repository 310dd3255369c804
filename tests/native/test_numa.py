"""NUMA nodes: what the kernel tells, and memory that is asked for from one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.native import Mapping, numa

PAGE = 4096
MIB = 1 << 20

NODE = next(iter(numa.nodes()), None)
needs_numa = pytest.mark.skipif(NODE is None, reason="this kernel tells of no NUMA nodes")


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("kvstore-test-numa")
    os.ftruncate(fd, MIB)
    yield fd
    os.close(fd)


def policy_of(address: int) -> str:
    """As the kernel tells: ``default``, ``prefer:0``, ..."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if int(line.split()[0], 16) == address:
            return line.split()[1]
    raise AssertionError(f"no mapping starts at {address:#x}")


def machine(folder: Path, nodes: str, cpus: dict[int, str], devices: dict[str, tuple[str, str, int]]) -> Path:
    """A ``/sys`` that tells of these nodes, and of PCI devices by address: vendor, class, node."""
    base = folder / "devices/system/node"
    base.mkdir(parents=True)
    (base / "has_memory").write_text(f"{nodes}\n")
    for node, listed in cpus.items():
        (base / f"node{node}").mkdir()
        (base / f"node{node}/cpulist").write_text(f"{listed}\n")
    for address, (vendor, kind, node) in devices.items():
        place = folder / "bus/pci/devices" / address
        place.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            (place / name).write_text(f"{text}\n")
    return folder


@needs_numa
def test_pages_asked_for_from_a_node_lie_there(memory: int) -> None:
    assert NODE is not None
    mapping = Mapping(memory, MIB, writable=True)
    numa.prefer_node(mapping.address, MIB, NODE)
    mapping.populate(0, MIB // 2)
    found = numa.page_nodes(mapping.address, MIB)
    assert found[: MIB // PAGE // 2].tolist() == [NODE] * (MIB // PAGE // 2)
    assert (found[MIB // PAGE // 2 :] < 0).all()
    assert policy_of(mapping.address) == f"prefer:{NODE}"


@needs_numa
def test_what_was_asked_for_one_mapping_of_a_file_holds_for_all(memory: int) -> None:
    """Clients fill pages of regions, too."""
    assert NODE is not None
    first, second = Mapping(memory, MIB, writable=True), Mapping(memory, MIB, writable=True)
    assert policy_of(second.address) == "default"
    numa.prefer_node(first.address, MIB, NODE)
    assert policy_of(second.address) == f"prefer:{NODE}"


@needs_numa
@pytest.mark.parametrize("node", [-1, 1023, 1024])
def test_a_node_that_is_not_there_is_refused(memory: int, node: int) -> None:
    mapping = Mapping(memory, MIB, writable=True)
    with pytest.raises(OSError, match="node"):
        numa.prefer_node(mapping.address, MIB, node)
    assert policy_of(mapping.address) == "default"


@needs_numa
def test_pages_that_no_process_has_are_told_as_such(memory: int) -> None:
    mapping = Mapping(memory, MIB, writable=False)
    assert (numa.page_nodes(mapping.address, MIB) < 0).all()


def test_nodes_and_cpus_are_read_from_lists(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, "0-1,8", {0: "0-3,8", 1: "4-7,9", 8: ""}, {})
    assert numa.nodes(sysfs) == (0, 1, 8)
    assert [numa.node_cpus(node, sysfs) for node in (0, 1, 8, 2)] == [(0, 1, 2, 3, 8), (4, 5, 6, 7, 9), (), ()]
    assert numa.nodes(tmp_path / "nothing") == ()


def test_a_bus_address_is_known_as_the_driver_writes_it(tmp_path: Path) -> None:
    sysfs = machine(
        tmp_path, "0-1", {}, {"0000:3b:00.0": ("0x10de", "0x030200", 1), "0000:5e:00.0": ("0x1", "0x2", -1)}
    )
    assert numa.pci_node("00000000:3B:00.0", sysfs) == 1
    assert numa.pci_node("0000:3b:00.0", sysfs) == 1
    assert numa.pci_node("00000000:5E:00.0", sysfs) is None
    assert numa.pci_node("00000000:5F:00.0", sysfs) is None
    assert numa.pci_node("nonsense", sysfs) is None
