"""Facts of links, from recorded answers of NVML: only a machine with a GPU has real ones."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.native import numa
from kvstore.plan import links as links_module
from kvstore.plan.links import GpuLink, read_links

NOT_SUPPORTED, GPU_IS_LOST, LIBRARY_NOT_FOUND = 3, 15, 12
WORDS = {NOT_SUPPORTED: "Not Supported", GPU_IS_LOST: "GPU is lost", LIBRARY_NOT_FOUND: "NVML Shared Library Not Found"}


class NVMLError(Exception):
    """As pynvml's, which is made of a number."""

    def __str__(self) -> str:
        return WORDS[self.args[0]]


class Recorded:
    """Answers of NVML by function, as a value for every GPU or one for each; an integer error is raised.

    Constants have the values of nvml.h. What was not recorded does not exist, as in an old pynvml.
    """

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_C2C_LINK_COUNT, NVML_FI_DEV_C2C_LINK_GET_STATUS, NVML_FI_DEV_C2C_LINK_GET_MAX_BW = 170, 171, 172
    NVML_DEVICE_ADDRESSING_MODE_NONE, NVML_DEVICE_ADDRESSING_MODE_HMM, NVML_DEVICE_ADDRESSING_MODE_ATS = 0, 1, 2
    NVML_AFFINITY_SCOPE_NODE = 0
    NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE = 0, 10, 20

    def __init__(self, gpus: int, answers: dict[str, Any], fields: dict[tuple[int, int], tuple[int, int]]) -> None:
        self.open = 0
        self._gpus = gpus
        self._answers = answers
        self._fields = fields

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        if error := self._answers.get("nvmlInit"):
            raise NVMLError(error)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self._gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index in self._answers.get("lost", ()):
            raise NVMLError(GPU_IS_LOST)
        return index

    def nvmlDeviceGetFieldValues(self, _: int, ids: list[Any]) -> list[Any]:  # noqa: N802
        found = []
        for each in ids:
            error, value = self._fields.get(each if isinstance(each, tuple) else (each, 0), (NOT_SUPPORTED, 0))
            found.append(SimpleNamespace(nvmlReturn=error, value=SimpleNamespace(uiVal=value)))
        return found

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._answers:
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            given = self._answers[name]
            given = given(*arguments) if callable(given) else given
            if isinstance(given, NVMLError):
                raise given
            return given

        return answer


def h100_pair(**other: Any) -> Recorded:
    """Two H100 over PCIe 5, behind one switch; the kernel knows no node, the driver names node 1."""
    answers = {
        "nvmlSystemGetDriverVersion": "580.65.06",
        "nvmlSystemGetCudaDriverVersion": 13000,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": b"NVIDIA H100 PCIe",
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"0000FFFF:{handle:02X}:00.0".encode()),
        "nvmlDeviceGetCurrPcieLinkGeneration": 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetPcieThroughput": lambda _, counter: (2_000_000, 24_000_000)[counter],
        "nvmlDeviceGetC2cModeInfoV": NVMLError(NOT_SUPPORTED),
        "nvmlDeviceGetAddressingMode": 1,
        "nvmlDeviceGetNumaNodeId": NVMLError(NOT_SUPPORTED),
        "nvmlDeviceGetMemoryAffinity": lambda _, words, __: [2] + [0] * (words - 1),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, used=3 << 30),
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)],
        "nvmlDeviceGetTopologyCommonAncestor": 10,
    }
    return Recorded(2, answers | other, {})


def test_a_gpu_behind_pcie() -> None:
    nvml = h100_pair()
    links = read_links(nvml)
    assert (links.driver, links.cuda, links.absent, nvml.open) == ("580.65.06", "13.0", "", 0)
    gpu = links.gpus[1]
    assert (gpu.ordinal, gpu.uuid, gpu.name, gpu.bus_id) == (1, "GPU-1", "NVIDIA H100 PCIe", "0000FFFF:01:00.0")
    assert (gpu.pcie_generation, gpu.pcie_generation_max, gpu.pcie_width, gpu.pcie_width_max) == (1, 5, 16, 16)
    assert gpu.pcie_gb_per_s == pytest.approx(63.0, abs=0.1), "what it can do, not what it does while idle"
    assert (gpu.pcie_sent_gb_per_s, gpu.pcie_received_gb_per_s) == pytest.approx((2.0, 24.0))
    assert (gpu.addressing, gpu.host_numa_node, gpu.memory_numa_node) == ("HMM", 1, None)
    assert (gpu.total_bytes, gpu.used_bytes, gpu.other_processes) == (80 << 30, 3 << 30, 1)
    assert gpu.same_switch == (0,)
    assert [note.split()[0] for note in gpu.notes] == ["GPU", "1"], "a link that sleeps has its lanes all the same"
    assert gpu.absent == {"c2c": "Not Supported", "memory_numa_node": "Not Supported"}
    assert gpu.words == "PCIe 5 x16, 63.0 GB/s in theory"


