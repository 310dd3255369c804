"""Engines in processes of their own: one that does what it is told, and vLLM's server for the OpenAI API."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pytest
from openai import OpenAI

from kvstore.bench.vllm_engine import BLOCK_TOKENS, KV_CACHE_BYTES, Prompt, transfer_config

ROOT = Path(__file__).parents[2]
DOCUMENTATION = ROOT / "docs" / "engines" / "vllm.md"
PROCESS_S = 600.0
SERVER_START_S = 900.0
REQUEST_S = 120.0


def run_engine(
    model: Path, socket: Path | None, rounds: list[list[Prompt]], *, seed: int | str = 0,
    die: tuple[str, int] | None = None, more: dict[str, Any] | None = None, options: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """What an engine process says; empty if it was told to ``die`` (see ``engine_process``).

    ``seed`` is its PYTHONHASHSEED, ``more`` goes into every prompt. Raises TimeoutExpired after ``PROCESS_S``: workers
    that fail hang the engine.
    """
    answer = Path(tempfile.mkdtemp()) / "answer.json"
    told = {
        "model": str(model), "socket": str(socket or ""), "options": options or {}, "settings": settings,
        "rounds": rounds, "n": 12, "die": die, "more": more or {}, "answer": str(answer),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.engine_process", json.dumps(told)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(seed), "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        stdout=sys.stderr,
    )
    try:
        process.wait(PROCESS_S)
    except BaseException:  # the test's own time limit, too: nothing stays behind
        kill_with_children(process)
        raise
    if die is not None:
        assert process.returncode == -signal.SIGKILL
        return {}
    assert process.returncode == 0
    said: dict[str, Any] = json.loads(answer.read_text())
    return said


def kill_with_children(process: subprocess.Popen[Any]) -> None:
    """SIGKILL to a process and all that it started."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.wait(PROCESS_S)


def documented_config() -> dict[str, Any]:
    """``--kv-transfer-config`` as users copy it from the documentation."""
    (found,) = re.findall(r"--kv-transfer-config '({.*?})'", DOCUMENTATION.read_text(), re.DOTALL)
    config: dict[str, Any] = json.loads(found)
    return config


class Server:
    """``vllm serve``, in the form that the distribution for CPUs has. Use it as a context manager.

    ``arguments`` go to its command line. Its log is in ``log``.
    """

    def __init__(self, model: Path, folder: Path, daemon_socket: Path, *arguments: str, **options: Any) -> None:
        self.log = folder / "server.log"
        self.model = str(model)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        address = f"http://127.0.0.1:{self.port}/v1"
        self._api = OpenAI(base_url=address, api_key="none", timeout=REQUEST_S, max_retries=0)
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", self.model, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
            *("--kv-transfer-config", json.dumps({**transfer_config(daemon_socket, options), **documented_config()})),
            *arguments,
        ]

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            # As users have it: the engine in a process of its own.
            environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, cwd=self.log.parent, env=environment
            )
        try:
            self._wait_for_answers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it as an operator does."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            kill_with_children(self._process)

    def complete(self, prompt: Prompt | str, n: int = 12, **more: Any) -> str:
        """The greedy text after a prompt. Raises what the API's client raises, also after ``REQUEST_S``."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": n, "temperature": 0, **more}
        return str(self._api.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text)

    def metrics(self) -> dict[str, float]:
        """Counters of ``/metrics``, summed over their labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=REQUEST_S) as answer:
            text: str = answer.read().decode()
        found: dict[str, float] = {}
        for name, amount in re.findall(r"^([\w:]+)(?:\{.*\})? ([-+.\deE]+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(amount)
        return found

    def _wait_for_answers(self) -> None:
        deadline_s, again = time.monotonic() + SERVER_START_S, threading.Event()
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"the server does not serve: {self.log.read_text()[-4000:]}")
            again.wait(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False
