"""What this machine offers a store: memory, nodes, seals, disk, device support. What can't be had has a reason."""

from __future__ import annotations

import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.bench.disk_limit import LimitFile, disk_limit
from kvstore.bench.limits import measure_copy
from kvstore.config import DaemonConfig
from kvstore.device.cuda import gpus
from kvstore.device.seam import Device
from kvstore.errors import DeviceError, KVStoreError
from kvstore.native import Mapping, backend, huge_pages_note, numa
from kvstore.plan.placement import place
from kvstore.tiers import memfd

DISK_BLOCK_BYTES = 1 << 20
_DISK_DEPTH = 8
_SYNC_BYTES = 64 << 20
_TRIAL_BYTES = 1 << 20


def host_facts(copy_bytes: int) -> dict[str, Any]:
    """Processors, memory and what the kernel allows; ``copy_bytes`` are copied to measure how fast that goes."""
    nodes = numa.nodes()
    placement = place(DaemonConfig(None).numa_node)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "numa_nodes": [{"node": node, "cpus": list(numa.node_cpus(node))} for node in nodes],
        "numa_node_auto": {"node": placement.node, "reason": placement.reason},
        "huge_pages_note": huge_pages_note(),
        "seals": seals_note() or "enforced",
        "copy_backend": backend(),
        "copy_gb_per_s": measure_copy(copy_bytes, 1, repeats=5),
    }


def seals_note() -> str:
    """Empty where the kernel refuses writable mappings of sealed memory; else why clients aren't kept apart."""
    try:
        fd = memfd.create("kvstore-probe", _TRIAL_BYTES)
    except OSError as error:
        return f"no memory files ({error.strerror}): the daemon can't run here"
    try:
        memfd.seal_read_only(fd)
        with suppress(PermissionError):
            Mapping(fd, _TRIAL_BYTES, writable=True)
            return "sealed memory can be mapped writable: a client could change what others read"
    except OSError as error:
        return f"memory can't be sealed ({error.strerror}; Linux 5.1 can): a client could change what others read"
    finally:
        os.close(fd)
    return ""


def disk_facts(directory: Path, n_bytes: int) -> dict[str, Any]:
    """Direct reads and writes of a file of ``n_bytes`` in ``directory``, which is removed. Blocks for seconds."""
    try:
        with LimitFile(directory, n_bytes) as file:
            limit = disk_limit(file, _DISK_DEPTH, _SYNC_BYTES)
            write_s, read_s = (each(file.n_bytes, DISK_BLOCK_BYTES) for each in (limit.write_s, limit.read_s))
    except KVStoreError as error:
        return {"directory": str(directory), "absent": str(error)}
    return {
        "directory": str(directory),
        "measured_with": limit.name,
        "free_bytes": shutil.disk_usage(directory).free,
        "read_gb_per_s": file.n_bytes / read_s / 1e9,
        "write_gb_per_s": file.n_bytes / write_s / 1e9,
    }


def cuda_missing() -> str:
    """Why CUDA shows no GPU here, and what to do; empty where it shows one."""
    try:
        return "" if gpus() else "CUDA shows no GPU"
    except DeviceError as error:
        return str(error)


def registration_facts(device: Device) -> dict[str, Any]:
    """Whether memory that others wrote and the daemon sealed can be given to the device as it is: tried."""
    fd = memfd.create("kvstore-probe", _TRIAL_BYTES)
    try:
        writable = Mapping(fd, _TRIAL_BYTES, writable=True)
        writable.populate()
        memfd.seal_read_only(fd)
        shown = Mapping(fd, _TRIAL_BYTES, writable=False)
        try:
            device.host_register(shown.address, _TRIAL_BYTES, read_only=True)
            device.host_unregister(shown.address)
        except KVStoreError as error:
            return {"sealed": False, "reason": f"{error}; or `--isolation tenant` leaves a tenant's memory unsealed"}
        return {"sealed": True, "reason": ""}
    finally:
        os.close(fd)
