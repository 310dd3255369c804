"""``kvstore probe``: what it says of this machine, and of a device without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.bench.device_ways import SMALL
from kvstore.cli.probe_machine import registration_facts, seals_note
from kvstore.device.simulated import SimulatedDevice
from kvstore.native import numa
from kvstore.plan.bandwidth import BandwidthTable
from kvstore.plan.links import GpuLink, Links, read_links
from kvstore.plan.ways import Direction, Way
from kvstore.tiers import memfd
from tests.cli.test_cli import kvstore, report

without_gpu = pytest.mark.skipif(bool(read_links().gpus), reason="this machine has a GPU")


def test_this_machine_is_told_of(tmp_path: Path) -> None:
    found = report("probe", "--device", "simulated", "--nvme-dir", str(tmp_path), "--disk-bytes", "16MiB")
    host = found["host"]
    assert [each["node"] for each in host["numa_nodes"]] == list(numa.nodes())
    assert host["copy_gb_per_s"] > 0
    assert host["seals"] == "enforced"
    disk = found["disk"]
    assert "absent" in disk or (disk["read_gb_per_s"] > 0 and disk["write_gb_per_s"] > 0)
    assert list(tmp_path.iterdir()) == []


def test_a_simulated_device_is_measured_and_marked_as_such() -> None:
    device = report("probe", "--device", "simulated")["device"]
    assert device["kind"] == "simulated"
    assert device["registration"] == {"sealed": True, "reason": ""}
    table = BandwidthTable.from_dict(device["bandwidth"])
    assert {direction for direction, _ in table.curves} == set(Direction)
    ways = {way for _, way in table.curves}
    assert ways == set(Way) or all("g++" in reason for reason in table.absent.values())
    assert {row["piece_bytes"] for row in device["figures"]} == set(SMALL.sizes)
    by_use = {each["use"]: each for each in device["advice"]}
    assert by_use["prefix of a prompt, blocks of 2 MiB"]["recommended"].startswith("staged")
    assert all(each["reasons"] for each in by_use.values())
    shown = kvstore("probe", "--device", "simulated").stdout
    assert "these rates are those of this CPU" in shown
    assert "of the simulated device" in shown


def test_loading_is_compared_with_computing() -> None:
    told = ("probe", "--device", "simulated", "--model", "llama-3.1-8b", "--prefill-tokens-per-s")
    slow, fast = (report(*told, rate)["device"] for rate in ("10", "1000000000"))
    assert slow["load_or_recompute"]["load"] is True
    assert slow["load_or_recompute"]["pays_from_prefix_tokens"] == 0
    assert fast["load_or_recompute"]["load"] is False
    assert fast["load_or_recompute"]["pays_from_prefix_tokens"] > 4096
    assert fast["advice"][0]["recommended"] == "recompute"
    assert slow["advice"][0]["recommended"].startswith("staged")
    assert "prefixes worth loading" in kvstore(*told, "10").stdout


@without_gpu
def test_without_a_gpu_it_says_what_is_missing_and_that_is_no_error() -> None:
    done = kvstore("probe")
    assert done.returncode == 0
    assert "--device simulated" in done.stdout
    found = json.loads(kvstore("probe", "--json").stdout)
    assert found["links"]["gpus"] == []
    assert found["links"]["absent"]
    assert "bandwidth" not in found["device"]


@without_gpu
def test_a_gpu_that_was_asked_for_must_be_there() -> None:
    done = kvstore("probe", "--device", "cuda")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "tpu"), "'simulated'"),
        (("--model", "llama-3.1-8b"), "--prefill-tokens-per-s"),
        (("--prefill-tokens-per-s", "1000"), "--model"),
        (("--nvme-dir", "/nowhere/at/all"), "does not exist"),
        (("--disk-bytes", "many"), "not a size"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], words: str) -> None:
    done = kvstore("probe", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_memory_that_cannot_be_registered_read_only_is_told() -> None:
    device = SimulatedDevice(total_bytes=1 << 20, can_register_read_only=False)
    told = registration_facts(device)
    assert told["sealed"] is False
    assert "read-only" in told["reason"]
    assert "--isolation tenant" in told["reason"]
    device.close()


def test_seals_that_do_not_hold_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seals_note() == ""
    monkeypatch.setattr(memfd, "seal_read_only", lambda _: None)
    assert "can be mapped writable" in seals_note()

    def refused(fd: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memfd, "seal_read_only", refused)
    assert "can't be sealed (Invalid argument" in seals_note()


@pytest.mark.parametrize(
    ("nvml", "cuda", "same"),
    [
        ("GPU-0a1b2c3d-0000-1111-2222-333344445555", "0a1b2c3d-0000-1111-2222-333344445555", True),
        ("GPU-0A1B2C3D-0000-1111-2222-333344445555", "GPU-0a1b2c3d-0000-1111-2222-333344445555", True),
        ("GPU-0a1b2c3d-0000-1111-2222-333344445555", "0a1b2c3d-0000-1111-2222-333344445556", False),
    ],
)
def test_a_gpu_is_known_by_its_uuid_however_it_is_written(nvml: str, cuda: str, same: bool) -> None:
    links = Links((GpuLink(0, nvml, "a GPU"),))
    assert (links.of_device(cuda) is not None) is same
