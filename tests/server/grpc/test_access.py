"""Who is let in: tokens, tenants, TLS, certificates of clients."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.client import Client
from kvstore.config import GrpcOptions
from kvstore.errors import (
    BadInputError,
    ConfigError,
    DeniedError,
    EndedError,
    InUseError,
    SocketInUseError,
    UnavailableError,
)
from kvstore.server.grpc.access import TokenFile
from kvstore.types import KVSpec, Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from tests.server.grpc.conftest import NAMESPACE, Bare, Certificates, blocks_of, refused

TOKEN, BOUND = "correct-horse-battery", "tenant-b-has-its-own"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return write_tokens(tmp_path, f"# callers\n{TOKEN}\n\n{BOUND} b\n")


def write_tokens(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.touch(mode=0o600)
    path.write_text(text)
    path.chmod(mode)
    return path


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture
def tcp(certificates: Certificates, token_file: Path, start_daemon: Callable[..., Any]) -> Callable[..., str]:
    """``tcp(**options)``: a daemon on TCP; returns where."""

    def start(**more: Any) -> str:
        place = f"localhost:{free_port()}"
        certificate, key = certificates.server
        options = GrpcOptions(place, tls_cert=certificate, tls_key=key, token_file=token_file, **more)
        start_daemon(grpc=options)
        return place

    return start


def connect(place: str, certificates: Certificates, **arguments: Any) -> Client:
    roots = certificates.authority
    return Client(f"grpcs://{place}", **{"timeout_s": 10.0, "root_certificates": roots, **arguments})


def test_a_token_and_tls_let_in(tcp: Callable[..., str], certificates: Certificates) -> None:
    with connect(tcp(), certificates, token=TOKEN) as client:
        ns = client.open(NAMESPACE)
        tokens = list(range(64))
        assert ns.put(tokens, blocks_of(4)).n_stored == 4
        with ns.lease(tokens) as lease:
            assert (lease[2] == blocks_of(4)[2]).all()


@pytest.mark.parametrize("token", [None, "wrong-horse-battery-x", TOKEN[:-1], TOKEN + "x", BOUND[:-1] + "N"])
def test_without_the_right_token_nothing_is_answered(
    tcp: Callable[..., str], certificates: Certificates, token: str | None
) -> None:
    place = tcp()
    with pytest.raises(DeniedError, match="token"):
        connect(place, certificates, token=token)
    with connect(place, certificates, token=token, required=False) as client:
        found = client.open(NAMESPACE).match(range(64))
        assert (found.n_tokens, client.healthy) == (0, False)
        assert "does not let this client in" in found.reason
        assert "token" in found.reason
        with pytest.raises(DeniedError, match="token"):
            client.stats()
    credentials = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.secure_channel(place, credentials) as channel:
        bare = Bare(channel, metadata)
        calls: list[Callable[[], Any]] = [
            lambda: bare.call("Stats", pb.StatsRequest(), pb.StatsReply),
            lambda: next(bare.read(spb.ReadRequest(lease_id=1))),
            lambda: next(bare.write(iter([spb.WriteRequest(reservation_id=1)]))),
            lambda: channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10, metadata=metadata),
        ]
        for call in calls:
            status, error = refused(call)
            assert status is grpc.StatusCode.UNAUTHENTICATED
            assert isinstance(error, DeniedError)


def test_a_token_that_is_taken_away_makes_misses_and_says_so(
    tcp: Callable[..., str], certificates: Certificates, token_file: Path, wait_until: Callable[..., None]
) -> None:
    place, tokens, blocks = tcp(), list(range(64)), blocks_of(4)
    with connect(place, certificates, token=TOKEN, required=False) as client:
        ns = client.open(NAMESPACE)
        assert ns.put(tokens, blocks).n_stored == 4
        lease, reservation = ns.lease(tokens), ns.reserve(list(range(90, 122)), n_blocks=2)
        assert len(lease) == 4
        reservation.fill(blocks[:2])
        write_tokens(token_file.parent, "another-token-of-today\n")
        with pytest.raises(EndedError, match="does not let this client in"):
            lease.view(0)
        assert not lease.valid
        assert lease.copy_into(np.zeros_like(blocks)) == 0
        assert not lease.renew()
        assert reservation.commit() == (0, 0)
        lease.release()
        results: list[Any] = [
            ns.match(tokens), ns.lease(tokens), ns.put(tokens, blocks), ns.get_into(tokens, np.zeros_like(blocks)),
            ns.prefetch(tokens), ns.persist(tokens), ns.reserve(tokens, n_blocks=4),
            client.open(NAMESPACE).match(tokens),
        ]  # fmt: skip
        assert {each.reason for each in results} == {lease._ended}
        assert "the token is unknown here" in lease._ended
        with pytest.raises(DeniedError, match="does not let this client in"):
            client.stats()
        with pytest.raises(DeniedError, match="does not let this client in"):
            connect(place, certificates, token=TOKEN)
        write_tokens(token_file.parent, f"{TOKEN}\n")
        assert client.wait_healthy(20)
        wait_until(lambda: ns.match(tokens).n_blocks == 4, "it is let in again")


def test_the_first_call_of_any_kind_may_be_the_one_that_is_denied(
    tcp: Callable[..., str], certificates: Certificates, token_file: Path
) -> None:
    place, tokens, blocks = tcp(), list(range(64)), blocks_of(4)
    with connect(place, certificates, token=TOKEN) as client:
        client.open(NAMESPACE).put(tokens, blocks)
    calls: list[Callable[[Any], Any]] = [
        lambda ns: ns.match(tokens), lambda ns: ns.lease(tokens), lambda ns: ns.put(tokens, blocks),
        lambda ns: ns.get_into(tokens, np.zeros_like(blocks)), lambda ns: ns.prefetch(tokens, wait=0.1),
    ]  # fmt: skip
    for call in calls:
        write_tokens(token_file.parent, f"{TOKEN}\n")
        with connect(place, certificates, token=TOKEN, required=False) as client:
            ns = client.open(NAMESPACE)
            write_tokens(token_file.parent, "another-token-of-today\n")
            assert "does not let this client in" in call(ns).reason
            assert not client.healthy


def test_open_of_a_required_client_says_that_it_is_denied(
    tcp: Callable[..., str], certificates: Certificates, token_file: Path
) -> None:
    with connect(tcp(), certificates, token=TOKEN) as client:
        write_tokens(token_file.parent, "another-token-of-today\n")
        with pytest.raises(DeniedError, match="does not let this client in"):
            client.open(NAMESPACE)


def test_a_token_of_a_tenant_is_for_that_one(tcp: Callable[..., str], certificates: Certificates) -> None:
    place = tcp()
    with pytest.raises(DeniedError, match="for tenant 'b', not for 'default'"):
        connect(place, certificates, token=BOUND)
    remedy = pytest.raises(BadInputError, match=r"Namespace\(\.\.\., tenant='b'\)")
    with connect(place, certificates, token=BOUND, tenant="b") as client, remedy:
        client.open(Namespace("model", KVSpec.opaque(16, 8192)))
    credentials = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
    with grpc.secure_channel(place, credentials) as channel:
        anybody = Bare(channel, (("authorization", f"Bearer {TOKEN}"),))
        _, theirs, hello = anybody.session(tenant="b")
        # The token of somebody else's session is of no use.
        thief = Bare(channel, (("authorization", f"Bearer {BOUND}"), ("kvstore-session-bin", hello.session_token)))
        status, _ = refused(lambda: thief.call("Heartbeat", pb.HeartbeatRequest(), pb.HeartbeatReply))
        assert status is grpc.StatusCode.ABORTED
        alone = Bare(channel, (("authorization", f"Bearer {BOUND}"), ("kvstore-tenant", "default")))
        status, _ = refused(lambda: alone.call("Stats", pb.StatsRequest(), pb.StatsReply))
        assert status is grpc.StatusCode.PERMISSION_DENIED
        theirs.cancel()


def test_plain_tcp_gets_nothing_from_a_server_with_tls(tcp: Callable[..., str]) -> None:
    place = tcp()
    with pytest.raises(UnavailableError, match=f"speaks TLS on this port: use grpcs://{place}"):
        Client(f"grpc://{place}", token=TOKEN, timeout_s=5.0)


def test_a_certificate_that_is_not_trusted_is_said(tcp: Callable[..., str], certificates: Certificates) -> None:
    place = tcp()
    for roots in (None, certificates.client[0]):
        with pytest.raises(UnavailableError, match=r"certificate is not trusted .*give root_certificates=") as caught:
            Client(f"grpcs://{place}", token=TOKEN, timeout_s=5.0, root_certificates=roots)
        assert "start one" not in str(caught.value)
    with pytest.raises(UnavailableError, match="root_certificates must be certificates"):
        Client(f"grpcs://{place}", token=TOKEN, timeout_s=5.0, root_certificates=b"nothing")
    with Client(f"grpcs://{place}", token=TOKEN, timeout_s=5.0, required=False) as client:
        assert "certificate is not trusted" in client.open(NAMESPACE).match(range(64)).reason
        assert "certificate is not trusted" in client.open(NAMESPACE).lease(range(64)).reason


def test_a_certificate_for_another_host_is_said(
    certificates: Certificates, token_file: Path, start_daemon: Callable[..., Any]
) -> None:
    certificate, key, port = *certificates.server, free_port()
    start_daemon(grpc=GrpcOptions(f"127.0.0.2:{port}", tls_cert=certificate, tls_key=key, token_file=token_file))
    with pytest.raises(UnavailableError, match=r"for another host .*127\.0\.0\.2"):
        connect(f"127.0.0.2:{port}", certificates, token=TOKEN)


def test_a_server_without_tls_is_said() -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(UnavailableError, match="does not speak TLS on this port"):
            Client(f"grpcs://127.0.0.1:{port}", timeout_s=5.0)
        server.stop(0).wait(10)


def test_nobody_there_is_still_said() -> None:
    with pytest.raises(UnavailableError, match=r"no kvstore daemon answers .*start one with"):
        Client(f"grpcs://127.0.0.1:{free_port()}", timeout_s=5.0)


def test_a_clients_grpc_writes_no_lines_of_its_own(tcp: Callable[..., str]) -> None:
    program = (
        "import sys; from kvstore.client import Client; "
        "Client(sys.argv[1], root_certificates=b'nothing', required=False, timeout_s=5.0).close()"
    )
    command = [sys.executable, "-c", program, f"grpcs://{tcp()}"]
    bare = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(command, env=bare, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    wanted = {**bare, "GRPC_VERBOSITY": "ERROR"}
    done = subprocess.run(command, env=wanted, capture_output=True, text=True, check=True, timeout=60)
    assert "Could not load any root certificate" in done.stderr


def test_a_daemons_log_has_no_lines_of_grpc(certificates: Certificates, token_file: Path, tmp_path: Path) -> None:
    """And a port that is taken ends it with exit code 1: it may be free later."""
    (certificate, key), place = certificates.server, f"localhost:{free_port()}"
    command = [
        sys.executable, "-m", "kvstore.cli", "serve", "--dram", "8MiB", "--no-prefault", "--log-format", "json",
        "--grpc-listen", place, "--grpc-tls-cert", str(certificate), "--grpc-tls-key", str(key),
        "--grpc-token-file", str(token_file),
    ]  # fmt: skip
    bare = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    first = subprocess.Popen(
        [*command, "--socket", str(tmp_path / "first.sock")], env=bare, stderr=subprocess.PIPE, text=True
    )
    try:
        assert first.stderr is not None
        lines = [first.stderr.readline()]
        while json.loads(lines[-1])["event"] != "serving":
            lines.append(first.stderr.readline())
        with pytest.raises(UnavailableError, match="not trusted"):
            Client(f"grpcs://{place}", token=TOKEN, timeout_s=5.0)
        second = subprocess.run(
            [*command, "--socket", str(tmp_path / "second.sock")],
            env=bare, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    finally:
        first.terminate()
        rest = first.communicate(timeout=60)[1]
    assert second.returncode == 1
    for line in (*rest.splitlines(), *second.stderr.splitlines()):
        assert json.loads(line)["message"]
    assert f"can't listen on {place}: Address already in use" in json.loads(second.stderr.splitlines()[-1])["message"]


def test_with_client_ca_a_certificate_is_needed_too(tcp: Callable[..., str], certificates: Certificates) -> None:
    place = tcp(client_ca=certificates.authority)
    with pytest.raises(UnavailableError, match="wants a certificate of its clients: give client_certificate="):
        connect(place, certificates, token=TOKEN, timeout_s=5.0)
    with pytest.raises(BadInputError, match="key belongs to another certificate"):
        connect(place, certificates, token=TOKEN, client_certificate=(certificates.client[0], certificates.server[1]))
    with connect(place, certificates, token=TOKEN, client_certificate=certificates.client) as client:
        assert client.stats()["grpc_sessions"] == 1
    with pytest.raises(DeniedError):
        connect(place, certificates, client_certificate=certificates.client)


def test_the_socket_is_for_its_owner_only(daemon: Any, options: GrpcOptions) -> None:
    facts = Path(options.listen.removeprefix("unix:")).stat()
    assert stat.S_ISSOCK(facts.st_mode)
    assert stat.S_IMODE(facts.st_mode) == 0o600


def test_a_second_daemon_leaves_the_first_ones_socket(
    daemon: Any, options: GrpcOptions, start_daemon: Callable[..., Any], tmp_path: Path, bare: Bare
) -> None:
    with pytest.raises(SocketInUseError, match="--grpc-listen"):
        start_daemon(socket_path=tmp_path / "other.sock")
    assert bare.stats()["sessions"] == 0


def test_a_port_that_is_taken_is_said(tcp: Callable[..., str], certificates: Certificates, token_file: Path) -> None:
    place = tcp()
    certificate, key = certificates.server
    options = GrpcOptions(place, tls_cert=certificate, tls_key=key, token_file=token_file)
    with pytest.raises(InUseError, match="Address already in use; choose another --grpc-listen") as caught:
        _start_another(options, token_file.parent)
    assert caught.value.settings == ("grpc.listen",)
    elsewhere = replace(options, listen="192.0.2.1:7443")
    with pytest.raises(ConfigError, match="Cannot assign requested address") as other:
        _start_another(elsewhere, token_file.parent)
    assert not isinstance(other.value, InUseError)


def _start_another(options: GrpcOptions, folder: Path) -> None:
    from kvstore.config import DaemonConfig
    from tests.conftest import DaemonThread

    DaemonThread(DaemonConfig(folder / "another.sock", dram_bytes=8 << 20, prefault=False, grpc=options))


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (TOKEN, 0o640, "mode 0640.*chmod 600"),
        (TOKEN, 0o602, "mode 0602"),
        ("", 0o600, "has 0 tokens"),
        ("# nothing\n", 0o600, "has 0 tokens"),
        ("short\n", 0o600, "line 1 .* 5 characters"),
        (f"{TOKEN}\n{TOKEN} b\n", 0o600, "line 2 .* second time"),
        (f"{TOKEN} a b\n", 0o600, "line 1 .* 3 words"),
    ],
)
def test_a_token_file_that_can_not_be_used_is_named(tmp_path: Path, text: str, mode: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TokenFile(write_tokens(tmp_path, text, mode))


def test_no_token_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        TokenFile(tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a file"):
        TokenFile(Path("/dev/null"))


def test_tokens_come_and_go_while_the_daemon_runs(token_file: Path) -> None:
    def bearer(token: str) -> list[tuple[str, str | bytes]]:
        return [("authorization", f"Bearer {token}")]

    tokens = TokenFile(token_file)
    fresh = "fresh-token-of-today"
    with pytest.raises(DeniedError):
        tokens.identify(bearer(fresh))
    write_tokens(token_file.parent, f"{fresh} c\n")
    assert tokens.identify(bearer(fresh)).tenant == "c"
    with pytest.raises(DeniedError):
        tokens.identify(bearer(TOKEN))
    # What can't be used leaves things as they are.
    write_tokens(token_file.parent, "x\n")
    assert tokens.identify(bearer(fresh)).tenant == "c"
    token_file.unlink()
    assert tokens.identify(bearer(fresh)).tenant == "c"


@pytest.mark.parametrize(
    ("address", "arguments", "words"),
    [
        ("grpc://example.org:1", {"token": TOKEN}, "in the clear: use grpcs://"),
        ("grpc://localhost:1", {"root_certificates": b"x"}, "uses no certificates"),
        ("grpcs://localhost", {}, "host:port"),
        ("grpcs://localhost:1", {"token": "with space"}, "printable ASCII"),
        ("grpcs://localhost:1", {"client_certificate": b"x"}, "must be two"),
        ("grpcs://localhost:1", {"root_certificates": "/nowhere/ca.pem"}, "can't be read"),
        ("x.sock", {"token": TOKEN}, "gRPC address"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(address: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        Client(address, required=False, **arguments)


def test_tls_files_that_are_none_are_named(certificates: Certificates, token_file: Path, tmp_path: Path) -> None:
    certificate, _ = certificates.server
    wrong = tmp_path / "no.pem"
    wrong.write_text("nothing")
    for key, words in (
        (tmp_path / "none", "No such file"),
        (wrong, "no PEM"),
        (certificates.client[1], "do not belong together"),
        (certificates.server[0], "hold what they should"),
    ):
        options = GrpcOptions("localhost:0", tls_cert=certificate, tls_key=key, token_file=token_file)
        with pytest.raises(ConfigError, match=words):
            _start_another(options, tmp_path)
