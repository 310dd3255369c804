"""A real Redis in its own environment, by both clients; skipped, with the reason, where it can't be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.bench.peers.catalog import ENTRIES
from kvstore.bench.peers.driver import Setup
from kvstore.bench.peers.environments import Place, default_folder, ready
from kvstore.bench.peers.process import Driver
from kvstore.errors import UnavailableError

CLIENTS = {entry.name: entry for entry in ENTRIES if entry.module == "redis_store"}


@pytest.fixture(scope="module")
def place() -> Place:
    environment = CLIENTS["redis-raw"].environment
    assert environment is not None
    try:
        return ready(environment, default_folder())
    except UnavailableError as error:
        pytest.skip(f"Redis can't be had: {error}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(CLIENTS))
@pytest.mark.parametrize("block_bytes", [4096, 3 << 20])
def test_blocks_come_back_as_they_were(place: Place, tmp_path: Path, name: str, block_bytes: int) -> None:
    entry = CLIENTS[name]
    with Driver(entry.module, place, tmp_path / "driver.log") as system:
        version = system.set_up(Setup(block_bytes, 5, 2, str(tmp_path), dict(entry.options)))
        assert version.startswith(("Redis ", "Valkey "))
        for _ in range(4):
            assert system.ask("put")["cpu_s"] > 0
            assert system.ask("get")["wrong"] == 0
            assert system.ask("lookup")["seconds"] > 0
        (server,) = Path(f"/proc/{system.pid}/task/{system.pid}/children").read_text().split()
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_what_is_not_there_is_an_error(place: Place, tmp_path: Path, name: str) -> None:
    entry = CLIENTS[name]
    with Driver(entry.module, place, tmp_path / "driver.log") as system:
        system.set_up(Setup(4096, 2, 2, str(tmp_path), dict(entry.options)))
        with pytest.raises(UnavailableError, match="lookup: RuntimeError: 0 of 2 blocks"):
            system.ask("lookup")
        if name == "redis-py":  # the bare socket would wait for the rest of a value, for its time limit
            with pytest.raises(UnavailableError, match="get: RuntimeError: 0 of 2 blocks"):
                system.ask("get")