def test_a_grace_hopper_has_a_chip_to_chip_link_of_its_active_lanes() -> None:
    c2c = {(170, 0): (0, 10)} | {(171, link): (0, int(link < 9)) for link in range(10)}
    c2c |= {(172, link): (0, 44712) for link in range(10)}
    nvml = h100_pair(
        nvmlDeviceGetC2cModeInfoV=SimpleNamespace(isC2cEnabled=1),
        nvmlDeviceGetAddressingMode=2,
        nvmlDeviceGetNumaNodeId=4,
        nvmlDeviceGetMemoryAffinity=lambda _, words, __: [1] + [0] * (words - 1),
    )
    nvml._fields = c2c
    gpu = read_links(nvml).gpus[0]
    assert (gpu.c2c, gpu.c2c_links) == (True, 9)
    assert gpu.c2c_gb_per_s == pytest.approx(9 * 44.712)
    assert (gpu.addressing, gpu.host_numa_node, gpu.memory_numa_node) == ("ATS", 0, 4)
    assert gpu.words == "NVLink-C2C, 402 GB/s"


def test_a_chip_to_chip_link_whose_speed_is_not_told_is_one_all_the_same() -> None:
    gpu = read_links(h100_pair(nvmlDeviceGetC2cModeInfoV=SimpleNamespace(isC2cEnabled=1))).gpus[0]
    assert (gpu.c2c, gpu.c2c_links, gpu.c2c_gb_per_s, gpu.words) == (True, None, None, "NVLink-C2C")
    assert gpu.absent["c2c_links"] == "Not Supported"


def test_the_kernel_knows_the_node_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "pci_node", lambda bus_id: 3 if bus_id == "0000FFFF:00:00.0" else None)
    first, second = read_links(h100_pair()).gpus
    assert (first.host_numa_node, second.host_numa_node) == (3, 1)


def test_several_near_nodes_are_no_node() -> None:
    nvml = h100_pair(nvmlDeviceGetMemoryAffinity=lambda _, words, __: [0, 1 << 3, 0b10] + [0] * (words - 3))
    gpu = read_links(nvml).gpus[0]
    assert gpu.host_numa_node is None
    assert "[67, 129]" in gpu.absent["host_numa_node"]


def test_whatever_the_driver_cannot_tell_is_absent_with_a_reason() -> None:
    """Every question fails, in one of two ways; nothing is raised, and no reason is missing."""
    for refusal, words in ((NVMLError(NOT_SUPPORTED), "Not Supported"), (None, "upgrade it")):
        nvml = Recorded(1, dict.fromkeys(h100_pair()._answers, refusal) if refusal else {}, {})
        (gpu,) = read_links(nvml).gpus
        told = {each.name for each in fields(GpuLink) if getattr(gpu, each.name) not in (None, "", ())}
        assert told == {"ordinal", "absent"}
        unsaid = {"used_bytes", "c2c_links", "c2c_gb_per_s", "same_switch", "ordinal", "absent"}
        assert set(gpu.absent) == {each.name for each in fields(GpuLink)} - unsaid
        assert all(words in reason for reason in gpu.absent.values()), gpu.absent
        assert gpu.words == "unknown"


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    first, second = read_links(h100_pair(lost=(0,))).gpus
    assert (first.uuid, first.absent) == ("", {"uuid": "GPU is lost"})
    assert second.uuid == "GPU-1"
    assert second.same_switch == ()


def test_a_link_with_fewer_lanes_than_it_could_have_is_noted() -> None:
    alone = h100_pair(
        nvmlDeviceGetTopologyCommonAncestor=40,
        nvmlDeviceGetComputeRunningProcesses=[],
        nvmlDeviceGetCurrPcieLinkWidth=8,
    )
    assert read_links(alone).gpus[0].notes == ("the link has 8 of 16 lanes: look at slot and riser",)
    assert GpuLink(0, "", "").notes == ()


def test_without_a_driver_it_says_what_is_missing() -> None:
    nvml = h100_pair(nvmlInit=LIBRARY_NOT_FOUND)
    links = read_links(nvml)
    assert links.gpus == ()
    assert "no driver" in links.absent
    assert "Library Not Found" in links.absent
    assert nvml.open == 0


def test_a_driver_without_gpus() -> None:
    links = read_links(Recorded(0, {}, {}))
    assert (links.gpus, links.driver) == ((), None)
    assert "no NVIDIA GPU" in links.absent


def test_this_machine_is_told_of_without_an_error() -> None:
    links = read_links()
    assert links.gpus or links.absent


def names_used() -> set[str]:
    """Everything that is asked of the module ``pynvml``."""
    tree = ast.parse(Path(links_module.__file__).read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nvml"
    }


def test_every_name_asked_of_nvml_exists() -> None:
    pynvml = import_module("pynvml")
    used = names_used()
    assert len(used) > 25
    assert {name for name in used if not hasattr(pynvml, name)} == set()


def test_recorded_constants_are_those_of_nvml() -> None:
    pynvml = import_module("pynvml")
    constants = {name: value for name, value in vars(Recorded).items() if name.startswith("NVML_")}
    assert constants
    assert {name: getattr(pynvml, name) for name in constants} == constants
