"""A driver process and its protocol, with real systems: files, and a store that loses or alters what it was given."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.bench.peers import driver, process
from kvstore.bench.peers.driver import Bench, Setup, cpu_s
from kvstore.bench.peers.environments import Place, own_place
from kvstore.bench.peers.process import Driver
from kvstore.bench.peers.systems import files
from kvstore.errors import UnavailableError

KIB = 1 << 10
StartDriver = Callable[..., Driver]


def setup_of(folder: Path, **options: Any) -> Setup:
    return Setup(block_bytes=64 * KIB, n_blocks=4, kept=3, folder=str(folder), options=options)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartDriver]:
    """Starts drivers of a system; all are ended after the test."""
    started: list[Driver] = []

    def begin(module: str, **options: Any) -> Driver:
        started.append(Driver(module, own_place(), tmp_path / "driver.log"))
        started[-1].set_up(setup_of(tmp_path, **options))
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.mark.parametrize("way", ["cached", "direct", "durable"])
def test_files_are_put_found_and_read(start: StartDriver, tmp_path: Path, way: str) -> None:
    system = start("files", way=way)
    for _ in range(5):
        put, got, found = (system.ask(operation) for operation in driver.OPERATIONS)
        assert min(put["seconds"], got["seconds"], found["seconds"]) > 0
        assert min(put["cpu_s"], got["cpu_s"]) > 0
        assert got["wrong"] == 0
    kept = [path.name for path in tmp_path.iterdir() if path.name != "driver.log"]
    assert sorted(kept) == sorted(f"65536.{number}.{i:06}" for number in (2, 3, 4) for i in range(4))
    assert all((tmp_path / name).stat().st_size == 64 * KIB for name in kept)


def test_what_libraries_print_is_no_answer(start: StartDriver, tmp_path: Path) -> None:
    chatty = tmp_path / "chatty.py"
    chatty.write_text(
        f"import os, runpy, sys\nprint('hello')\nos.write(1, b'hello too')\n"
        f"open_system = runpy.run_path({str(Path(files.__file__))!r})['open_system']\n"
    )
    system = start(str(chatty.with_suffix("")), way="cached")
    assert system.ask("put")["seconds"] > 0
    assert "hello too" in (tmp_path / "driver.log").read_text()


def test_lost_blocks_are_an_error_with_its_reason(start: StartDriver, tmp_path: Path) -> None:
    system = start("files", way="cached")
    system.ask("put")
    (tmp_path / "65536.0.000002").unlink()
    with pytest.raises(UnavailableError, match=r"lookup: RuntimeError: 3 of 4 blocks"):
        system.ask("lookup")
    with pytest.raises(UnavailableError, match=r"get: FileNotFoundError.*65536\.0\.000002"):
        system.ask("get")
    assert system.ask("put")["seconds"] > 0  # the next batch


def test_altered_bytes_are_counted_by_block(start: StartDriver, tmp_path: Path) -> None:
    system = start("files", way="cached")
    system.ask("put")
    for name in ("65536.0.000001", "65536.0.000003"):
        with (tmp_path / name).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
    assert system.ask("get")["wrong"] == 2


def test_an_old_read_does_not_pass_for_a_new_one(tmp_path: Path) -> None:
    class Idle(files.Files):
        """Says that it reads, and doesn't."""

        def get(self, batch: driver.Batch, out: driver.Blocks) -> int:
            return min(len(batch.keys), len(out))

    setup = setup_of(tmp_path, way="cached")
    system = files.open_system(setup)
    bench = Bench(system, setup)
    bench.put()
    assert bench.get()["wrong"] == 0
    bench._system = Idle(setup)
    assert bench.get()["wrong"] == 4
    system.close()


def test_batches_differ_in_every_block(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, way="cached")
    bench = Bench(files.open_system(setup), setup)
    first = bench._stamped(1).copy()
    assert np.all(np.any(first != bench._stamped(3), axis=1))
    assert len({bytes(block) for block in first}) == 4
    assert not np.array_equal(bench._batch(1).tokens, bench._batch(3).tokens)
    assert set(bench._batch(1).keys).isdisjoint(bench._batch(3).keys)


def test_a_system_that_can_not_start_says_why_and_may_try_again(start: StartDriver, tmp_path: Path) -> None:
    with Driver("files", own_place(), tmp_path / "driver.log") as system:
        with pytest.raises(UnavailableError, match="setup: KeyError: 'way'"):
            system.set_up(setup_of(tmp_path))
        with pytest.raises(UnavailableError, match="no such request now: 'put'"):
            system.ask("put")
        assert system.set_up(setup_of(tmp_path, way="cached")) == f"Linux {os.uname().release}"
        system.ask("put")
    with pytest.raises(UnavailableError, match="nowhere/python: No such file"):
        Driver("files", Place("/nowhere/python"), tmp_path / "driver.log")


def test_another_setup_begins_from_nothing(start: StartDriver, tmp_path: Path) -> None:
    system = start("files", way="cached")
    system.ask("put")
    (tmp_path / "again").mkdir()
    system.set_up(setup_of(tmp_path / "again", way="direct"))
    with pytest.raises(UnavailableError, match="0 of 4 blocks"):
        system.ask("lookup")
    system.ask("put")
    assert (tmp_path / "again" / "65536.0.000000").exists()


def test_a_driver_that_dies_is_an_error(start: StartDriver) -> None:
    system = start("files", way="cached")
    system._process.kill()
    system._process.wait()
    with pytest.raises(UnavailableError, match="the process"):
        system.ask("put")


def test_one_that_does_not_answer_is_killed_with_its_children(
    start: StartDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "hanging.py"
    hanging.write_text(
        f"import runpy, subprocess, sys, threading\n"
        f"Files = runpy.run_path({files.__file__!r})['Files']\n"
        "class Hanging(Files):\n"
        "    def put(self, batch, blocks):\n"
        "        threading.Event().wait()\n"
        "def open_system(setup):\n"
        "    system = Hanging(setup)\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\n"
        "    print('child', child.pid, flush=True)\n"
        "    return system\n"
    )
    system = start(str(hanging.with_suffix("")), way="cached")
    pid = int((tmp_path / "driver.log").read_text().split()[-1])
    assert _runs(pid)
    monkeypatch.setattr(process, "OPERATION_S_MAX", 0.2)
    with pytest.raises(UnavailableError, match="put: no answer in time"):
        system.ask("put")
    deadline_s = time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < deadline_s, "the child outlived its driver"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_processor_time_of_another_process_is_seen(start: StartDriver) -> None:
    system = start("files", way="cached")
    before = cpu_s([system._process.pid])
    for _ in range(3):
        system.ask("put")
    assert cpu_s([system._process.pid]) > before > 0
    own = time.process_time()
    assert own <= cpu_s([os.getpid()]) <= time.process_time()


def test_the_driver_needs_nothing_of_this_package() -> None:
    """It runs in environments that have numpy only."""
    code = (
        "import runpy, sys\nsys.modules['kvstore'] = None\n"
        f"runpy.run_path({driver.__file__!r})\n"
        f"runpy.run_path({files.__file__!r})"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
