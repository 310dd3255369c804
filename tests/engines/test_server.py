"""vLLM's server and the daemon beside it, as a user runs them: one server after the other, over the OpenAI API."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from kvstore.bench.vllm_engine import BLOCK_TOKENS, Engine
from tests.engines.conftest import DaemonProcess
from tests.engines.models import add_tokenizer
from tests.engines.processes import Server

WAIT_S = 60.0
N_CLIENTS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def reader(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a tokenizer."""
    return add_tokenizer(Path(shutil.copytree(llama, tmp_path_factory.mktemp("reader") / "tiny")))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """16 prompts that share heads of several lengths."""
    pages = [topics[name] for name in ("assert", "class", "exceptions", "naming")]
    return [pages[i % 4][: 300 * (i // 4 + 1)] + f" {i} and so on." for i in range(16)]


def whole_blocks(engine: Engine, texts: list[str]) -> int:
    """Blocks that a store which has all of it can give: one token of each prompt is computed."""
    tokenizer = engine.llm.get_tokenizer()
    return sum((len(tokenizer.encode(text)) - 1) // BLOCK_TOKENS for text in texts)


def test_a_second_server_hits_what_the_first_stored_and_outlives_a_killed_daemon(
    daemon: DaemonProcess, reader: Path, texts: list[str], tmp_path: Path
) -> None:
    with Engine(reader, skip_tokenizer_init=False) as engine:
        said = engine.complete(texts)
        n_whole = whole_blocks(engine, texts)
    # Without a cache of the engine's own every hit is the store's.
    settings = ("--no-enable-prefix-caching",)
    with Server(reader, tmp_path, daemon.socket, *settings) as server:
        assert [server.complete(text) for text in texts] == said
        metrics = server.metrics()
        assert metrics["vllm:kvstore_save_blocks_total"] > 0
    with Server(reader, tmp_path, daemon.socket, *settings, lookup_timeout_s=0.5) as server:
        before = server.metrics()
        assert [server.complete(text) for text in texts] == said
        metrics = server.metrics()
        assert metrics["vllm:external_prefix_cache_hits_total"] >= 0.95 * n_whole * BLOCK_TOKENS
        assert metrics["vllm:kvstore_load_blocks_total"] == n_whole
        for name in ("errors", "loads_failed", "saves_failed", "lookups_failed"):
            assert metrics[f"vllm:kvstore_{name}_total"] == 0, name
        assert before["vllm:kvstore_load_blocks_total"] == 0
        kill_under_load(server, daemon, texts, said)
        loads = server.metrics()["vllm:kvstore_load_blocks_total"]
        daemon.start()
        hits_again(server, texts, said, loads)


def kill_under_load(server: Server, daemon: DaemonProcess, texts: list[str], said: list[str]) -> None:
    """Four clients ask all the time; the daemon dies in the middle. Each answer comes, and is right."""
    answered, killed = threading.Semaphore(0), threading.Event()

    def ask(first: int) -> list[bool]:
        right: list[bool] = []
        n_after = 0
        while n_after < len(texts):
            i = (first + len(right)) % len(texts)
            n_after += killed.is_set()
            right.append(server.complete(texts[i]) == said[i])
            answered.release()
        return right

    with ThreadPoolExecutor(N_CLIENTS) as pool:
        asking = [pool.submit(ask, 4 * number) for number in range(N_CLIENTS)]
        for _ in range(2 * N_CLIENTS):
            assert answered.acquire(timeout=WAIT_S)
        daemon.kill()
        killed.set()
        assert all(all(each.result()) for each in asking)


def hits_again(server: Server, texts: list[str], said: list[str], loads: float) -> None:
    """The new daemon is empty and found by itself: what is computed now is stored, and hit by who asks again."""
    again = threading.Event()
    for _ in range(int(WAIT_S / 0.2)):
        assert [server.complete(text) for text in texts[:2]] == said[:2]
        if server.metrics()["vllm:kvstore_load_blocks_total"] > loads:
            return
        again.wait(0.2)
    pytest.fail(f"no hit within {WAIT_S} s of the daemon's return: {server.log.read_text()[-4000:]}")
