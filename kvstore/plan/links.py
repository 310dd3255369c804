"""What the driver tells of GPUs and their links to the host, by NVML.

Nothing here fails: what can't be told is ``None``, and ``absent`` says why. NVML is the library of the driver, reached
through ``pynvml`` (the distribution ``nvidia-ml-py``), which is optional.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from kvstore.native import numa

PCIE_GB_PER_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563, 7: 15.125}
"""Each way, after the line's encoding; what packets carry of it is some 90 %."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuLink:
    """One GPU. ``absent``: why a field is None, by its name."""

    ordinal: int
    """NVML's, in the order of the bus; CUDA's may differ, ``uuid`` doesn't."""
    uuid: str
    name: str
    bus_id: str | None = None
    pcie_generation: int | None = None
    """Now: an idle GPU slows its link down."""
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_received_gb_per_s: float | None = None
    """What went to the GPU in the last 20 ms, whoever sent it."""
    pcie_sent_gb_per_s: float | None = None
    c2c: bool | None = None
    """Whether a chip-to-chip link (NVLink-C2C) joins it to the CPU."""
    c2c_links: int | None = None
    c2c_gb_per_s: float | None = None
    """Of all active links together, as the driver tells it."""
    addressing: str | None = None
    """``none``, ``HMM`` (pageable host memory by faults) or ``ATS`` (through the host's page tables)."""
    host_numa_node: int | None = None
    """Where host memory is near. Not ``memory_numa_node``, which is the GPU's own memory where that is a node."""
    memory_numa_node: int | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    other_processes: int | None = None
    """Those that compute on it, without this one."""
    same_switch: tuple[int, ...] = ()
    """Ordinals of GPUs behind the same PCIe switches, which share its uplink."""
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def pcie_gb_per_s(self) -> float | None:
        """What the link could carry each way at its best, in theory; None if its generation or width isn't known."""
        generation, width = self.pcie_generation_max, self.pcie_width_max
        if generation is None or width is None or generation not in PCIE_GB_PER_S_PER_LANE:
            return None
        return PCIE_GB_PER_S_PER_LANE[generation] * width

    @property
    def notes(self) -> tuple[str, ...]:
        """What may make the link slower than it could be, in words."""
        found = []
        if self.same_switch:
            others = ", ".join(map(str, self.same_switch))
            found.append(f"GPU {others} shares the PCIe switch's uplink: what they move at the same time is shared out")
        if self.other_processes:
            found.append(f"{self.other_processes} other processes compute on this GPU and may use its link")
        if self.pcie_width is not None and self.pcie_width_max is not None and self.pcie_width < self.pcie_width_max:
            found.append(f"the link has {self.pcie_width} of {self.pcie_width_max} lanes: look at slot and riser")
        return tuple(found)

    @property
    def words(self) -> str:
        """The link for people."""
        if self.c2c:
            speed = f", {self.c2c_gb_per_s:.0f} GB/s" if self.c2c_gb_per_s else ""
            return f"NVLink-C2C{speed}"
        if self.pcie_gb_per_s is None:
            return "unknown"
        return f"PCIe {self.pcie_generation_max} x{self.pcie_width_max}, {self.pcie_gb_per_s:.1f} GB/s in theory"


@dataclass(frozen=True, slots=True)
class Links:
    """All GPUs, or in ``absent`` why there are none to be seen."""

    gpus: tuple[GpuLink, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    """The latest CUDA that the driver runs."""
    absent: str = ""

    def of_device(self, uuid: str) -> GpuLink | None:
        """The GPU that CUDA calls so, with or without ``GPU-`` before it; None if NVML does not tell of it."""
        return next((gpu for gpu in self.gpus if gpu.uuid and _plain(gpu.uuid) == _plain(uuid)), None)


def read_links(nvml: Any = None) -> Links:
    """Ask the driver; takes some milliseconds for each GPU. ``nvml`` replaces the module ``pynvml``."""
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return Links(
                absent="pynvml is not installed: pip install nvidia-ml-py (part of kvstored's extras cuda13 and cuda12)"
            )
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Links(absent=f"no driver for NVIDIA GPUs answers ({_why(error)}): install one, or pass the GPU through")
    try:
        return _read(nvml)
    except nvml.NVMLError as error:
        return Links(absent=f"the driver answers, but tells of no GPU ({_why(error)})")
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _read(nvml: Any) -> Links:
    asked = _Asked(nvml)
    handles: list[Any] = []
    for ordinal in range(nvml.nvmlDeviceGetCount()):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(ordinal))
        except nvml.NVMLError as error:
            asked.absent[str(ordinal)] = _why(error)
            handles.append(None)
    gpus = tuple(
        GpuLink(ordinal, "", "", absent={"uuid": asked.absent[str(ordinal)]})
        if handle is None
        else _gpu(nvml, ordinal, handles)
        for ordinal, handle in enumerate(handles)
    )
    driver = asked.of("driver", lambda: _text(nvml.nvmlSystemGetDriverVersion()))
    cuda = asked.of("cuda", lambda: _cuda_words(int(nvml.nvmlSystemGetCudaDriverVersion())))
    return Links(gpus, driver, cuda, "" if gpus else "the driver answers, but this machine has no NVIDIA GPU")


