"""``kvstore bench gpu``, and the script of that name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvstore.bench import gpu_check
from tests.cli.test_cli import kvstore


def test_a_check_without_a_gpu_is_marked_as_such(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = kvstore("bench", "gpu", "--device", "simulated", "--step", "bandwidth", "--report", str(report))
    assert done.returncode == 0, done.stderr
    assert "without a GPU: rates say nothing" in " ".join(done.stdout.split())
    assert "not judged" in done.stdout
    assert "bandwidth: passed" in done.stderr
    assert json.loads(report.read_text())["passed"] is True


def test_what_fails_is_said_in_the_exit_code_and_in_one_line(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = kvstore("bench", "gpu", "--device", "cuda:99", "--step", "facts", "--json", "--report", str(report))
    assert done.returncode == 1
    assert json.loads(done.stdout) == json.loads(report.read_text())
    assert f"error: cuda:99 is not as it should be: facts; {report} says more" in done.stderr


def test_the_script_is_the_command(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = Path(gpu_check.__file__).resolve()
    arguments = ["--device", "simulated", "--step", "facts", "--json", "--report", str(report)]
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["steps"]) == ["facts"]
