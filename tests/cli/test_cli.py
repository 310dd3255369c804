"""The command line as a user meets it: results, JSON, exit codes, and no traceback for a user's mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.daemon_process import own_daemon
from kvstore.cli.nvme_place import kept_in_memory
from kvstore.errors import ConfigError
from tests.shared_memory import FOLDER, OF_TESTS

REPORT_KEYS = {
    "requests", "block_accesses", "unique_blocks", "block_hit_ratio", "token_hit_ratio", "any_hit_ratio", "tiers",
    "mismatches",
}  # fmt: skip


def kvstore(*arguments: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def report(*arguments: str) -> dict[str, Any]:
    done = kvstore(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def test_a_generated_replay_reports_every_figure_and_agrees_with_the_simulation() -> None:
    real = report("replay", "--limit", "60", "--capacity-percent", "100")
    simulated = report("replay", "--limit", "60", "--capacity-percent", "100", "--simulate")
    assert real.keys() >= REPORT_KEYS
    assert simulated.keys() >= REPORT_KEYS
    assert real["mismatches"] == 0
    assert real["requests"] == simulated["requests"] == 60
    assert real["token_hit_ratio"] == pytest.approx(simulated["token_hit_ratio"], abs=1e-9)
    assert 0 < real["block_hit_ratio"] < 1
    assert real["tiers"]["dram"]["bytes_written"] > 0


def test_several_clients_replay_a_trace_file_with_no_wrong_byte(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    ids = [[*range(8), *range(100 + 4 * (i % 40), 104 + 4 * (i % 40))] for i in range(200)]
    lines = [
        {"timestamp": 10 * i, "input_length": 512 * 12, "output_length": 4, "hash_ids": ids[i]} for i in range(200)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = report("replay", str(trace), "--clients", "3", "--capacity-percent", "50", "--block-bytes", "16KiB")
    assert result["mismatches"] == 0
    assert result["block_accesses"] == 2400
    assert result["unique_blocks"] == 168
    assert result["block_hit_ratio"] > 0.6


def test_a_report_and_a_picture_are_left(tmp_path: Path) -> None:
    done = kvstore("replay", "--simulate", "--limit", "30", "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "report.json").read_text())["requests"] == 30
    assert (tmp_path / "out" / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["frobnicate"], 2, "frobnicate"),
        (["replay", "--no-such"], 2, "--no-such"),
        (["replay", "/nowhere/t.jsonl"], 2, "/nowhere/t.jsonl"),
        (["replay", "--limit", "0"], 2, "limit"),
        (["replay", "--capacity-percent", "5", "--capacity-blocks", "7"], 2, "not both"),
        (["replay", "--capacity-percent", "-1"], 2, "-1"),
        (["replay", "--policy", "mru"], 2, "mru"),
        (["replay", "--block-bytes", "many"], 2, "many"),
        (["replay", "--clients", "0"], 2, "clients"),
        (["replay", "--block-tokens", "0"], 2, "--block-tokens"),
        (["replay", "--simulate", "--clients", "3"], 2, "--simulate"),
        (["replay", "--connect", "x.sock", "--capacity-blocks", "9"], 2, "--connect"),
        (["replay", "--limit", "3", "--output", "/proc/nothing"], 2, "--output"),
        (["serve", "--socket", ""], 2, "names no file"),
        (["serve", "--socket", "/nowhere/at/all.sock"], 2, "/nowhere/at"),
        (["serve", "--dram", "8MiB", "--region-bytes", "1GiB"], 2, "--region-bytes"),
        (["replay", "--connect", "/nowhere/s.sock", "--limit", "3"], 1, "kvstore serve"),
        (["status", "--socket", "/nowhere/s.sock"], 1, "kvstore serve"),
        (["serve", "--dram", "5 bananas"], 2, "bananas"),
        (["serve", "--dram", "1KiB"], 2, "1024"),
        (["serve", "--dram", "999TiB"], 2, "--dram"),
        (["serve", "--socket", "/x" * 60], 2, "longer than"),
        (["serve", "--heartbeat", "0"], 2, "heartbeat"),
        (["serve", "--region-bytes", "7"], 2, "7"),
        (["bench", "bandwidth", "--pairs", "0"], 2, "pairs"),
        (["serve", "--nvme-dir", "x"], 2, "--nvme-dir and --nvme"),
        (["serve", "--nvme", "1GiB"], 2, "--nvme-dir and --nvme"),
        (["serve", "--nvme-dir", "/nowhere/at/all", "--nvme", "1GiB"], 2, "/nowhere/at"),
        (["serve", "--nvme-dir", "/proc", "--nvme", "1GiB"], 2, "/proc"),
        (["serve", "--nvme-dir", "x", "--nvme", "9000TiB"], 2, "lower --nvme"),
        (["serve", "--nvme-dir", "x", "--nvme", "1KiB"], 2, "--nvme"),
        (["serve", "--write-policy", "sideways"], 2, "sideways"),
        (["serve", "--recovery", "maybe"], 2, "maybe"),
        (["serve", "--selective-hits", "0"], 2, "--selective-hits"),
        (["serve", "--dram", "8MiB", "--write-behind", "1GiB"], 2, "--write-behind"),
        (["serve", "--io-timeout", "0"], 2, "--io-timeout"),
        (["serve", "--write-policy", "back"], 2, "--write-policy needs --nvme-dir"),
        (["serve", "--recovery", "strict"], 2, "--recovery needs --nvme-dir"),
        (["serve", "--nvme-dir", "", "--nvme", "1GiB"], 2, "--nvme-dir is empty"),
        (["serve", "--nvme-dir", "x" * 300, "--nvme", "1GiB"], 2, "--nvme-dir 'xxx"),
        (["replay", "--limit", "20", "--kill-at", "0.5"], 2, "--kill-at needs"),
        (["replay", "--limit", "20", "--nvme-percent", "5000"], 2, "--nvme-percent must be"),
        (["replay", "--dram-blocks", "0"], 2, "--dram-blocks must be"),
    ],
)
def test_mistakes_are_named_with_a_way_out(arguments: list[str], code: int, words: str) -> None:
    done = kvstore(*arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr


def test_a_small_replay_needs_no_capacity() -> None:
    assert report("replay", "--limit", "3")["mismatches"] == 0


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "kvstore.cli", "replay", "--simulate", "--limit", "5", "--no-picture"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0


def test_sigterm_ends_a_replay_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore.cli", "replay", "--limit", "380"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    assert b"serving" in process.stderr.readline()
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in errors
    assert b"Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_kvstored_is_serve_under_its_own_name() -> None:
    program = "from kvstore.cli.main import serve_main; serve_main()"
    for option, words in (("--help", "Usage: kvstored"), ("--version", "kvstored, version")):
        done = subprocess.run([sys.executable, "-c", program, option], capture_output=True, text=True, check=True)
        assert words in done.stdout


def test_status_and_replay_use_a_running_daemon() -> None:
    with own_daemon(["--dram", "32MiB", "--policy-clock", "client"]) as path:
        assert report("status", "--socket", str(path))["dram_capacity_bytes"] == 32 << 20
        result = report("replay", "--connect", str(path), "--limit", "30", "--block-bytes", "16KiB")
        assert result["mismatches"] == 0
        assert result["capacity_blocks"] == 2048
        again = kvstore("replay", "--connect", str(path), "--limit", "3", "--block-bytes", "16KiB")
        assert "blocks already" in again.stderr
        table = kvstore("status", "--socket", str(path), "--all")
        assert "committed_blocks" in table.stdout


def test_status_shows_two_tiers_in_groups(tmp_path: Path) -> None:
    arguments = ["--dram", "32MiB", "--nvme-dir", str(tmp_path / "nvme"), "--nvme", "64MiB", "--policy-clock", "client"]
    with own_daemon(arguments) as path:
        report("replay", "--connect", str(path), "--limit", "20", "--block-bytes", "16KiB")
        shown = kvstore("status", "--socket", str(path), "--all").stdout
        short = kvstore("status", "--socket", str(path)).stdout
        numbers = report("status", "--socket", str(path))
    titles = ["DRAM tier", "NVMe tier", "DRAM to NVMe", "NVMe to DRAM"]
    assert [shown.index(title) for title in titles] == sorted(shown.index(title) for title in titles)
    assert shown.index("uptime_s") < shown.index("DRAM tier") < shown.index("dram_capacity_bytes")
    assert shown.index("NVMe tier") < shown.index("nvme_capacity_bytes") < shown.index("offloaded_blocks")
    assert "64.0 MiB" in shown
    assert "writes skipped, failed" in short
    assert max(map(len, short.splitlines())) <= 80
    assert len(short.splitlines()) < 35
    assert "…" not in shown + short
    assert 0 < numbers["hit_ratio"] < 1
    assert numbers["hit_ratio"] == pytest.approx(numbers["dram_hit_ratio"] + numbers["nvme_hit_ratio"])
    assert numbers["uptime_s"] > 0


def test_a_directory_in_memory_is_warned_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``/dev/shm`` is a tmpfs on every Linux; what the tests use need not be a disk."""
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=OF_TESTS) as folder:
        assert kept_in_memory(Path(folder)) == "tmpfs"
        arguments = ["--dram", "8MiB", "--nvme-dir", folder, "--nvme", "32MiB"]
        with own_daemon(arguments, tmp_path / "d.sock"):
            assert f"warning: {folder} is tmpfs" in capfd.readouterr().err
    assert kept_in_memory(Path("/proc")) == ""


def test_the_summary_of_commands_is_not_cut() -> None:
    summary = kvstore("--help").stdout.partition("Commands:")[2]
    assert "..." not in summary
    assert "serve " in summary


def test_the_demo_runs_once_and_leaves_nothing(tmp_path: Path) -> None:
    done = kvstore("demo", "--once", "--socket", str(tmp_path / "d.sock"), "--dram", "64MiB")
    assert done.returncode == 0, done.stderr
    assert "block hit ratio" in done.stdout
    assert not (tmp_path / "d.sock").exists()


def test_a_daemon_that_cant_start_is_reported(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ConfigError, match="exit code 2"), own_daemon(["--dram", "8MiB"], taken):
        pytest.fail("it must not start")
