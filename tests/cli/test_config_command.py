"""``kvstore config``, and ``kvstore serve`` with settings from all layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.daemon_process import own_daemon
from kvstore.client import Client


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**plain, "KVSTORE_CONFIG": "", **environment},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_show_names_every_setting_and_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text('[dram]\ncapacity = "64MiB"\n')
    done = run("config", "--show", "--json", "--config", str(file), "--lease-max", "1h", KVSTORE_DAEMON_HEARTBEAT="3s")
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    rows = {row["name"]: row for row in shown["settings"]}
    assert shown["file"] == str(file)
    assert (rows["dram.capacity"]["value"], rows["dram.capacity"]["from"]) == (64 << 20, f"{file}, line 2")
    assert (rows["daemon.heartbeat"]["value"], rows["daemon.heartbeat"]["layer"]) == (3.0, "env")
    assert (rows["leases.max"]["value"], rows["leases.max"]["from"]) == (3600.0, "--lease-max")
    assert rows["dram.prefault"] == {
        "name": "dram.prefault", "value": True, "written": "true", "effective": "true", "layer": "default",
        "from": "default",
    }  # fmt: skip
    table = run("config", "--show", "--config", str(file)).stdout
    assert "64MiB" in table
    assert "4MiB (fits the tier)" in table
    assert "dram.prefault" in table


def test_show_finds_the_users_file(tmp_path: Path) -> None:
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "kvstore.toml").write_text("daemon.max_clients = 3\n")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "config", "--show", "--json"],
        capture_output=True, text=True, check=True, timeout=60, env={**plain, "XDG_CONFIG_HOME": str(tmp_path)},
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(done.stdout)["settings"]}
    assert rows["daemon.max_clients"]["value"] == 3


def test_check_judges_a_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text('[dram]\ncapacity = "64MiB"\n[leases]\nmax = "1h"\n')
    done = run("config", "--check", str(file), KVSTORE_DRAM_CAPACITY="nonsense")
    assert (done.returncode, done.stdout) == (0, f"{file} is right: 2 settings\n")
    file.write_text('[dram]\ncapcity = "64MiB"\n[daemon]\nmax_clients = "x"\n')
    done = run("config", "--check", str(file))
    assert done.returncode == 2
    assert f"{file}, line 2: [dram] has no 'capcity'; did you mean 'capacity'?" in done.stderr
    assert f"{file}, line 4: daemon.max_clients is 'x'" in done.stderr
    file.write_text('[daemon]\npolicy = "mru"\n')
    done = run("config", "--check", str(file))
    assert done.returncode == 2
    assert "policy is 'mru'; known are" in done.stderr
    assert f"{file}, line 2" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[nvme]\ndir = "{here}/file"\ncapacity = "64MiB"', "k.toml, line 2"),
        (
            '[nvme]\ndir = "{here}/file"\ncapacity = "64MiB"',
            "{here}/file can't be used for --nvme-dir: Not a directory",
        ),
        ('[nvme]\ndir = "{here}/file/d"\ncapacity = "64MiB"', "{here}/file can't be used for --nvme-dir: Not a"),
        ('[nvme]\ndir = "{here}/a/b"\ncapacity = "64MiB"', "{here}/a can't be used for --nvme-dir: No such file"),
        ('[grpc]\nlisten = "unix:{here}/g"\ntoken_file = "{here}/t"', "--grpc-token-file '{here}/t' can't be used: No"),
        (
            '[grpc]\nlisten = "unix:{here}/g"\ntoken_file = "{here}"',
            "--grpc-token-file '{here}' can't be used: it is no",
        ),
        (
            '[grpc]\nlisten = "localhost:1"\ntls_cert = "{here}/c"\ntls_key = "{here}/file"\ntoken_file="{here}/file"',
            "--grpc-tls-cert '{here}/c' can't be used: No such file",
        ),
        ('[grpc]\ntoken_file = "{here}/file"', "--grpc-token-file needs --grpc-listen"),
        ('[hbm]\ndevice = "gpu7"\ncapacity = "64MiB"', "k.toml, line 2"),
        ('[hbm]\ndevice = "cuda:97"\ncapacity = "64MiB"', "--hbm-device cuda:97: "),
        ('[daemon]\nsocket = "{here}/s"\n[holder]\nsocket = "{here}/s"', "--socket and --holder are both"),
    ],
)
def test_check_finds_what_this_machine_or_another_listener_makes_impossible(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "file").write_text("x")
    file = tmp_path / "k.toml"
    file.write_text(text.format(here=tmp_path))
    done = run("config", "--check", str(file))
    assert done.returncode == 2, done.stdout
    assert words.format(here=tmp_path) in done.stderr


def test_check_finds_nothing_wrong_with_what_is_there(tmp_path: Path) -> None:
    for name in ("c", "k", "t"):
        (tmp_path / name).write_text("x")
    file = tmp_path / "k.toml"
    file.write_text(
        f'[nvme]\ndir = "{tmp_path}/new"\ncapacity = "1MiB"\n[metrics]\nlisten = "127.0.0.1:9090"\n[grpc]\n'
        f'listen = "127.0.0.1:9091"\ntls_cert = "{tmp_path}/c"\ntls_key = "{tmp_path}/k"\ntoken_file = "{tmp_path}/t"\n'
    )
    done = run("config", "--check", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "new").exists()


def test_the_example_passes_its_own_check(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text(run("config", "--example").stdout)
    done = run("config", "--check", str(file), "--json")
    assert json.loads(done.stdout) == {"file": str(file), "ok": True, "settings": 0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["config"], "say one of --show"),
        (["config", "--show", "--example"], "say one of --show"),
        (["config", "--check", "/nowhere/k.toml"], "/nowhere/k.toml can't be read"),
        (["config", "--show", "--config", "/nowhere/k.toml"], "/nowhere/k.toml can't be read"),
        (["config", "--show", "--dram", "1KiB"], "1024"),
        (["serve", "--socket", "none"], "give --socket a path"),
        (["serve", "--policy", "mru"], "policy is 'mru'; known are fifo, "),
        (["serve", "--config", "/nowhere/k.toml"], "/nowhere/k.toml can't be read"),
        (["serve", "--metrics-listen", "0.0.0.0:1"], "--metrics-allow-remote"),
        (["serve", "--grpc-listen", "127.0.0.1:1"], "--grpc-tls-cert"),
        (["serve", "--log-format", "xml"], "one of text, json"),
    ],
)
def test_mistakes_are_named_with_a_way_out(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


def test_serve_takes_all_layers_and_blames_the_right_one(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text(f'[nvme]\ndir = "{tmp_path}/a/b/c"\ncapacity = "64MiB"\n')
    done = run("serve", "--config", str(file), "--socket", str(tmp_path / "d.sock"), "--dram", "8MiB")
    assert done.returncode == 2
    assert f"{file}, line 2" in done.stderr
    file.write_text(f'[daemon]\nsocket = "{tmp_path}/d.sock"\n[dram]\ncapacity = "16MiB"\nprefault = false\n')
    with own_daemon(["--config", str(file), "--max-clients", "5"], tmp_path / "e.sock") as path:
        assert path == tmp_path / "e.sock"
        with Client(path, timeout_s=5.0) as client:
            assert client.stats()["dram_capacity_bytes"] == 16 << 20


def test_commands_find_the_daemon_by_the_file_too(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text(f'[daemon]\nsocket = "{tmp_path}/d.sock"\n')
    with own_daemon(["--dram", "8MiB"], tmp_path / "d.sock"):
        found = run("status", "--json", KVSTORE_CONFIG=str(file))
        assert json.loads(found.stdout)["dram_capacity_bytes"] == 8 << 20
        named = run("status", KVSTORE_CONFIG=str(file), KVSTORE_SOCKET=str(tmp_path / "e.sock"))
        assert named.returncode == 1
        assert "e.sock" in named.stderr


def test_a_daemon_of_ones_own_is_as_its_arguments_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_DRAM_CAPACITY", "nonsense")
    monkeypatch.setenv("KVSTORE_CONFIG", "/nowhere/at/all")
    with (
        own_daemon(["--dram", "8MiB"], tmp_path / "d.sock") as path,
        Client(path, timeout_s=5.0) as client,
    ):
        assert client.stats()["dram_capacity_bytes"] == 8 << 20


def test_a_log_for_machines_has_nothing_else_in_it(tmp_path: Path) -> None:
    """From the start to SIGTERM, on port 0, which the log tells."""
    command = [
        sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(tmp_path / "d.sock"), "--dram", "8MiB",
        "--log-format", "json", "--log-slow", "0.000001", "--metrics-listen", "127.0.0.1:0",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "KVSTORE_CONFIG": ""})
    assert process.stderr is not None
    first = json.loads(process.stderr.readline())
    assert (first["event"], first["level"], first["fields"]["dram_bytes"]) == ("serving", "info", 8 << 20)
    assert first["fields"]["socket"] == str(tmp_path / "d.sock")
    with Client(tmp_path / "d.sock", timeout_s=5.0, name="probe") as client:
        client.stats()
    with urllib.request.urlopen(f"http://127.0.0.1:{first['fields']['metrics_port']}/ready", timeout=20) as answer:
        assert json.load(answer)["ready"] is True
    process.terminate()
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    events = [json.loads(line) for line in rest.splitlines()]
    assert [each["event"] for each in events[-2:]] == ["stopping", "stopped"]
    slow = [each["fields"] for each in events if each["event"] == "slow_request"]
    assert ("stats", "probe") in {(each["method"], each["client"]) for each in slow}


def test_a_start_that_fails_is_told_in_the_same_form(tmp_path: Path) -> None:
    done = run("serve", "--socket", str(tmp_path / "d.sock"), "--nvme-dir", "/nowhere/at/all", "--nvme", "1GiB",
               "--log-format", "json")  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["event"] == "failed"
    assert "/nowhere/at" in json.loads(line)["message"]
