"""Operators' commands against a real daemon: what they print, their JSON, their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import __version__
from kvstore.client import Client
from kvstore.types import KVSpec, Namespace, Shard
from tests.tiers.segment_files import frames_in

NAMESPACE = Namespace(model="llama", revision="r1", spec=KVSpec.opaque(4, 8192))
OTHER = Namespace(model="qwen", spec=KVSpec.opaque(4, 8192))


class Command:
    """``kvstore`` as a process, with a daemon's socket in its environment."""

    def __init__(self, daemon: Any, tmp_path: Path) -> None:
        self.daemon = daemon
        self.path: Path = daemon.config.socket_path
        self.tmp_path = tmp_path

    def __call__(
        self, *arguments: str, code: int = 0, stdin: str = "", columns: str = "200"
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvstore.cli", *arguments]
        environment = {"KVSTORE_SOCKET": str(self.path), "COLUMNS": columns, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, check=False, env=environment, input=stdin
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, done.stderr + done.stdout
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code).stdout)

    def tokens(self, name: str, *prompts: list[int]) -> str:
        path = self.tmp_path / name
        if name.endswith(".npy"):
            np.save(path, np.array(prompts if len(prompts) > 1 else prompts[0]))
        elif name.endswith(".jsonl"):
            path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        else:
            path.write_bytes(np.array(prompts[0], "<u4").tobytes())
        return str(path)


def prompt(n_blocks: int, tag: int = 0) -> list[int]:
    return [tag * 1000 + i for i in range(4 * n_blocks)]


def store(client: Client, namespace: Namespace, n_blocks: int, tag: int = 0, name: str = "") -> None:
    blocks = np.random.default_rng(tag).integers(0, 256, (n_blocks, 8192), np.uint8)
    assert client.open(namespace, name).put(prompt(n_blocks, tag), blocks, durable_within_s=10.0).n_durable == n_blocks


@pytest.fixture
def two_tiers(start_daemon: Callable[..., Any], nvme: dict[str, Any]) -> Any:
    return start_daemon(**nvme)


@pytest.fixture
def client(two_tiers: Any) -> Iterator[Client]:
    with Client(two_tiers.config.socket_path, timeout_s=5.0) as connected:
        yield connected


@pytest.fixture
def kvstore(two_tiers: Any, tmp_path: Path) -> Command:
    return Command(two_tiers, tmp_path)


