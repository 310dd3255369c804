"""Real daemons in processes of their own, and real engines."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.bench.vllm_engine import Engine, Prompt
from kvstore.client import Client
from kvstore.types import Namespace
from tests.engines.models import VOCABULARY, make_llama

WAIT_S = 60.0
MIB = 1 << 20
KV_CACHE_BYTES = 64 * MIB
"""Of a tiny model: some 16,000 tokens. An engine's start touches all of it."""


class DaemonProcess:
    """``kvstored`` with a socket below ``folder``; ``arguments`` go to its command line."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.socket = folder / "kvstored.sock"
        self._arguments = [str(Path(sys.executable).with_name("kvstored")), "--socket", str(self.socket), *arguments]
        self.start()

    def start(self) -> None:
        """Also again, after ``kill``."""
        self._process = subprocess.Popen(self._arguments, stdout=subprocess.DEVNULL)
        with self.client() as client:
            assert client.wait_healthy(WAIT_S), "the daemon did not start"

    @property
    def pid(self) -> int:
        return self._process.pid

    def client(self) -> Client:
        return Client(self.socket, timeout_s=5.0, required=False)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)


@pytest.fixture(scope="session", autouse=True)
def quick_collections() -> Iterator[None]:
    """What is imported stays out of the garbage collector's sight: vLLM has it look through all of that several times
    with each start and end of an engine, which takes as long as the rest of them."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    gc.unfreeze()


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """``start_daemon(*arguments)``; all are killed at the end."""
    started: list[DaemonProcess] = []

    def start(*arguments: str) -> DaemonProcess:
        folder = tmp_path / f"daemon{len(started)}"
        folder.mkdir()
        started.append(DaemonProcess(folder, *(arguments or ("--dram", "256MiB", "--no-prefault"))))
        return started[-1]

    yield start
    for daemon in started:
        daemon.kill()


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return start_daemon()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "tiny")


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    """``start_engine(model, socket=None, options=None, **settings)``: the one before is closed first."""
    running: list[Engine] = []

    def start(*arguments: object, **settings: object) -> Engine:
        while running:
            running.pop().close()
        running.append(Engine(*arguments, **{"kv_cache_memory_bytes": KV_CACHE_BYTES, **settings}))  # type: ignore[arg-type]
        return running[-1]

    yield start
    while running:
        running.pop().close()


def namespaces(daemon: DaemonProcess) -> dict[bytes, Namespace]:
    """What the daemon has stored blocks of, by digest."""
    with daemon.client() as client:
        return {each.digest: each.namespace for each in client.namespaces() if each.namespace is not None}


def tokens(n: int, seed: int) -> Prompt:
    """Random token ids."""
    return [int(each) for each in np.random.default_rng(seed).integers(3, VOCABULARY, n)]


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """24 prompts that share heads of several lengths, whole blocks and parts of one."""
    heads = [tokens(700, seed) for seed in range(3)]
    return [heads[i % 3][: 37 * (i // 3 + 1)] + tokens(40 + i, 100 + i) for i in range(24)]


@pytest.fixture(scope="session")
def expected(llama: Path, prompts: list[Prompt]) -> list[list[int]]:
    """What the engine says without a store."""
    with Engine(llama, kv_cache_memory_bytes=KV_CACHE_BYTES) as engine:
        return engine.generate(prompts)
