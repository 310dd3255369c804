"""All that needs a GPU, checked within seven minutes: ``python bench/gpu_check.py`` or ``kvstore bench gpu``.

Each step is a process of its own with a time limit, and the report is written after each, so that a step that hangs,
crashes or is killed costs nothing but itself. With ``device`` "simulated" the same steps run without a GPU, small: that
shows that they work, and says nothing about speed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvstore.bench.report import write_json
from kvstore.config import format_size
from kvstore.errors import BadInputError, KVStoreError

TOTAL_S = 400.0
CHECKOUT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/device/test_conformance.py",
    "tests/device/kernels/test_copies.py",
    "tests/device/kernels/test_pages.py",
    "tests/engine_adapter/gpu",
    "tests/engine_adapter/attention/test_on_gpu.py",
)
TAIL_CHARS = 2000
PAGE_BYTES, LARGE_BYTES = 16 << 10, 1 << 20
WANTED = (
    ("bandwidth", LARGE_BYTES, "staged", 0.9),
    ("bandwidth", PAGE_BYTES, "staged", 0.7),
    ("bandwidth", PAGE_BYTES, "zero-copy", 0.8),
    ("staged", LARGE_BYTES, "reader", 0.9),
    ("staged", PAGE_BYTES, "reader", 0.7),
)
"""Of which step, by pieces of at least so many bytes (of ``PAGE_BYTES``: just those), the least share of the link."""
WAYS = {"staged": ("copy", "batch", "kernel"), "zero-copy": ("zero-copy",), "reader": ("reader",)}
DAEMON_STEPS = {"arena": "64MiB", "staged": "512MiB"}
"""Those that need one, with so much DRAM."""
SANITIZERS = ("memcheck", "racecheck")
SANITIZER_FAILED = 99

Daemon = Callable[[list[str]], AbstractContextManager[Path]]
"""Starts a daemon with these arguments, and gives its socket."""
Tell = Callable[[str], None]
Outcome = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A step, and how long it may take."""

    name: str
    limit_s: float


STEPS = (
    Step("facts", 15.0),
    Step("kernels", 25.0),
    Step("tests", 105.0),
    Step("bandwidth", 60.0),
    Step("arena", 25.0),
    Step("staged", 35.0),
    Step("ipc", 15.0),
    Step("attention", 40.0),
    Step("together", 20.0),
    Step("sanitizer", 45.0),
)
"""All of their time together is less than ``TOTAL_S``, so that none goes without."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """``steps``: which, all if none are named. ``tests``: paths in the checkout. ``report``: the JSON file."""

    device: str = "cuda:0"
    steps: tuple[str, ...] = ()
    tests: tuple[str, ...] = TESTS
    report: Path = Path("gpu-check.json")
    total_s: float = TOTAL_S
    limits_s: dict[str, float] = field(default_factory=dict)
    """Limits of single steps that differ from ``STEPS``."""

    def __post_init__(self) -> None:
        known = [step.name for step in STEPS]
        for name in (*self.steps, *self.limits_s):
            if name not in known:
                raise BadInputError(f"there is no step {name!r}; there are {', '.join(known)}")


def check(options: CheckOptions, daemon: Daemon, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Take the steps; returns what is in the report. Blocks for minutes. ``tell`` is told of each step's end.

    If the step ``facts`` fails, the device can't be opened, and no other step is taken.
    """
    begun_s = time.monotonic()
    steps: dict[str, Outcome] = {}
    report: dict[str, Any] = {"device": options.device, "simulated": not options.device.startswith("cuda")}
    for step in STEPS:
        if options.steps and step.name not in options.steps:
            continue
        left_s = options.total_s - (time.monotonic() - begun_s)
        limit_s = min(options.limits_s.get(step.name, step.limit_s), left_s)
        started_s = time.monotonic()
        outcome = _take(step.name, options, daemon, limit_s) if limit_s > 1 else _not_run("no time was left for it")
        steps[step.name] = outcome | {"took_s": round(time.monotonic() - started_s, 2)}
        checks = wanted(steps, report["simulated"])
        passed = all(each["status"] in ("passed", "skipped") for each in steps.values())
        passed &= all(each["passed"] is not False for each in checks)
        report |= {"passed": passed, "wall_s": round(time.monotonic() - begun_s, 2), "steps": steps, "wanted": checks}
        asyncio.run(write_json(options.report, report))
        tell(
            f"{step.name}: {outcome['status']} in {steps[step.name]['took_s']:.0f} s {outcome['reason']:.300}".rstrip()
        )
        if step.name == "facts" and outcome["status"] == "failed":
            break
    return report


def wanted(steps: Mapping[str, Outcome], simulated: bool) -> list[dict[str, Any]]:
    """Of the steps that were taken the shares of the link that are wanted, and whether they were reached.

    None where no GPU was measured. On a GPU what is missing was not reached.
    """
    found = []
    for step, least_bytes, kind, share in WANTED:
        rows = steps.get(step, {}).get("figures", {}).get("rows", [])
        missing = ("any direction",) if step in steps and not simulated else ()
        for direction in tuple(dict.fromkeys(row["direction"] for row in rows)) or missing:
            best: dict[int, float] = {}
            for row in rows:
                size = row["piece_bytes"]
                fits = size >= least_bytes if least_bytes == LARGE_BYTES else size == least_bytes
                if fits and row["way"] in WAYS[kind] and row["direction"] == direction:
                    best[size] = max(best.get(size, 0.0), row["share_of_link"])
            got = min(best.values(), default=None)
            more = " and more" if least_bytes == LARGE_BYTES else ""
            found.append(
                {
                    "what": f"{kind}, {direction}, pieces of {format_size(least_bytes)}{more}",
                    "wanted_share_of_link": share,
                    "got": got,
                    "passed": None if simulated else got is not None and got >= share,
                }
            )
    return found


