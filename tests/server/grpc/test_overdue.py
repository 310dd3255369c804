"""Streams that wait in gRPC for a peer that neither sends nor takes: they end as all calls do, and lock nobody out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.client import Client
from kvstore.config import GrpcOptions
from kvstore.types import KVSpec, Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from tests.server.grpc.conftest import BLOCK_TOKENS, Bare, blocks_of, refused, tokens_of
from tests.server.grpc.test_streams import put

DEADLINE_S = 0.2


@pytest.fixture
def silent() -> Iterator[Callable[..., Iterator[spb.WriteRequest]]]:
    """Messages, after which nothing follows as long as the test lasts."""
    over = threading.Event()

    def messages(*sent: spb.WriteRequest) -> Iterator[spb.WriteRequest]:
        yield from sent
        over.wait(60)

    yield messages
    over.set()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("in_session", [False, True])
def test_a_write_that_sends_nothing_ends(
    start_daemon: Callable[..., Any],
    options: GrpcOptions,
    wait_until: Callable[..., None],
    silent: Callable[..., Iterator[spb.WriteRequest]],
    begun: bool,
    in_session: bool,
) -> None:
    """And gives back its place, its session and its slots; a client without a deadline waits for ever otherwise."""
    start_daemon(grpc=replace(options, deadline_s_max=DEADLINE_S, calls_max=2))
    with grpc.insecure_channel(options.listen) as channel:
        bare = Bare(channel)
        caller, stream = bare.session()[:2] if in_session else (bare, None)
        first = spb.WriteRequest(reserve=pb.ReserveRequest(prompt=bare.prompt(tokens_of(3)), n_blocks=3))
        writes = [caller.write(silent(*[first] * begun), None) for _ in range(2)]
        for write in writes:
            status, _ = refused(lambda write=write: list(write))  # type: ignore[misc]
            assert status is grpc.StatusCode.CANCELLED

        def all_free() -> bool:
            try:
                stats = bare.stats()
            except grpc.RpcError as error:  # their threads are about to give back their places
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017 - not on every turn
                return False
            return stats["reservations"] == 0 and stats["grpc_sessions"] == in_session

        wait_until(all_free, "nothing is left of them")
        assert bare.stats()["grpc_cut_calls"] == 2
        if stream is not None:
            stream.cancel()


def test_a_read_that_takes_nothing_ends(
    start_daemon: Callable[..., Any], options: GrpcOptions, wait_until: Callable[..., None]
) -> None:
    start_daemon(dram_bytes=96 << 20, grpc=replace(options, deadline_s_max=1.0))
    block_bytes, n_blocks = 3_000_000, 20
    namespace = Namespace("big", KVSpec.opaque(BLOCK_TOKENS, block_bytes))
    rows = tokens_of(n_blocks)
    with Client(f"grpc+{options.listen}", timeout_s=10.0) as client:
        tokens = np.frombuffer(rows, np.uint32)
        assert client.open(namespace).put(tokens, blocks_of(n_blocks, 0, block_bytes)).n_stored == n_blocks
    with grpc.insecure_channel(options.listen) as channel:
        bare = Bare(channel)
        stream = bare.read(spb.ReadRequest(lease=pb.LeaseRequest(prompt=bare.prompt(rows, namespace))), None)
        assert next(stream).n_blocks == n_blocks
        wait_until(lambda: bare.stats().get("grpc_cut_calls", 0) == 1, "it is cut off")
        wait_until(lambda: bare.stats()["leases"] == bare.stats()["grpc_sessions"] == 0, "its lease is free")
        assert bare.stats()["grpc_read_bytes"] < n_blocks * block_bytes
        status, _ = refused(lambda: list(stream))
        assert status is grpc.StatusCode.CANCELLED


def test_a_stream_that_ends_in_time_is_not_cut_off(bare: Bare) -> None:
    for n in range(3):
        put(bare, tokens_of(2, n), blocks_of(2, n))
    assert "grpc_cut_calls" not in bare.stats()


def test_idle_streams_keep_no_client_of_this_machine_out(
    start_daemon: Callable[..., Any],
    options: GrpcOptions,
    wait_until: Callable[..., None],
    silent: Callable[..., Iterator[spb.WriteRequest]],
) -> None:
    daemon = start_daemon(max_clients=2, grpc=replace(options, calls_max=8))
    with grpc.insecure_channel(options.listen) as channel:
        writes = [Bare(channel).write(silent(), None) for _ in range(6)]
        wait_until(lambda: daemon.call(lambda daemon: len(daemon.remote)) == 6, "each has its session")
        with Client(daemon.config.socket_path, timeout_s=5.0) as local:
            assert local.healthy
            bare, stream, _ = Bare(channel).session()
            assert bare.stats()["grpc_sessions"] == 7
            stream.cancel()
        for write in writes:
            write.cancel()
