"""Who is let in: tokens, tenants, TLS, certificates of clients."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.client import Client
from kvstore.config import GrpcOptions
from kvstore.errors import BadInputError, ConfigError, DeniedError, SocketInUseError, UnavailableError
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
    for required in (True, False):
        with pytest.raises(DeniedError, match="token"):
            connect(place, certificates, token=token, required=required)
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


def test_a_token_of_a_tenant_is_for_that_one(tcp: Callable[..., str], certificates: Certificates) -> None:
    place = tcp()
    with pytest.raises(DeniedError, match="for tenant 'b', not for 'default'"):
        connect(place, certificates, token=BOUND)
    with connect(place, certificates, token=BOUND, tenant="b") as client, pytest.raises(BadInputError, match="tenant"):
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
    with pytest.raises(UnavailableError):
        Client(f"grpc://{place}", token=TOKEN, timeout_s=5.0)


def test_an_unknown_authority_is_refused_by_the_client(tcp: Callable[..., str]) -> None:
    with pytest.raises(UnavailableError):
        Client(f"grpcs://{tcp()}", token=TOKEN, timeout_s=5.0)


def test_with_client_ca_a_certificate_is_needed_too(tcp: Callable[..., str], certificates: Certificates) -> None:
    place = tcp(client_ca=certificates.authority)
    with pytest.raises(UnavailableError):
        connect(place, certificates, token=TOKEN, timeout_s=5.0)
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
    with pytest.raises(ConfigError, match="--grpc-listen"):
        _start_another(options, token_file.parent)


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
        (certificates.client[1], "belong together"),
    ):
        options = GrpcOptions("localhost:0", tls_cert=certificate, tls_key=key, token_file=token_file)
        with pytest.raises(ConfigError, match=words):
            _start_another(options, tmp_path)
