"""Operators' commands, and ``Client()``, with a daemon behind gRPC: where it is, and what they show to be let in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import __version__
from kvstore.client import Client
from kvstore.client.remote.shown import Shown, token_in
from kvstore.config import GrpcOptions
from kvstore.errors import BadInputError
from kvstore.types import KVSpec, Namespace
from tests.server.grpc.conftest import Certificates, make_certificates
from tests.server.grpc.test_access import free_port

TOKEN = "correct-horse-battery"  # noqa: S105 - of this test's own daemon
NAMESPACE = Namespace("llama", KVSpec.opaque(4, 8192))


def run(*arguments: str, code: int = 0, **environment: Any) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        capture_output=True, text=True, timeout=90, check=False, env={**plain, "KVSTORE_CONFIG": "", **environment},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, done.stderr + done.stdout
    return done


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text(f"# the engine's\n{TOKEN} default\n")
    return path


@pytest.fixture
def address(
    start_daemon: Callable[..., Any], nvme: dict[str, Any], certificates: Certificates, token_file: Path
) -> str:
    """Of a daemon that wants a token and a certificate."""
    place, (certificate, key) = f"localhost:{free_port()}", certificates.server
    start_daemon(
        grpc=GrpcOptions(
            place, tls_cert=certificate, tls_key=key, client_ca=certificates.authority, token_file=token_file
        ),
        **nvme,
    )
    return f"grpcs://{place}"


@pytest.fixture
def environment(address: str, certificates: Certificates, token_file: Path) -> dict[str, str]:
    certificate, key = certificates.client
    return {
        "KVSTORE_SOCKET": address, "KVSTORE_CLIENT_TOKEN_FILE": str(token_file),
        "KVSTORE_ROOT_CERTIFICATES": str(certificates.authority),
        "KVSTORE_CLIENT_CERTIFICATE": str(certificate), "KVSTORE_CLIENT_KEY": str(key),
    }  # fmt: skip


def test_options_lead_to_a_daemon_on_another_host(address: str, certificates: Certificates, token_file: Path) -> None:
    certificate, key = map(str, certificates.client)
    options = [
        "--socket", address, "--token-file", str(token_file), "--root-certificates", str(certificates.authority),
        "--client-certificate", certificate, "--client-key", key,
    ]  # fmt: skip
    stats = json.loads(run("status", "--json", *options, "--timeout", "20").stdout)
    assert stats["grpc_sessions"] == 1
    assert f"kvstored at {address}" in run("status", *options, "--timeout", "20").stdout


def test_so_do_variables_for_every_command_that_only_asks(environment: dict[str, str], tmp_path: Path) -> None:
    tokens = list(range(12))
    (tmp_path / "prompts.jsonl").write_text(json.dumps(tokens) + "\n")
    blocks, file = np.zeros((3, 8192), np.uint8), str(tmp_path / "prompts.jsonl")
    more: dict[str, Any] = {**environment, "COLUMNS": "200"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with Client(timeout_s=20.0) as client:
            ns = client.open(NAMESPACE)
            assert ns.put(tokens, blocks, durable_within_s=20.0).n_durable == 3
    for arguments, words in (
        (["status"], "kvstored at grpcs://"),
        (["version"], f"daemon  {__version__}"),
        (["top", "--once", "--interval", "0.1"], "llama"),
        (["inspect", "namespaces"], "llama"),
        (["inspect", "namespace"], "llama"),
        (["inspect", "prompt", file], "dram"),
        (["explain", file], "blocks can be used"),
        (["inspect", "claims"], "kvstore inspect"),
        (["watch", "--for", "0.1"], ""),
        (["warm", file], "prompts"),
        (["clear", "--everything", "--yes"], "cleared"),
    ):
        shown = run(*arguments, "--timeout", "20", **more)
        assert words in shown.stdout, arguments
    assert "on its machine" in run("verify", "--connect", "--timeout", "20", code=1, **more).stderr


def test_what_can_not_be_is_said(environment: dict[str, str], tmp_path: Path) -> None:
    lacking: dict[str, Any] = {**environment, "KVSTORE_CLIENT_KEY": ""}
    assert "certificate and no key" in run("status", code=2, **lacking).stderr
    lacking = {**environment, "KVSTORE_ROOT_CERTIFICATES": ""}
    assert "certificate is not trusted" in run("status", "--timeout", "20", code=1, **lacking).stderr
    lacking = {**environment, "KVSTORE_CLIENT_TOKEN_FILE": "/nowhere/token"}
    assert "/nowhere/token can't be read" in run("status", code=2, **lacking).stderr
    token_file = environment["KVSTORE_CLIENT_TOKEN_FILE"]
    assert "gRPC address" in run("status", "--socket", "x.sock", "--token-file", token_file, code=2).stderr
    # What is for daemons elsewhere is nothing to one on this machine, and the other way round.
    here = run("status", "--socket", str(tmp_path / "none.sock"), code=1, **environment).stderr
    assert "start one with" in here
    for command in (["serve", "--dram", "8MiB"], ["demo", "--once"]):
        assert "an address for clients" in run(*command, code=2, **environment).stderr


@pytest.mark.parametrize(
    ("text", "words"), [("", "has 0 tokens"), ("a-token\nanother\n", "has 2 tokens"), ("naïve\n", "than ASCII")]
)
def test_a_clients_token_file_has_one_token(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(BadInputError, match=words):
        token_in(path)
    path.write_text(f"\n# mine\n{TOKEN} b\n")
    assert Shown.of({"KVSTORE_CLIENT_TOKEN_FILE": str(path)}) == Shown(TOKEN)


def test_a_token_in_the_environment_goes_to_no_other_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What stands beside ``$KVSTORE_SOCKET`` is for the daemon there."""
    monkeypatch.setenv("KVSTORE_CLIENT_TOKEN_FILE", "/nowhere/token")
    with Client("grpcs://localhost:1", required=False, timeout_s=5.0) as client:
        assert client._session._link.address.token == ""
    monkeypatch.setenv("KVSTORE_SOCKET", "grpcs://localhost:1")
    with pytest.raises(BadInputError, match="/nowhere/token can't be read"):
        Client(required=False)
