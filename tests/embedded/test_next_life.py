"""A store inside the program, opened again: all its blocks are found, however the one before ended."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Client
from kvstore.embedded import config_of
from kvstore.errors import ConfigError
from tests.embedded.scene import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    NAMESPACE,
    NVME,
    SMALL,
    WAIT_S,
    InUse,
    content,
    holds,
    prompt,
    run_program,
)


def test_all_that_was_put_is_found_again(tmp_path: Path, start_daemon: Callable[..., Any]) -> None:
    path = tmp_path / "kv"
    with kvstore.open(path, **NVME) as store:
        for seed in range(20):
            assert store.open(NAMESPACE).put(prompt(8, seed), content(8, seed)).n_stored == 8
    with kvstore.open(path, **NVME) as store:
        assert all(holds(store.open(NAMESPACE), 8, seed) for seed in range(20))
    daemon = start_daemon(nvme_dir=path, nvme_bytes=64 << 20)
    with Client(daemon.config.socket_path, timeout_s=WAIT_S) as client:
        assert all(holds(client.open(NAMESPACE), 8, seed) for seed in range(20))


def test_its_default_capacity_is_never_below_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv"
    with kvstore.open(path, **NVME) as store:
        for seed in range(80):
            done = store.open(NAMESPACE).put(prompt(32, seed), content(32, seed), durable_within_s=WAIT_S)
            assert done.n_durable == 32
    monkeypatch.setattr("kvstore.embedded.NVME_BYTES_DEFAULT", 28 << 20)
    assert config_of(tmp_path / "another", "8MiB", None).nvme_bytes == 28 << 20
    with kvstore.open(path, **SMALL) as store:
        assert store.stats()["recovered_blocks"] == 80 * 32
        assert holds(store.open(NAMESPACE), 32, 0)


def test_a_second_one_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with kvstore.open(path, **NVME) as store:
        assert store.open(NAMESPACE).put(prompt(4), content(4), durable_within_s=WAIT_S).n_durable == 4
        before = InUse()
        with pytest.raises(ConfigError, match=r"kv' is in use"):
            kvstore.open(path, **NVME)
        done = run_program("kvstore.open(sys.argv[1], **settings)", str(path))
        assert done.returncode == 1
        assert "InUseError" in done.stderr
        assert "in use" in done.stderr
        before.check()
        assert holds(store.open(NAMESPACE), 4)


@pytest.mark.parametrize(
    "ending", ["", "raise SystemExit(0)", "store = None", "threading.Thread(target=sys.exit).start()"]
)
def test_a_program_that_ends_without_closing_loses_nothing(tmp_path: Path, ending: str) -> None:
    body = (
        "store = kvstore.open(sys.argv[1], **settings)\n"
        "cache = store.open(space)\n"
        "assert cache.put(tokens, blocks).n_stored == 4\n"
        "lease = cache.lease(tokens)\nview = lease[0]\n"
    )
    done = run_program(body + ending, str(tmp_path / "kv"))
    assert (done.returncode, done.stderr) == (0, "")
    with kvstore.open(tmp_path / "kv", **NVME) as store:
        assert store.stats()["recovered_blocks"] == 4


def test_what_was_acknowledged_as_durable_outlives_a_kill(tmp_path: Path) -> None:
    body = (
        "cache = kvstore.open(sys.argv[1], **settings).open(space)\n"
        "assert cache.put(tokens, blocks, durable_within_s=30.0).n_durable == 4\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run_program(body, str(tmp_path / "kv")).returncode == -signal.SIGKILL
    with kvstore.open(tmp_path / "kv", **NVME) as store:
        out = np.zeros((4, BLOCK_BYTES), np.uint8)
        assert store.open(NAMESPACE).get_into(np.arange(4 * BLOCK_TOKENS), out).n_blocks == 4
        assert (out == 7).all()
