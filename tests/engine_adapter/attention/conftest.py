"""Triton in processes of its own: one that interprets kernels on the CPU, one that compiles them for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


class Child:
    """A process that answers questions: see ``child``."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.engine_adapter.attention.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )

    def ask(self, check: str, **arguments: Any) -> Any:
        """What a check gives; fails if it raised, or the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([check, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended: {self._process.poll()}"
        answer = json.loads(line)
        assert "raised" not in answer, answer["raised"]
        return answer["result"]

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Child]:
    pytest.importorskip("triton", reason="needs triton")
    child = Child(TRITON_INTERPRET="1")
    yield child
    child.close()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    pytest.importorskip("triton", reason="needs triton")
    child = Child(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("compiled")))
    yield child
    child.close()
