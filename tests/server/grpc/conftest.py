"""A daemon that serves gRPC, and bare calls to it, as another language would make them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstore.config import DaemonConfig, GrpcOptions
from kvstore.types import KVSpec, Namespace
from kvstore.wire import faults
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from kvstore.wire.rpc import ERROR_KEY, SERVICE, SESSION_KEY

BLOCK_BYTES = 8192
BLOCK_TOKENS = 16
TIMEOUT_S = 20.0
NAMESPACE = Namespace("model", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))


def tokens_of(n_blocks: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 50_000, n_blocks * BLOCK_TOKENS, dtype=np.uint32).tobytes()


def blocks_of(n_blocks: int, seed: int = 0, block_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1000).integers(0, 256, (n_blocks, block_bytes), dtype=np.uint8)


class Bare:
    """Calls by name, with the messages of the schema and nothing of the client library."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        self.channel = channel
        self.metadata = metadata

    def call(self, name: str, request: Message, kind: type[Any], timeout_s: float | None = TIMEOUT_S) -> Any:
        stub = self.channel.unary_unary(f"/{SERVICE}/{name}")
        return kind.FromString(stub(request.SerializeToString(), timeout=timeout_s, metadata=self.metadata))

    def read(self, request: spb.ReadRequest, timeout_s: float | None = TIMEOUT_S) -> Any:
        stub = self.channel.unary_stream(f"/{SERVICE}/Read", response_deserializer=spb.ReadReply.FromString)
        return stub(request.SerializeToString(), timeout=timeout_s, metadata=self.metadata)

    def write(self, messages: Iterator[spb.WriteRequest], timeout_s: float | None = TIMEOUT_S) -> Any:
        stub = self.channel.stream_stream(
            f"/{SERVICE}/Write",
            request_serializer=spb.WriteRequest.SerializeToString,
            response_deserializer=spb.WriteReply.FromString,
        )
        return stub(messages, timeout=timeout_s, metadata=self.metadata)

    def session(self, tenant: str = "") -> tuple[Bare, Any, pb.HelloReply]:
        """A session: calls in it, its stream, and its hello."""
        stub = self.channel.unary_stream(f"/{SERVICE}/Session", response_deserializer=spb.SessionMessage.FromString)
        hello = pb.HelloRequest(version_min=1, version_max=1, tenant=tenant, client_name="bare")
        stream = stub(hello.SerializeToString(), metadata=self.metadata)
        reply = next(stream).hello
        return Bare(self.channel, (*self.metadata, (SESSION_KEY, reply.session_token))), stream, reply

    def open(self, namespace: Namespace = NAMESPACE) -> bytes:
        request = pb.OpenNamespaceRequest(description_json=json.dumps(namespace.to_dict()))
        digest: bytes = self.call("OpenNamespace", request, pb.OpenNamespaceReply).digest
        return digest

    def prompt(self, rows: bytes, namespace: Namespace = NAMESPACE) -> pb.Prompt:
        return pb.Prompt(namespace=self.open(namespace), rows=rows)

    def stats(self) -> dict[str, float]:
        return dict(self.call("Stats", pb.StatsRequest(), pb.StatsReply).numbers)


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, Exception | None]:
    """The status that a call is refused with, and the error that came with it."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = caught.value
    sent = [pb.Error.FromString(value) for key, value in error.trailing_metadata() or () if key == ERROR_KEY]
    return error.code(), faults.to_exception(sent[0]) if sent else None


@pytest.fixture
def options(tmp_path: Path) -> GrpcOptions:
    return GrpcOptions(listen=f"unix:{tmp_path / 'grpc.sock'}")


@pytest.fixture
def config(tmp_path: Path, options: GrpcOptions) -> DaemonConfig:
    return DaemonConfig(
        socket_path=tmp_path / "d.sock", dram_bytes=8 << 20, prefault=False, heartbeat_s=5.0, grpc=options
    )


@pytest.fixture
def bare(daemon: Any, options: GrpcOptions) -> Iterator[Bare]:
    with grpc.insecure_channel(options.listen) as channel:
        yield Bare(channel)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of one authority: its own certificate, a server's for localhost, and a client's."""

    authority: Path
    server: tuple[Path, Path]
    client: tuple[Path, Path]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def make_certificates(folder: Path) -> Certificates:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl here to make certificates with")

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    for name in ("server", "client"):
        run("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "extensions").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        run(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", "extensions",
        )  # fmt: skip
    return Certificates(
        folder / "ca.pem",
        (folder / "server.pem", folder / "server.key"),
        (folder / "client.pem", folder / "client.key"),
    )
