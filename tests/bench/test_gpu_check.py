"""The check for a real GPU: its own code, over the simulated device."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.bench import gpu_check, gpu_steps
from kvstore.bench.gpu_check import CheckOptions, check, wanted
from kvstore.cli.daemon_process import own_daemon
from kvstore.device import Device
from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import BadInputError, IntegrityError


def check_simulated(tmp_path: Path, *steps: str, **options: Any) -> dict[str, Any]:
    report = tmp_path / "report.json"
    found = check(CheckOptions(device="simulated", steps=steps, report=report, **options), own_daemon)
    assert json.loads(report.read_text()) == found
    return found


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    return {name: each["status"] for name, each in found["steps"].items()}


def test_facts_rates_the_daemons_memory_and_another_process(tmp_path: Path) -> None:
    steps = ("facts", "bandwidth", "arena", "staged", "ipc", "together")
    found = check_simulated(tmp_path, *steps)
    reasons = {name: each["reason"] for name, each in found["steps"].items()}
    assert outcomes(found) == dict.fromkeys(steps, "passed"), reasons
    figures = {name: each["figures"] for name, each in found["steps"].items()}
    assert figures["facts"]["device"]["kind"] == "simulated"
    assert {row["way"] for row in figures["bandwidth"]["rows"]} >= {"copy", "batch"}
    assert str(figures["bandwidth"]["kernel_blocks"]) in figures["bandwidth"]["gb_per_s_by_kernel_blocks"]
    assert figures["arena"]["registered_bytes"] >= figures["arena"]["bytes"] > 0
    assert [row["piece_bytes"] for row in figures["staged"]["rows"]] == [16 << 10, 64 << 10]
    assert figures["ipc"]["bytes"] > 0
    assert len(figures["together"]["alone_gb_per_s"]) == 2
    assert found["passed"]
    assert found["wanted"]
    assert all(each["passed"] is None for each in found["wanted"]), "rates without a GPU are not judged"


def test_attention_and_kernels_agree_with_numpy(tmp_path: Path) -> None:
    found = check_simulated(tmp_path, "attention", "kernels", "sanitizer")
    reasons = {name: each["reason"] for name, each in found["steps"].items()}
    assert outcomes(found) == {"attention": "passed", "kernels": "passed", "sanitizer": "skipped"}, reasons
    places = found["steps"]["attention"]["figures"]["places"]
    assert set(places) == {"zero-copy", "staged", "device memory"}
    assert all(each["error"] < 1e-3 and each["gb_per_s"] > 0 for each in places.values())
    assert reasons["sanitizer"]


def test_the_tests_of_the_checkout_are_run_and_counted(tmp_path: Path) -> None:
    few = "tests/plan/test_prefill.py::test_a_known_model_over_a_known_link"
    found = check_simulated(tmp_path, "tests", tests=(few,))
    assert found["steps"]["tests"]["figures"] == {"passed": 1}
    assert (outcomes(found), found["passed"]) == ({"tests": "passed"}, True)
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_one(): assert False\n\ndef test_two(): pass\n")
    found = check_simulated(tmp_path, "tests", tests=(str(failing),))
    assert found["steps"]["tests"]["figures"] == {"failed": 1, "passed": 1}
    assert (outcomes(found), found["passed"]) == ({"tests": "failed"}, False)
    assert "assert False" in found["steps"]["tests"]["reason"]
    found = check_simulated(tmp_path, "tests", tests=("tests/nowhere",))
    assert (outcomes(found), found["passed"]) == ({"tests": "not run"}, False)
    skipping = tmp_path / "test_skipping.py"
    skipping.write_text("import pytest\n\ndef test_one(): pytest.skip('no GPU')\n")
    found = check_simulated(tmp_path, "tests", tests=(str(skipping),))
    assert (outcomes(found), found["passed"]) == ({"tests": "not run"}, False)
    assert found["steps"]["tests"]["figures"] == {"skipped": 1}


def test_without_a_checkout_there_are_no_tests_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "CHECKOUT", tmp_path)
    found = check_simulated(tmp_path, "tests")
    assert (outcomes(found), found["passed"]) == ({"tests": "skipped"}, True)


def test_what_only_a_gpu_shows_is_among_the_tests() -> None:
    for path in ("tests/engine_adapter/gpu/test_on_gpu.py", "tests/engine_adapter/attention/test_on_gpu.py"):
        assert any(path.startswith(each) for each in gpu_check.TESTS)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--collect-only", "-n", "0"]
        for which, collects in (("cuda", True), ("not cuda", False)):
            code, output = gpu_check._run([*command, "-k", which, path], 60.0, gpu_check.CHECKOUT)
            assert (code == 0) == collects, output


def test_all_steps_have_their_time() -> None:
    assert sum(step.limit_s for step in gpu_check.STEPS) <= gpu_check.TOTAL_S < 420


def test_without_pytest_the_tests_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda _: None)
    found = check_simulated(tmp_path, "tests", tests=("tests/plan/test_prefill.py",))
    assert (outcomes(found), found["passed"]) == ({"tests": "skipped"}, True)
    assert "pytest is not installed" in found["steps"]["tests"]["reason"]
    on_a_gpu = gpu_check._run_tests(CheckOptions(device="cuda", tests=("tests/plan/test_prefill.py",)), 60.0)
    assert on_a_gpu["status"] == "not run", "what was to be tested on a GPU was not"


def test_a_step_that_hangs_is_killed_and_the_next_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gpu_check._run

    def hanging(command: list[str], limit_s: float, folder: Path | None = None) -> tuple[int | None, str]:
        if '"kernels"' in command[-1]:
            code = "import time; print('about to hang', flush=True); time.sleep(600)"
            return real([sys.executable, "-c", code], 2.0, folder)
        return real(command, limit_s, folder)

    monkeypatch.setattr(gpu_check, "_run", hanging)
    found = check_simulated(tmp_path, "kernels", "sanitizer")
    assert outcomes(found) == {"kernels": "timed out", "sanitizer": "skipped"}
    assert "about to hang" in found["steps"]["kernels"]["reason"]
    assert found["steps"]["kernels"]["took_s"] < 20
    assert not found["passed"]


def test_a_step_whose_process_dies_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gpu_check._run
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(gpu_check, "_run", lambda _, limit_s: real([sys.executable, "-c", code], limit_s))
    found = check_simulated(tmp_path, "facts")
    assert outcomes(found) == {"facts": "failed"}
    assert "ended with -11" in found["steps"]["facts"]["reason"]


def test_the_report_is_there_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, seen = tmp_path / "deep" / "report.json", []
    monkeypatch.setattr(gpu_check, "_take", lambda name, *_: gpu_check._skipped(name))
    options = CheckOptions(device="simulated", steps=("facts", "ipc", "tests"), report=report)
    check(options, own_daemon, lambda _: seen.append(list(json.loads(report.read_text())["steps"])))
    assert seen == [["facts"], ["facts", "tests"], ["facts", "tests", "ipc"]]


def test_when_the_time_is_over_steps_are_left_out(tmp_path: Path) -> None:
    found = check_simulated(tmp_path, "facts", "kernels", total_s=0.0)
    assert outcomes(found) == {"facts": "not run", "kernels": "not run"}
    assert not found["passed"]
    assert "no time was left" in found["steps"]["facts"]["reason"]


def test_a_daemon_that_does_not_start_fails_its_step(tmp_path: Path) -> None:
    @contextmanager
    def none(arguments: list[str]) -> Iterator[Path]:
        with own_daemon([*arguments, "--dram", "1KiB"]) as socket:
            yield socket

    found = check(CheckOptions(device="simulated", steps=("arena",), report=tmp_path / "report.json"), none)
    assert outcomes(found) == {"arena": "failed"}
    assert "did not start" in found["steps"]["arena"]["reason"]


def test_a_gpu_that_is_not_there_fails_what_needs_it(tmp_path: Path) -> None:
    found = check(CheckOptions(device="cuda:99", report=tmp_path / "report.json"), own_daemon)
    assert outcomes(found) == {"facts": "failed"}, "no other step is taken"
    assert "DeviceError" in found["steps"]["facts"]["reason"]
    assert not found["passed"]


@pytest.mark.parametrize("step", ["bandwidth", "arena", "staged", "kernels"])
def test_kernels_that_do_nothing_are_caught_by_each_step_that_uses_them(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle(name: str) -> Device:
        return SimulatedDevice(launcher=lambda *_: None)

    monkeypatch.setattr(gpu_steps, "open_device", idle)
    take: Callable[[dict[str, str]], Any] = gpu_steps.STEPS[step]
    with own_daemon(["--dram", "64MiB", "--no-prefault"]) as socket, pytest.raises(IntegrityError):
        take({"step": step, "device": "simulated", "socket": str(socket)})


def test_memory_that_cannot_be_registered_is_read_staged_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "open_device", lambda _: SimulatedDevice(can_register_read_only=False))
    with own_daemon(["--dram", "64MiB", "--no-prefault"]) as socket:
        request = {"device": "simulated", "socket": str(socket)}
        with pytest.raises(gpu_steps.Skipped, match="read-only"):
            gpu_steps.STEPS["arena"](request)
        found = gpu_steps.STEPS["staged"](request)
    assert "read-only" in found["not_registered"]
    assert all(row["gb_per_s"] > 0 for row in found["rows"])


def test_memory_that_cannot_be_sealed_for_a_device_is_read_in_place_unsealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []

    @contextmanager
    def daemon(arguments: list[str]) -> Iterator[Path]:
        given.append(arguments)
        with own_daemon(arguments) as socket:
            yield socket

    def take(name: str, options: CheckOptions, limit_s: float, socket: str) -> dict[str, Any]:
        request = {"device": options.device, "socket": socket}
        try:
            return {"status": "passed", "reason": "", "figures": gpu_steps.STEPS[name](request)}
        except gpu_steps.Skipped as why:
            return {"status": "skipped", "reason": str(why), "figures": {}}

    monkeypatch.setattr(gpu_steps, "open_device", lambda _: SimulatedDevice(can_register_read_only=False))
    monkeypatch.setattr(gpu_check, "_run_step", take)
    found = check(CheckOptions(device="simulated", steps=("arena",), report=tmp_path / "report.json"), daemon)
    assert outcomes(found) == {"arena": "passed"}, found
    assert ["--isolation" in arguments for arguments in given] == [False, True]
    assert found["steps"]["arena"]["reason"] == "with --isolation tenant."
    assert found["steps"]["arena"]["figures"]["registered_bytes"] > 0


def rates(**shares: dict[int, float]) -> dict[str, Any]:
    """What the step ``bandwidth`` says of these ways, loading."""
    rows = [
        {
            "direction": "load",
            "way": way.replace("_", "-"),
            "piece_bytes": size,
            "share_of_link": share,
            "gb_per_s": 1.0,
        }
        for way, each in shares.items()
        for size, share in each.items()
    ]
    return {"bandwidth": {"figures": {"rows": rows}}}


def test_rates_are_judged_by_the_best_staged_way_at_every_large_size() -> None:
    page, large = 16 << 10, 1 << 20
    good = rates(
        batch={page: 0.3, large: 0.95, 4 * large: 0.99},
        kernel={page: 0.8, large: 0.85, 4 * large: 0.85},
        zero_copy={page: 0.82, large: 0.5, 4 * large: 0.5},
    )
    assert [each["passed"] for each in wanted(good, simulated=False)] == [True, True, True]
    assert [each["got"] for each in wanted(good, simulated=False)] == [0.95, 0.8, 0.82]
    assert [each["passed"] for each in wanted(good, simulated=True)] == [None, None, None]
    worse = rates(batch={page: 0.3, large: 0.95, 4 * large: 0.89}, kernel={page: 0.69}, zero_copy={page: 0.79})
    assert [each["passed"] for each in wanted(worse, simulated=False)] == [False, False, False]
    assert [each["passed"] for each in wanted(rates(copy={4096: 0.1}), simulated=False)] == [False, False, False]
    assert [each["passed"] for each in wanted({"bandwidth": {"figures": {}}}, simulated=False)] == [False] * 3
    assert wanted({"bandwidth": {"figures": {}}}, simulated=True) == []
    assert wanted({}, simulated=False) == []


def test_the_reader_of_engines_is_judged_by_its_own_rates() -> None:
    rows = rates(reader={16 << 10: 0.71, 1 << 20: 0.88})["bandwidth"]
    found = wanted({"staged": rows}, simulated=False)
    assert [(each["got"], each["passed"]) for each in found] == [(0.88, False), (0.71, True)]


def test_a_rate_that_is_not_reached_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = rates(batch={16 << 10: 0.1})["bandwidth"] | {"status": "passed", "reason": ""}
    monkeypatch.setattr(gpu_check, "_take", lambda *_: dict(slow))
    found = check(CheckOptions(device="cuda:0", steps=("bandwidth",), report=tmp_path / "report.json"), own_daemon)
    assert not found["passed"]


def test_unknown_steps_are_refused() -> None:
    with pytest.raises(BadInputError, match="there are facts, kernels"):
        CheckOptions(steps=("everything",))
