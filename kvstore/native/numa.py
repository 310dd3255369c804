"""NUMA nodes of this machine, and memory near one of them, by the kernel's calls.

A machine without NUMA is one with the single node 0, or none at all where the kernel tells of none.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.native.mapping import PAGE_BYTES

_SYSFS = Path("/sys")
_CALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}
"""``mbind`` and ``move_pages``."""
_MPOL_PREFERRED = 1
_MASK_BITS = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def nodes(sysfs: Path = _SYSFS) -> tuple[int, ...]:
    """Nodes with memory, ascending; empty where the kernel tells of none."""
    return _listed(sysfs / "devices/system/node/has_memory")


def node_cpus(node: int, sysfs: Path = _SYSFS) -> tuple[int, ...]:
    """CPUs of a node; none for one that is memory only, as a GPU's may be."""
    return _listed(sysfs / f"devices/system/node/node{node}/cpulist")


def pci_node(bus_id: str, sysfs: Path = _SYSFS) -> int | None:
    """The node near a PCI device, such as ``00000000:3B:00.0``; None if the kernel does not know."""
    domain, colon, rest = bus_id.lower().partition(":")
    try:
        name = f"{int(domain, 16):04x}{colon}{rest}"
        node = int((sysfs / "bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, length_bytes: int, node: int) -> None:
    """Pages of a mapped range that don't exist yet are to come from a node, or from others when it is full.

    For shared mappings of a file in memory this holds for whoever fills the pages. ``address`` must lie on a page.
    Pages that exist stay where they are. Raises OSError: ENOSYS where the kernel has no NUMA, EINVAL for a node
    that is not there, EPERM in containers that forbid the call.
    """
    if not 0 <= node < _MASK_BITS:
        raise OSError(22, f"node {node} is none that a machine can have")
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    _call(
        0, "prefer a node for memory",
        ctypes.c_void_p(address), ctypes.c_ulong(length_bytes), ctypes.c_int(_MPOL_PREFERRED),
        mask, ctypes.c_ulong(_MASK_BITS + 1), ctypes.c_uint(0),
    )  # fmt: skip


def page_nodes(address: int, length_bytes: int) -> NDArray[np.int32]:
    """The node of each page of a range of this process, int32 ``[pages]``; negative (an errno) for pages that are not
    there, -2 or -14. Raises OSError as ``prefer_node`` does."""
    n_pages = -(-length_bytes // PAGE_BYTES)
    pages = np.uint64(address) + np.arange(n_pages, dtype=np.uint64) * np.uint64(PAGE_BYTES)
    found = np.full(n_pages, -2, np.int32)
    _call(
        1, "ask where pages lie",
        ctypes.c_int(0), ctypes.c_ulong(n_pages), ctypes.c_void_p(pages.ctypes.data),
        ctypes.c_void_p(None), ctypes.c_void_p(found.ctypes.data), ctypes.c_int(0),
    )  # fmt: skip
    return found


def _call(which: int, what: str, *arguments: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(38, f"can't {what} on {platform.machine()}")
    if _libc.syscall(ctypes.c_long(numbers[which]), *arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"can't {what}: {os.strerror(code)}")


def _listed(path: Path) -> tuple[int, ...]:
    """Numbers of a list such as ``0-3,8``."""
    try:
        text = path.read_text().strip()
    except OSError:
        return ()
    numbers: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)