def test_versions_with_and_without_a_daemon(kvstore: Command, tmp_path: Path) -> None:
    found = kvstore.json("version")
    assert found["client"] == found["daemon"]["version"] == __version__
    assert found["libraries"]["numpy"] == np.__version__
    assert bool(found["gpus"]) != bool(found["gpus_error"])
    shown = kvstore("version").stdout
    assert f"kvstore {__version__}" in shown
    assert (found["gpus_error"] or found["gpus"][0]) in shown
    alone = kvstore.json("version", "--socket", str(tmp_path / "nobody.sock"))
    assert alone["daemon"]["version"] == ""
    assert "nobody.sock" in alone["daemon"]["error"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_gives_a_script_that_asks_this_program(kvstore: Command, shell: str) -> None:
    assert "_KVSTORE_COMPLETE" in kvstore("completion", shell).stdout


def test_help_has_every_command_and_the_exit_codes(kvstore: Command) -> None:
    text = kvstore("--help").stdout
    for name in ("clear", "completion", "explain", "inspect", "top", "verify", "version", "warm", "watch"):
        assert f"\n  {name} " in text
        assert "Usage: kvstore" in kvstore(name, "--help").stdout
    assert "3 wrong bytes found" in " ".join(text.split())


def test_inspect_namespaces_and_one_of_them(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 3, name="prod")
    store(client, OTHER, 2)
    listed = kvstore.json("inspect", "namespaces")
    assert {each["namespace"]["model"]: each["n_nvme_blocks"] for each in listed} == {"llama": 3, "qwen": 2}
    assert NAMESPACE.digest().hex()[:12] in kvstore("inspect", "namespaces").stdout
    one = kvstore.json("inspect", "namespace", "--name", "prod")
    assert Namespace.from_dict(one["namespace"]) == NAMESPACE
    assert "several" not in kvstore("inspect", "namespace", "--model", "qwen").stdout
    assert "2 namespaces fit" in kvstore("inspect", "namespace", code=2).stderr
    longer = replace(NAMESPACE, spec=KVSpec.opaque(8, 8192))
    client.open(longer)
    said = kvstore("inspect", "namespace", "--model", "llama", code=2).stderr
    assert "spec.block_tokens: " in said
    assert "2 namespaces fit" in said
    assert "no namespace fits" in kvstore("inspect", "namespace", "--model", "x", code=2).stderr


@pytest.mark.parametrize("command", ["inspect namespaces", "inspect tenants", "top --once", "explain FILE"])
def test_whose_nothing_it_is_that_is_shown(kvstore: Command, client: Client, command: str) -> None:
    store(client, NAMESPACE, 1)
    file = kvstore.tokens("p.jsonl", prompt(1))
    is_error = command.startswith("explain")
    done = kvstore(*command.replace("FILE", file).split(), "--tenant", "nobody", code=2 if is_error else 0)
    said = done.stdout if command.startswith("top") else done.stderr
    assert "of tenant 'nobody': likely no engine has stored anything yet" in said
    assert "--all-tenants" in said


def test_a_file_of_wide_token_ids_is_recognised(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 3)
    path = kvstore.tmp_path / "wide.bin"
    path.write_bytes(np.array(prompt(3), "<i8").tobytes())
    assert "ids of 8 bytes" in kvstore("explain", str(path), code=2).stderr


@pytest.mark.parametrize("kind", ["p.jsonl", "p.npy", "p.bin"])
def test_inspect_a_prompt_from_any_kind_of_file(kvstore: Command, client: Client, kind: str) -> None:
    store(client, NAMESPACE, 3)
    other = prompt(3)
    other[10] = 7
    seen = kvstore.json("inspect", "prompt", kvstore.tokens(kind, other))
    assert (seen["n_blocks"], seen["partial_tokens"], seen["differs_at_token"]) == (2, 2, 10)
    assert [block["tiers"] for block in seen["blocks"]] == [["dram", "nvme"]] * 3
    text = kvstore("inspect", "prompt", kvstore.tokens(kind, other)).stdout
    assert "another token at 10 (10, here 7)" in text


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("p.jsonl", b"[1, 2\n", "not JSON"),
        ("p.jsonl", b'{"x": 1}\n', "without 'tokens'"),
        ("p.jsonl", b"[1, -2]\n", "out of range"),
        ("p.jsonl", b"7\n", "no list"),
        ("p.npy", b"nonsense", "no numpy array"),
        ("p.bin", b"12345", "4 bytes each"),
        ("p.jsonl", b"", "no prompt number 0"),
        ("missing.bin", None, "can't be read"),
    ],
)
def test_a_file_that_holds_no_prompt_is_refused_with_its_fault(
    kvstore: Command, tmp_path: Path, name: str, data: bytes | None, words: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    assert words in kvstore("inspect", "prompt", str(tmp_path / name), code=2).stderr


def test_pins_outlive_the_command_and_are_let_go_of(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 3)
    file = kvstore.tokens("p.jsonl", prompt(3), prompt(2, 8))
    done = kvstore.json("pin", file)
    assert [(each["n_blocks"], each["ttl_s"] > 500) for each in done["pins"]] == [(3, True), (0, False)]
    assert (done["n_pins"], done["pinned_bytes"]) == (1, 3 * 8192)
    assert client.stats()["pins"] == 1
    (claim,) = client.claims().claims
    assert (claim.kind, claim.session_ids, claim.n_blocks) == ("pin", (), 3)
    text = kvstore("pin", file, "--ttl", "5").stdout.splitlines()
    assert text[0].endswith(": 3 blocks for 5 s")
    assert text[1] == "prompt 1: nothing is stored"
    assert text[2].startswith("tenant default has 24.0 KiB pinned of the ")
    assert kvstore("pin", file, "--ttl", "2h", "--number", "0").stdout.splitlines()[1:2] == [
        "not for the 7,200 s asked for: the daemon's pins.max (--pin-max) allows no more"
    ]
    assert kvstore("pin", file, "--number", "1", code=1).stdout.startswith("prompt 1: nothing is stored\n")
    assert "no prompt number 2" in kvstore("pin", file, "--number", "2", code=2).stderr
    number = done["pins"][0]["id"]
    assert kvstore.json("unpin", str(number), "7") == {
        "unpinned": [number], "not_found": [7], "n_pins": 2, "pinned_bytes": 3 * 8192,
        "pin_max_bytes": done["pin_max_bytes"],
    }  # fmt: skip
    mine = client.open(NAMESPACE).pin(prompt(1))
    assert kvstore("unpin", "7", code=1).stdout.startswith("0 of 1 pins let go of; ")
    assert kvstore("unpin", "--all").stdout.startswith("2 of 2 pins let go of; tenant default has 8.0 KiB pinned")
    assert kvstore("unpin", "--all").stdout.startswith("0 of 0 pins let go of")
    assert client.unpin(mine.id)
    assert "give the ids of pins, or --all" in kvstore("unpin", code=2).stderr


@pytest.mark.parametrize("what", ["inf", "nan", "-1", "5 weeks"])
def test_no_time_is_anything_but_a_duration(kvstore: Command, client: Client, tmp_path: Path, what: str) -> None:
    store(client, NAMESPACE, 1)
    file, trace = kvstore.tokens("p.jsonl", prompt(1)), tmp_path / "none.jsonl"
    for arguments in (("record", str(trace), "--for", what), ("watch", "--for", what), ("pin", file, "--ttl", what)):
        stderr = kvstore(*arguments, code=2).stderr
        assert f"'{what}' is not a duration; write for example" in stderr
        assert "those before it" not in stderr
    assert not trace.exists()


def test_where_the_first_pin_is_one_too_many_none_is_said_to_be_there(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 3)
    kvstore.daemon.call(lambda daemon: setattr(daemon.store.pin_quota, "_tenant_bytes", 8192))
    refused = kvstore("pin", kvstore.tokens("p.jsonl", prompt(3)), code=2).stderr
    assert "prompt 0: " in refused
    assert "those before it" not in refused
    refused = kvstore("pin", kvstore.tokens("p.jsonl", prompt(1), prompt(3)), code=2).stderr
    assert "prompt 1: " in refused
    assert "those before it are pinned" in refused


def test_a_pin_of_another_tenant_s_stays(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 3)
    done = kvstore.json("pin", kvstore.tokens("p.jsonl", prompt(3)))
    number = str(done["pins"][0]["id"])
    assert kvstore.json("unpin", number, "--tenant", "b", code=1)["not_found"] == [int(number)]
    assert client.stats()["pins"] == 1


def test_requests_are_recorded_until_there_are_enough(kvstore: Command, client: Client, tmp_path: Path) -> None:
    store(client, NAMESPACE, 3)
    done: list[Any] = []
    trace = tmp_path / "mine.jsonl"
    recording = threading.Thread(
        target=lambda: done.append(kvstore.json("record", str(trace), "--count", "2", "--for", "60"))
    )
    recording.start()
    handle = client.open(NAMESPACE)
    while recording.is_alive():
        with handle.lease(prompt(2)):
            recording.join(0.05)
    assert done == [{"requests": 2, "unique_blocks": 2, "lost_requests": 0}]
    assert [line["hash_ids"] for line in map(json.loads, trace.read_text().splitlines())] == [[0, 1]] * 2
    plan = kvstore.json("plan", str(trace), "--policy", "lru", "--percent", "100")
    assert plan["unique_blocks"] == 2
    assert "exists: give another name" in kvstore("record", str(trace), code=2).stderr
    nowhere = str(tmp_path / "nowhere" / "mine.jsonl")
    said = kvstore("record", nowhere, "--for", "1s", code=2).stderr
    assert f"{nowhere} can't be written: No such file or directory; name another file" in said
    nothing = kvstore("record", str(tmp_path / "none.jsonl"), "--for", "0").stdout
    assert nothing.startswith("0 requests of 0 different blocks are in ")


def test_a_recording_goes_on_after_a_restart(
    kvstore: Command, client: Client, start_daemon: Callable[..., Any], wait_until: Any, tmp_path: Path
) -> None:
    store(client, NAMESPACE, 1)
    trace = tmp_path / "mine.jsonl"
    done: list[subprocess.CompletedProcess[str]] = []
    arguments = ("record", str(trace), "--count", "2", "--for", "60")
    recording = threading.Thread(target=lambda: done.append(kvstore(*arguments)))
    recording.start()
    handle = client.open(NAMESPACE)
    wait_until(trace.exists, "it has begun")
    handle.lease(prompt(1)).release()
    wait_until(lambda: bool(trace.read_text()), "the request is written down")
    kvstore.daemon.stop()
    start_daemon(socket_path=kvstore.path)
    assert client.wait_healthy(20.0)
    while recording.is_alive():
        handle.lease(prompt(2)).release()
        recording.join(0.05)
    assert done[0].stdout.startswith("2 requests of ")
    assert "requests may be missing here" in done[0].stderr
    assert len(trace.read_text().splitlines()) == 2


def test_explain_says_why_a_prompt_misses_and_ends_well(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 3)
    other = prompt(4)
    other[10] = 7
    file = kvstore.tokens("p.jsonl", prompt(3), other)
    assert kvstore.json("explain", file)["reason"] == "stored"
    told = kvstore.json("explain", file, "--number", "1", "--model", "llama")
    assert (told["n_blocks"], told["block"], told["reason"], told["differs_at_token"]) == (2, 2, "never_stored", 10)
    text = kvstore("explain", file, "--number", "1").stdout.splitlines()
    assert text[0] == "2 of 4 blocks can be used, and 2 tokens of one more: 2 in DRAM, 0 on NVMe only"
    assert text[1].startswith("block 2 (tokens 8 to 11) was never stored, since the daemon started ")
    assert text[-1].startswith("what to do: hits need equal tokens")
    store(client, OTHER, 1)
    assert kvstore.json("explain", file, "--salt", "x", "--model", "qwen")["roots"] == []
    salted = kvstore.json("explain", file, "--salt", "x", "--model", "qwen", "--other-salts")
    assert [(near["digest"], near["n_matching"]) for near in salted["namespaces"]] == []
    assert [(root["salt_differs"], root["n_matching"]) for root in salted["roots"]] == [(True, 1)]
    assert "2 namespaces fit" in kvstore("explain", file, code=2).stderr
    assert "no prompt number 2" in kvstore("explain", file, "--number", "2", "--model", "qwen", code=2).stderr


def test_inspect_claims(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 3)
    with client.open(NAMESPACE).lease(prompt(3)) as lease:
        seen = kvstore.json("inspect", "claims")
        assert "lease" in kvstore("inspect", "claims").stdout
    assert [(claim["kind"], claim["id"], claim["n_blocks"]) for claim in seen["claims"]] == [("lease", lease.id, 3)]
    assert len(seen["sessions"]) == 2


def test_clear_asks_counts_and_clears(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 3)
    store(client, OTHER, 2)
    assert kvstore.json("clear", "--model", "llama", "--dry-run")["n_blocks"] == 3
    refused = kvstore("clear", "--model", "llama", code=130, stdin="n\n")
    assert "3 blocks of 1 namespaces" in refused.stderr
    assert f"{NAMESPACE.digest().hex()[:12]} llama@r1" in refused.stderr
    unanswered = kvstore("clear", "--model", "llama", code=2)
    assert "nobody is there to answer: give --yes" in unanswered.stderr
    assert "interrupted" not in unanswered.stderr
    assert client.open(NAMESPACE).match(prompt(3)).n_blocks == 3
    done = kvstore.json("clear", "--model", "llama", "--revision", "r1", "--yes")
    assert (done["n_blocks"], done["durable"], done["n_left_blocks"]) == (3, True, 0)
    assert client.open(NAMESPACE).match(prompt(3)).n_blocks == 0
    assert client.open(OTHER).match(prompt(2)).n_blocks == 2
    kvstore("clear", "--everything", stdin="y\n")
    assert client.open(OTHER).match(prompt(2)).n_blocks == 0


@pytest.mark.parametrize("how", ["--yes", "--dry-run", "--json"])
def test_clear_says_that_nothing_fits(kvstore: Command, client: Client, how: str) -> None:
    assert "no namespace" in kvstore("clear", "--model", "nope", how, code=2).stderr
    store(client, NAMESPACE, 1)
    said = kvstore("clear", "--model", "nope", how, code=2).stderr
    assert f"no namespace fits; it knows {NAMESPACE.digest().hex()[:12]} llama@r1" in said
    kvstore("clear", "--model", "llama", "--revision", "r2", how, code=2)
    assert client.open(NAMESPACE).match(prompt(1)).n_blocks == 1


def test_ranks_of_one_model_are_told_apart_and_cleared_one_by_one(kvstore: Command, client: Client) -> None:
    model, revision = "an-organization/some-long-model-name", "0e9e39f249a16976918f6564b8830bc894c89659"
    ranks = [
        Namespace(model=model, revision=revision, spec=KVSpec.opaque(4, 8192), shard=Shard(tp_rank=rank, tp_size=2))
        for rank in range(2)
    ]
    for rank in ranks:
        store(client, rank, 2)
    for arguments in (["inspect", "namespaces"], ["clear", "--everything", "--dry-run"]):
        for columns in ("80", "200"):
            text = kvstore(*arguments, columns=columns).stdout
            squeezed = "".join(line.split("│")[2].strip() if line.count("│") > 2 else "" for line in text.splitlines())
            assert max(map(len, text.splitlines())) <= int(columns)
            for number, rank in enumerate(ranks):
                assert rank.digest().hex()[:12] in text
                assert f"{model}@{revision}tp{number}/2" in squeezed.replace(" ", "")
    assert "llama" not in text
    said = kvstore("inspect", "namespace", "--model", model, code=2).stderr
    assert "say which (--digest" in said
    assert f"{ranks[1].digest().hex()[:12]} {model}@{revision} tp 1/2" in said
    done = kvstore.json("clear", "--digest", ranks[1].digest().hex()[:12], "--yes")
    (gone,) = done["namespaces"]
    assert [each["n_blocks"] for each in kvstore.json("inspect", "namespaces", "--shard", "tp=0")] == [2]
    assert kvstore.json("inspect", "namespaces", "--shard", "tp=0,pp=1") == []
    for wrong in ("1", "tp=x", "tp=1,tp=0", "dp=0", "tp=70000"):
        said = kvstore("inspect", "namespaces", "--shard", wrong, code=2).stderr
        assert "is no rank of a shard" in " ".join(said.split())
    assert (Namespace.from_dict(gone["namespace"]), gone["n_blocks"]) == (ranks[1], 2)
    assert client.open(ranks[0]).match(prompt(2)).n_blocks == 2


@pytest.mark.parametrize("arguments", [[], ["--model", "m", "--everything"], ["--digest", "xyz"], ["--revision", "r"]])
def test_clear_refuses_what_was_not_meant(kvstore: Command, client: Client, arguments: list[str]) -> None:
    store(client, NAMESPACE, 1)
    kvstore("clear", *arguments, "--yes", code=2)
    assert client.open(NAMESPACE).match(prompt(1)).n_blocks == 1


def test_warm_reads_prompts_from_nvme(kvstore: Command, client: Client, start_daemon: Callable[..., Any]) -> None:
    store(client, NAMESPACE, 3, tag=1)
    store(client, NAMESPACE, 2, tag=2)
    client.close()
    kvstore.daemon.stop()
    again = start_daemon(nvme_dir=kvstore.daemon.config.nvme_dir, nvme_bytes=kvstore.daemon.config.nvme_bytes)
    file = kvstore.tokens("p.jsonl", prompt(3, 1), prompt(2, 2), prompt(4, 9))
    done = kvstore.json("warm", file, "--rate", "100MiB")
    assert done == {"prompts": 3, "found_blocks": 5, "ready_blocks": 5, "loaded_blocks": 5, "pending_blocks": 0}
    with Client(again.config.socket_path, timeout_s=5.0) as other:
        assert other.open(NAMESPACE).match(prompt(3, 1)).n_dram_blocks == 3
    assert kvstore.json("warm", file, "--limit", "1")["loaded_blocks"] == 0
    assert "5" in kvstore("warm", file).stdout
    more = kvstore.tokens("more.npy", prompt(2, 2))
    assert kvstore.json("warm", file, more)["prompts"] == 4
    assert kvstore.json("warm", more, file, "--limit", "1")["found_blocks"] == 5
    assert "no prompt" in kvstore("warm", file, kvstore.tokens("none.jsonl"), code=2).stderr


def test_watch_prints_a_line_per_event(kvstore: Command, client: Client) -> None:
    arguments = ["watch", "--socket", str(kvstore.path), "--after", "0", "--count", "3"]
    command = [sys.executable, "-m", "kvstore.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        store(client, NAMESPACE, 2)
        events = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert process.wait(30) == 0
    assert first == {"kind": "lost", "n": None}
    assert [(each["kind"], each["tier"], each["n_tokens"]) for each in events] == [("stored", "dram", 4)] * 2
    assert events[1]["parent"] == events[0]["key"]
    assert events[0]["namespace"] == NAMESPACE.digest().hex()
    assert kvstore("watch", "--for", "0.05").stdout == ""


def test_watch_of_some_kinds_and_namespaces(kvstore: Command, client: Client) -> None:
    after = ("--after", str(client.watch().seq), "--for", "0.05")
    store(client, NAMESPACE, 1)
    store(client, OTHER, 2)

    def seen(*arguments: str) -> list[Any]:
        return [json.loads(line) for line in kvstore("watch", *after, *arguments).stdout.splitlines()]

    assert [each["kind"] for each in seen("--kind", "moved", "--kind", "removed")] == ["moved"] * 3, "to NVMe"
    assert [each["namespace"] for each in seen("--kind", "stored", "--model", "llama")] == [NAMESPACE.digest().hex()]
    assert seen("--shard", "tp=1") == []
    assert "'gone' is not one of" in kvstore("watch", "--kind", "gone", code=2).stderr


def test_top_once(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 3)
    client.open(NAMESPACE).lease(prompt(3)).release()
    seen = kvstore.json("top", "--once", "--interval", "0.1")
    assert seen["tiers"]["dram"]["used_bytes"] == 3 * 8192
    assert seen["tiers"]["nvme"]["used_bytes"] >= 3 * 8192
    assert set(seen["rates"]) >= {"hit_blocks_per_s", "evicted_blocks_per_s", "stored_bytes_per_s"}
    assert [each["n_hit_blocks"] for each in seen["namespaces"]] == [3]
    assert all(isinstance(seen[name], int) for name in ("sessions", "leases", "blocks"))
    (stats,) = (each for each in seen["latencies"] if (each["method"], each["waited"]) == ("stats", False))
    assert 0 < stats["p50_s"] <= stats["p99_s"]
    status = kvstore.json("status")
    assert isinstance(status["dram_used_bytes"], int)
    assert isinstance(status["lookups"], int)
    assert isinstance(status["uptime_s"], float)
    text = kvstore("top", "--once", "--interval", "0.1").stdout
    assert "DRAM" in text
    assert "llama@r1" in text
    assert "p99" in text


def test_verify_a_directory_and_repair_it(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 4)
    directory = str(kvstore.daemon.config.nvme_dir)
    assert "in use by another process" in kvstore("verify", directory, code=1).stderr
    assert "in use by another process" in kvstore("verify", directory, "--repair", code=1).stderr
    key = client.open(NAMESPACE).inspect(prompt(4)).keys[1].tobytes()
    client.close()
    kvstore.daemon.stop()
    assert kvstore.json("verify", directory)["ok"]
    (frame,) = [each for each in frames_in(Path(directory)) if each.key == key]
    number, offset = str(int(frame.path.name.removeprefix("segment-"))), str(frame.offset)
    header = json.loads(kvstore("inspect", "frame", directory, number, offset).stdout)
    assert (header["key"], header["intact"]) == (key.hex(), True)
    frame.flip(frame.payload_offset)
    assert not json.loads(kvstore("inspect", "frame", directory, number, offset, code=3).stdout)["intact"]
    assert "no frame starts here" in kvstore("inspect", "frame", directory, number, "0", code=3).stderr
    assert kvstore.json("inspect", "directory", directory)["n_names"] == 4
    found = kvstore.json("verify", directory, code=3)
    assert (found["n_corrupt"], found["n_orphans"], found["n_intact"]) == (1, 2, 1)
    assert key.hex() in kvstore("verify", directory, code=3).stdout
    assert "1 names of the catalog were kept, 3 dropped" in kvstore("verify", directory, "--repair").stdout
    assert kvstore.json("verify", directory)["n_intact"] == 1


def test_verify_a_running_daemon(kvstore: Command, client: Client) -> None:
    store(client, NAMESPACE, 4)
    assert kvstore.json("verify", "--connect") == {
        "n_blocks": 4, "n_frames": 4, "n_bytes": 4 * 12288, "n_corrupt": 0, "n_unreadable": 0, "n_unread": 0,
        "problems": [], "ok": True,
    }  # fmt: skip
    frames = list(frames_in(kvstore.daemon.config.nvme_dir))
    frames[0].flip(frames[0].payload_offset)
    assert "1" in kvstore("verify", "--connect", code=3).stdout
    assert "frames damaged" in kvstore("verify", "--connect").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify"], "give the DIRECTORY"),
        (["verify", "--connect", "--repair"], "--repair is for a directory"),
        (["verify", "/nowhere"], "no such directory"),
        (["inspect", "directory", "/nowhere"], "no such directory"),
        (["inspect", "frame", "/nowhere", "0", "0"], "can't be read"),
        (["completion", "tcsh"], "tcsh"),
        (["warm", "/nowhere.jsonl"], "can't be read"),
    ],
)
def test_wrong_input_is_said_in_one_line(kvstore: Command, arguments: list[str], words: str) -> None:
    assert words in kvstore(*arguments, code=2).stderr


@pytest.mark.parametrize("name", ["namespaces", "claims"])
def test_without_a_daemon_it_is_said_with_exit_code_1(kvstore: Command, tmp_path: Path, name: str) -> None:
    done = kvstore("inspect", name, "--socket", str(tmp_path / "nobody.sock"), code=1)
    assert "start one with" in done.stderr
