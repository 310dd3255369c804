"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.device.cpu_build import sanitizer_runtime

PLANTS = ["keys", "rows", "table", "target", "shared", "scores"]

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("g++") is None or not sanitizer_runtime().exists():
        pytest.skip("g++ or its AddressSanitizer is missing")
    environment = {**os.environ, "LD_PRELOAD": str(sanitizer_runtime()), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-m", "tests.device.kernels.sanitized", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=200, check=False)


def test_no_kernel_leaves_its_memory() -> None:
    done = run()
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout == "clean\n"
    assert "ERROR" not in done.stderr
    assert "runtime error" not in done.stderr


@pytest.mark.parametrize("plant", PLANTS)
def test_an_access_out_of_bounds_is_caught(plant: str) -> None:
    done = run(plant)
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "kernels.cu" in done.stderr
    assert "clean" not in done.stdout