def _cuda_words(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


class _Asked:
    """Questions to NVML whose failure is a fact, too."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.absent: dict[str, str] = {}

    def of(self, name: str, ask: Callable[[], T]) -> T | None:
        """The answer, or None with the reason in ``absent``."""
        try:
            return ask()
        except self._nvml.NVMLError as error:
            self.absent[name] = _why(error)
        except AttributeError:
            self.absent[name] = "this version of nvidia-ml-py can't ask: upgrade it"
        except ValueError as error:
            self.absent[name] = str(error)
        return None


def _gpu(nvml: Any, ordinal: int, handles: list[Any]) -> GpuLink:
    handle = handles[ordinal]
    asked = _Asked(nvml)
    bus_id = asked.of("bus_id", lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    memory = asked.of("total_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    c2c = asked.of("c2c", lambda: bool(nvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled))
    links = asked.of("c2c_links", lambda: _c2c_rates(nvml, handle)) if c2c else None
    return GpuLink(
        ordinal=ordinal,
        uuid=asked.of("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))) or "",
        name=asked.of("name", lambda: _text(nvml.nvmlDeviceGetName(handle))) or "",
        bus_id=bus_id,
        pcie_generation=asked.of("pcie_generation", lambda: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))),
        pcie_generation_max=asked.of(
            "pcie_generation_max", lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        ),
        pcie_width=asked.of("pcie_width", lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
        pcie_width_max=asked.of("pcie_width_max", lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
        pcie_received_gb_per_s=asked.of(
            "pcie_received_gb_per_s", lambda: _pcie_gb_per_s(nvml, handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
        ),
        pcie_sent_gb_per_s=asked.of(
            "pcie_sent_gb_per_s", lambda: _pcie_gb_per_s(nvml, handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
        ),
        c2c=c2c,
        c2c_links=len(links) if links is not None else None,
        c2c_gb_per_s=sum(links) if links is not None else None,
        addressing=asked.of("addressing", lambda: _addressing(nvml, handle)),
        host_numa_node=asked.of("host_numa_node", lambda: _host_node(nvml, handle, bus_id)),
        memory_numa_node=asked.of("memory_numa_node", lambda: int(nvml.nvmlDeviceGetNumaNodeId(handle))),
        total_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        other_processes=asked.of("other_processes", lambda: _other_processes(nvml, handle)),
        same_switch=asked.of("same_switch", lambda: _same_switch(nvml, ordinal, handles)) or (),
        absent=asked.absent,
    )


def _pcie_gb_per_s(nvml: Any, handle: Any, counter: int) -> float:
    """NVML counts in KB/s."""
    return int(nvml.nvmlDeviceGetPcieThroughput(handle, counter)) / 1e6


def _c2c_rates(nvml: Any, handle: Any) -> list[float]:
    """GB/s of each active link."""
    (count,) = _fields(nvml, handle, [nvml.NVML_FI_DEV_C2C_LINK_COUNT])
    rates = []
    for link in range(count):
        status, mb_per_s = _fields(
            nvml, handle, [(nvml.NVML_FI_DEV_C2C_LINK_GET_STATUS, link), (nvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW, link)]
        )
        if status == 1:
            rates.append(mb_per_s / 1e3)
    return rates


def _fields(nvml: Any, handle: Any, ids: list[Any]) -> list[int]:
    values = nvml.nvmlDeviceGetFieldValues(handle, ids)
    for value in values:
        if value.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(value.nvmlReturn)
    # Small numbers, whichever of the integer types the driver chose.
    return [int(value.value.uiVal) for value in values]


def _addressing(nvml: Any, handle: Any) -> str:
    modes = {
        nvml.NVML_DEVICE_ADDRESSING_MODE_NONE: "none",
        nvml.NVML_DEVICE_ADDRESSING_MODE_HMM: "HMM",
        nvml.NVML_DEVICE_ADDRESSING_MODE_ATS: "ATS",
    }
    mode = int(nvml.nvmlDeviceGetAddressingMode(handle))
    return modes.get(mode, f"mode {mode}")


def _host_node(nvml: Any, handle: Any, bus_id: str | None) -> int:
    """The kernel knows by the bus; else the driver names the nodes that are near. Raises ValueError if neither does."""
    if bus_id is not None and (node := numa.pci_node(bus_id)) is not None:
        return node
    words = 16
    mask = nvml.nvmlDeviceGetMemoryAffinity(handle, words, nvml.NVML_AFFINITY_SCOPE_NODE)
    nodes = [64 * word + bit for word in range(words) for bit in range(64) if int(mask[word]) >> bit & 1]
    if len(nodes) != 1:
        raise ValueError(f"near nodes are {nodes}, not a single one")
    return nodes[0]


def _other_processes(nvml: Any, handle: Any) -> int:
    return sum(int(process.pid) != os.getpid() for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _same_switch(nvml: Any, ordinal: int, handles: list[Any]) -> tuple[int, ...]:
    switched = (nvml.NVML_TOPOLOGY_INTERNAL, nvml.NVML_TOPOLOGY_SINGLE, nvml.NVML_TOPOLOGY_MULTIPLE)
    return tuple(
        other
        for other, handle in enumerate(handles)
        if handle is not None
        and other != ordinal
        and int(nvml.nvmlDeviceGetTopologyCommonAncestor(handles[ordinal], handle)) in switched
    )


def _text(given: str | bytes) -> str:
    return given.decode() if isinstance(given, bytes) else str(given)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").replace("-", "")
