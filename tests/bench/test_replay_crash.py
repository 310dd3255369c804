"""A daemon killed during a replay: what was durable is found, what is lost is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.bench import workload as work
from kvstore.bench.generate import ConversationOptions, generate_trace, to_json_lines, to_trace
from kvstore.bench.payload import Payload
from kvstore.bench.replay import ReplayOptions, ReplayResult, replay
from kvstore.bench.replay_tables import replay_tables
from kvstore.bench.report import print_tables
from kvstore.bench.trace import Trace
from kvstore.cli.daemon_process import DaemonProcess
from kvstore.cli.nvme_place import nvme_directory, room_for
from kvstore.errors import BadInputError, KVStoreError, UnavailableError

BLOCK_BYTES = 8192
OPTIONS = ReplayOptions(
    block_bytes=BLOCK_BYTES, capacity_percent=25, nvme_percent=60, durable_every=2, kill_at=0.5, clients=2
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    options = ConversationOptions(sessions=20, mean_question_tokens=200, mean_answer_tokens=150, seed=5)
    return to_trace(generate_trace(options).requests, 16)


class TamperedDaemon(DaemonProcess):
    """Something happens to its directory while it is down."""

    def __init__(self, arguments: list[str], socket_path: Path, while_down: Callable[[], None]) -> None:
        super().__init__(arguments, socket_path)
        self._while_down = while_down
        self.kills = 0

    def kill(self) -> None:
        super().kill()
        self.kills += 1
        self._while_down()


@contextmanager
def running(trace: Trace, folder: Path, while_down: Callable[[], None] = lambda: None) -> Iterator[TamperedDaemon]:
    blocks = OPTIONS.nvme_capacity(trace)
    assert blocks is not None
    n_bytes = room_for(blocks, work.namespace(trace, BLOCK_BYTES, "any"))
    arguments = [
        "--dram", str(OPTIONS.dram_bytes(trace)), "--policy", "lru", "--policy-clock", "client",
        "--nvme-dir", str(folder / "nvme"), "--nvme", str(n_bytes),
    ]  # fmt: skip
    daemon = TamperedDaemon(arguments, folder / "d.sock", while_down)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()


def replayed(trace: Trace, folder: Path, while_down: Callable[[], None] = lambda: None, **changes: Any) -> ReplayResult:
    with running(trace, folder, while_down) as daemon:
        result = replay(trace, replace(OPTIONS, **changes), str(daemon.socket_path), daemon=daemon)
        assert daemon.kills == 1
        return result


@pytest.mark.parametrize("clients", [1, 3])
def test_what_was_acknowledged_is_found_again(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str], clients: int
) -> None:
    result = replayed(trace, tmp_path, clients=clients)
    crash = result.crash
    assert crash is not None
    assert crash.lost == crash.mismatches == result.mismatches == 0
    assert 0 < crash.must_be_found == crash.found <= crash.acknowledged
    assert trace.n_requests // 2 <= crash.at_request < trace.n_requests
    assert crash.before["offloaded_blocks"] > 0
    assert result.counts.requests == trace.n_requests
    # The clients went on: the second half was stored and found, too.
    assert result.durable_blocks > crash.acknowledged
    assert result.counts.nvme_block_hits > 0
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["crash"]["lost"] == 0
    print_tables(replay_tables(result))
    assert "SIGKILL" in capsys.readouterr().out


def test_a_directory_that_is_gone_is_loss_and_not_silence(trace: Trace, tmp_path: Path) -> None:
    result = replayed(trace, tmp_path, lambda: shutil.rmtree(tmp_path / "nvme"))
    assert result.crash is not None
    assert result.crash.found == 0
    assert result.crash.lost == result.crash.must_be_found > 0
    assert result.mismatches == 0


def test_damaged_segments_are_loss_and_never_wrong_bytes(trace: Trace, tmp_path: Path) -> None:
    def damage() -> None:
        segments = [
            path for path in (tmp_path / "nvme").rglob("*") if path.is_file() and path.stat().st_size >= 1 << 18
        ]
        assert segments
        for path in segments:
            with path.open("r+b") as file:
                for at in range(4096 + 100, path.stat().st_size, 3 * (BLOCK_BYTES + 4096)):
                    file.seek(at)
                    file.write(b"\xa5" * 16)

    result = replayed(trace, tmp_path, damage)
    assert result.crash is not None
    assert 0 < result.crash.lost <= result.crash.must_be_found
    assert result.mismatches == 0


def test_bytes_that_differ_after_the_restart_are_counted(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this process only: the clients have processes of their own.
    monkeypatch.setattr(Payload, "matches", lambda *_: False)
    result = replayed(trace, tmp_path)
    assert result.crash is not None
    assert result.mismatches == result.crash.mismatches >= result.crash.must_be_found > 0


def test_a_daemon_that_does_not_come_back_is_an_error(trace: Trace, tmp_path: Path) -> None:
    def sabotage() -> None:
        shutil.rmtree(tmp_path / "nvme")
        (tmp_path / "nvme").write_text("not a directory")

    with pytest.raises((UnavailableError, BadInputError), match="did not start"):
        replayed(trace, tmp_path, sabotage)


def kvstore(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def trace_file(trace: Trace, tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(to_json_lines(trace)))
    return path


TIERS = ("--dram-percent", "25", "--nvme-percent", "60", "--block-bytes", "8KiB", "--block-tokens", "16")


def test_the_command_kills_compares_and_leaves_nothing(trace_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = kvstore(
        "replay", str(trace_file), *TIERS, "--kill-at", "0.4", "--durable-every", "3", "--compare", "--json",
        "--output", str(output),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["crash"]["lost"] == report["mismatches"] == 0
    assert report["crash"]["must_be_found"] > 0
    assert report["simulated"]["block_hits"] > 0
    assert report["nvme_overhead"] > 0
    assert sorted(path.name for path in output.iterdir()) == ["picture.png", "report.json"]


def test_a_kept_directory_is_used_again(trace_file: Path, tmp_path: Path) -> None:
    arguments = (
        "replay", str(trace_file), "--dram-percent", "100", "--nvme-percent", "100", "--block-bytes", "8KiB",
        "--block-tokens", "16", "--nvme-dir", str(tmp_path / "kept"), "--json", "--limit", "50",
    )  # fmt: skip
    first, second = kvstore(*arguments), kvstore(*arguments)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "blocks already" not in first.stderr
    assert "blocks already" in second.stderr
    before, after = json.loads(first.stdout), json.loads(second.stdout)
    assert before["mismatches"] == after["mismatches"] == 0
    assert before["nvme_block_hits"] < 0.1 * before["unique_blocks"]
    # There is room for all: what the first run stored, the second reads from the disk.
    assert after["nvme_block_hits"] > 0.8 * after["unique_blocks"]
    assert after["block_hit_ratio"] > 0.95


def test_sigterm_leaves_no_directory_and_no_daemon(trace_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = [
        sys.executable, "-m", "kvstore.cli", "replay", str(trace_file), *TIERS, "--clients", "2",
        "--output", str(output),
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    assert b"serving" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert list(output.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "t.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nvme-dir", "x"], "--nvme-percent"),
        (["--simulate", "--nvme-percent", "50", "--kill-at", "0.5"], "--kill-at"),
        (["--connect", "x.sock", "--nvme-percent", "50"], "--connect"),
        (["--nvme-percent", "50", "--nvme-dir", "/proc/nothing"], "--nvme-dir"),
        (["--nvme-blocks", "100000000000"], "larger disk"),
    ],
)
def test_mistakes_are_named_with_a_way_out(arguments: list[str], words: str) -> None:
    done = kvstore("replay", "--limit", "3", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


def test_a_place_for_nvme_is_made_and_removed(tmp_path: Path) -> None:
    with nvme_directory(None, tmp_path, 4096) as place:
        assert place.parent == tmp_path
        (place / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []
    with nvme_directory(tmp_path / "a" / "b", None, 4096) as place:
        assert place == tmp_path / "a" / "b"
    assert place.is_dir()


def test_a_client_that_fails_after_the_kill_ends_the_replay(trace: Trace, tmp_path: Path) -> None:
    broken = Trace("broken", trace.requests, trace.offsets, trace.hash_ids, trace.block_tokens)
    requests = [*trace.requests]
    requests[-1] = None  # type: ignore[call-overload]
    object.__setattr__(broken, "requests", tuple(requests))
    with running(trace, tmp_path) as daemon, pytest.raises(KVStoreError, match="a replay client failed"):
        replay(broken, OPTIONS, str(daemon.socket_path), daemon=daemon)
