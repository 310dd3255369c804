"""On which NUMA node the DRAM tier should lie: near the GPUs that read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore.native import numa

_NVIDIA, _DISPLAY = 0x10DE, 0x03
_SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Placement:
    """``node`` is None where memory goes wherever the kernel puts it; ``reason`` says why it is what it is."""

    node: int | None
    reason: str


def place(numa_node: str, sysfs: Path = _SYSFS) -> Placement:
    """What the setting ``dram.numa_node`` comes to on this machine: ``auto``, ``off``, or a node's number."""
    if numa_node == "off":
        return Placement(None, "placement is switched off")
    nodes = numa.nodes(sysfs)
    if len(nodes) < 2:
        return Placement(None, "this machine has a single NUMA node")
    if numa_node != "auto":
        return Placement(int(numa_node), "as configured")
    near = gpu_nodes(sysfs)
    if not near:
        return Placement(None, "no GPU is seen, so no node is nearer than another")
    if len(set(near.values())) > 1:
        places = ", ".join(f"{name} near {node}" for name, node in near.items())
        return Placement(None, f"GPUs lie near several nodes ({places}): configure one, with a daemon for each")
    return Placement(next(iter(near.values())), f"near the GPU at {next(iter(near))}")


def gpu_nodes(sysfs: Path = _SYSFS) -> dict[str, int]:
    """The node of every NVIDIA GPU on the bus, by its address there; no driver is asked."""
    found = {}
    for device in sorted(sysfs.glob("bus/pci/devices/*")):
        try:
            vendor, kind = (int((device / name).read_text(), 16) for name in ("vendor", "class"))
        except (OSError, ValueError):
            continue
        if vendor == _NVIDIA and kind >> 16 == _DISPLAY and (node := numa.pci_node(device.name, sysfs)) is not None:
            found[device.name] = node
    return found