def _skipped(reason: str) -> Outcome:
    return {"status": "skipped", "reason": reason, "figures": {}}


def _not_run(reason: str) -> Outcome:
    """Unlike what is skipped, as it can't be had here, this leaves a check open that should have been made."""
    return {"status": "not run", "reason": reason, "figures": {}}


def _take(name: str, options: CheckOptions, daemon: Daemon, limit_s: float) -> Outcome:
    if name == "tests":
        return _run_tests(options, limit_s)
    if name == "sanitizer":
        return _sanitize(options, limit_s)
    if name not in DAEMON_STEPS:
        return _run_step(name, options, limit_s)
    arguments = ["--dram", DAEMON_STEPS[name], "--no-prefault"]
    begun_s = time.monotonic()
    try:
        with daemon(arguments) as socket:
            outcome = _run_step(name, options, limit_s, socket=str(socket))
        if name != "arena" or outcome["status"] != "skipped":
            return outcome
        # This device takes no sealed memory.
        with daemon([*arguments, "--isolation", "tenant"]) as socket:
            limit_s -= time.monotonic() - begun_s
            outcome = _run_step(name, options, limit_s, socket=str(socket))
        return outcome | {"reason": f"with --isolation tenant. {outcome['reason']}".rstrip()}
    except KVStoreError as error:
        return {"status": "failed", "reason": f"its daemon failed: {error}", "figures": {}}


def _run_step(
    name: str, options: CheckOptions, limit_s: float, wrapper: Sequence[str] = (), socket: str = ""
) -> Outcome:
    """One step of ``gpu_steps`` in a process, under ``wrapper`` if that is given."""
    with tempfile.TemporaryDirectory(prefix="kvstore-gpu-") as folder:
        result = Path(folder) / "result.json"
        request = {"step": name, "device": options.device, "result": str(result), "socket": socket}
        command = [*wrapper, sys.executable, "-m", "kvstore.bench.gpu_steps", json.dumps(request)]
        code, output = _run(command, limit_s)
        if code is None:
            return {"status": "timed out", "reason": f"not done after {limit_s:.0f} s: {output}", "figures": {}}
        if code != 0 or not result.exists():
            return {"status": "failed", "reason": f"its process ended with {code}: {output}", "figures": {}}
        outcome: Outcome = json.loads(result.read_text())
        return outcome


def _run_tests(options: CheckOptions, limit_s: float) -> Outcome:
    """The same tests as everywhere: of those that are there once for each kind of device, the ones for this kind."""
    paths = [path for path in options.tests if (CHECKOUT / path.partition("::")[0]).exists()]
    if not paths:
        why = f"{', '.join(options.tests)} are not there: run it from a checkout, `python bench/gpu_check.py`"
        return _not_run(why) if (CHECKOUT / "tests").is_dir() else _skipped(why)
    if find_spec("pytest") is None:
        why = f"pytest is not installed for {sys.executable}: `make test` makes an environment that has it"
        return _not_run(why) if options.device.startswith("cuda") else _skipped(why)
    # Those with such a parameter, and those marked so.
    which = "cuda" if options.device.startswith("cuda") else "not cuda"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", which, *paths]
    code, output = _run(command, limit_s, CHECKOUT)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", output)}
    if code is None:
        return {"status": "timed out", "reason": f"not done after {limit_s:.0f} s: {output}", "figures": counts}
    if code != 0:
        return {"status": "failed", "reason": output, "figures": counts}
    if not counts.get("passed"):
        return _not_run(f"none of the tests could run here: {output}") | {"figures": counts}
    return {"status": "passed", "reason": "", "figures": counts}


def _sanitize(options: CheckOptions, limit_s: float) -> Outcome:
    """The step ``kernels`` under NVIDIA's sanitizer."""
    program = shutil.which("compute-sanitizer")
    if program is None or not options.device.startswith("cuda"):
        missing = (
            "it looks at real GPUs only" if program else "compute-sanitizer is not installed (CUDA's toolkit has it)"
        )
        return _skipped(missing)
    found: dict[str, Any] = {}
    for tool in SANITIZERS:
        wrapper = [program, "--tool", tool, "--error-exitcode", str(SANITIZER_FAILED)]
        outcome = _run_step("kernels", options, limit_s / len(SANITIZERS), wrapper)
        found[tool] = outcome["status"]
        if outcome["status"] != "passed":
            return {"status": outcome["status"], "reason": f"{tool}: {outcome['reason']}", "figures": found}
    return {"status": "passed", "reason": "", "figures": found}


def _run(command: Sequence[str], limit_s: float, folder: Path | None = None) -> tuple[int | None, str]:
    """Exit code (None: killed when its time was up) and the end of what it printed. All of its children go with it."""
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            command,
            stdout=printed,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        printed.seek(0)
        return code, printed.read().decode(errors="replace")[-TAIL_CHARS:].strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    # The command has a daemon to give.
    os.execv(sys.executable, [sys.executable, "-m", "kvstore.cli", "bench", "gpu", *sys.argv[1:]])  # noqa: S606
