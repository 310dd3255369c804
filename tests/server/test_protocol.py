"""The daemon against clients that are wrong, old, hostile or just garbage: an answer or a closed connection."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client import Client
from kvstore.types import KVSpec, Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import (
    FLAG_REPLY,
    HEADER,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Method,
    decode,
)

Dial = Callable[[Any], Any]


@pytest.fixture
def raw(daemon: Any, dial: Dial) -> Any:
    return dial(daemon.config.socket_path)


def test_the_first_message_must_be_hello(raw: Any) -> None:
    raw.send(Method.STATS, pb.StatsRequest())
    assert "HELLO" in raw.error().message
    assert raw.receive() is None


@pytest.mark.parametrize("versions", [(0, 0), (2, 9)])
def test_no_common_version_is_said_with_both_ranges(raw: Any, versions: tuple[int, int]) -> None:
    raw.hello(version_min=versions[0], version_max=versions[1])
    error = raw.error()
    assert error.code == pb.VERSION
    assert f"{versions[0]}..{versions[1]}" in error.message
    assert "1..1" in error.message
    assert raw.receive() is None


def test_a_newer_client_that_still_speaks_ours_is_welcome(raw: Any) -> None:
    raw.hello(version_max=7)
    frame = raw.receive()
    assert frame is not None
    assert decode(pb.HelloReply, frame[3]).version == 1


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<IHHQ", MAX_PAYLOAD_BYTES + 1, Method.STATS, 0, 1),
        struct.pack("<IHHQ", 0, 999, 0, 1),
        struct.pack("<IHHQ", 0, 0, 0, 1),
        struct.pack("<IHHQ", 0, Method.STATS, 0x80, 1),
    ],
)
def test_a_malformed_header_closes_the_connection(raw: Any, header: bytes, client: Client) -> None:
    raw.hello()
    assert raw.receive() is not None
    raw.sock.sendall(header)
    assert raw.receive() is None
    assert client.stats()["sessions"] == 1


def test_a_payload_that_is_no_message_is_answered_and_the_connection_goes_on(raw: Any) -> None:
    raw.hello()
    raw.receive()
    raw.sock.sendall(struct.pack("<IHHQ", 3, Method.LEASE, 0, 5) + b"\xff\xff\xff")
    assert "parsed" in raw.error().message
    raw.send(Method.STATS, pb.StatsRequest(), 6)
    frame = raw.receive()
    assert frame is not None
    assert frame[1:3] == (FLAG_REPLY, 6)


@pytest.mark.parametrize(
    ("method", "message", "code", "words"),
    [
        (Method.OPEN_NAMESPACE, pb.OpenNamespaceRequest(description_json="{"), pb.BAD_INPUT, "JSON"),
        (Method.OPEN_NAMESPACE, pb.OpenNamespaceRequest(description_json="[]"), pb.BAD_INPUT, "object"),
        (
            Method.OPEN_NAMESPACE,
            pb.OpenNamespaceRequest(description_json='{"modle": 1}'),
            pb.BAD_INPUT,
            "modle",
        ),
        (Method.LEASE, pb.LeaseRequest(prompt=pb.Prompt(namespace=b"x" * 16)), pb.ENDED, "7878"),
        (Method.COMMIT, pb.CommitRequest(reservation_id=5), pb.ENDED, "5"),
        (Method.RENEW, pb.RenewRequest(lease_id=5), pb.ENDED, "5"),
        (Method.ATTACH_LEASE, pb.AttachLeaseRequest(lease_id=5), pb.ENDED, "5"),
        (Method.MAP_REGIONS, pb.MapRegionsRequest(region_ids=[1]), pb.ENDED, "region 1"),
        (Method.MAP_REGIONS, pb.MapRegionsRequest(), pb.BAD_INPUT, "0 regions"),
        (Method.REGIONS_MAPPED, pb.RegionsMappedRequest(region_ids=[1]), pb.BAD_INPUT, "region 1"),
        (Method.EVENT, pb.Event(), pb.BAD_INPUT, "EVENT"),
        (Method.HELLO, pb.HelloRequest(), pb.BAD_INPUT, "HELLO"),
    ],
)
def test_requests_that_cant_be_done_are_answered(raw: Any, method: int, message: Any, code: int, words: str) -> None:
    raw.hello()
    raw.receive()
    raw.send(method, message)
    error = raw.error()
    assert error.code == code
    assert words in error.message


def test_hashes_and_tokens_of_odd_lengths_are_refused(daemon: Any, client: Client, dial: Dial) -> None:
    ns = client.open(Namespace("m", KVSpec.opaque(16, 4096)))
    raw = dial(daemon.config.socket_path)
    raw.hello()
    raw.receive()
    raw.send(Method.MATCH, pb.MatchRequest(prompt=pb.Prompt(namespace=ns.ensure_open(), rows=b"12345")))
    assert "5 bytes" in raw.error().message
    raw.sock.close()


def test_a_region_of_another_tenant_or_writer_is_not_handed_out(daemon: Any, client: Client, dial: Dial) -> None:
    ns = client.open(Namespace("m", KVSpec.opaque(16, 4096)))
    ns.put(np.arange(16), np.ones((1, 4096), np.uint8))
    region_id = next(iter(daemon.call(lambda d: list(d.store.dram.regions))))
    for tenant, writable, code in (("b", False, pb.ENDED), ("default", True, pb.BAD_INPUT)):
        raw = dial(daemon.config.socket_path)
        raw.hello(tenant=tenant)
        raw.receive()
        raw.send(Method.MAP_REGIONS, pb.MapRegionsRequest(region_ids=[region_id], writable=writable))
        assert raw.error().code == code
        raw.send(Method.REGIONS_MAPPED, pb.RegionsMappedRequest(region_ids=[region_id]))
        assert raw.error().code == pb.BAD_INPUT
        raw.sock.close()


def test_a_session_can_only_be_joined_with_its_token(daemon: Any, client: Client, dial: Dial) -> None:
    raw = dial(daemon.config.socket_path)
    raw.hello(channel=pb.CHANNEL_EVENTS, session_token=b"x" * 16)
    assert raw.error().code == pb.SESSION_ENDED
    raw.sock.close()


def test_clients_that_never_say_hello_are_dropped(start_daemon: Any, wait_until: Any, dial: Dial) -> None:
    daemon = start_daemon(hello_s=0.05)
    raw = dial(daemon.config.socket_path)
    assert raw.receive() is None
    raw.sock.close()


def test_too_many_clients_are_told_so(start_daemon: Any, dial: Dial) -> None:
    daemon = start_daemon(max_clients=1)
    with Client(daemon.config.socket_path, timeout_s=5.0):
        raw = dial(daemon.config.socket_path)
        raw.hello()
        assert "--max-clients" in raw.error().message
        raw.sock.close()


def test_clients_that_break_off_and_hold_nothing_take_no_place(start_daemon: Any, dial: Dial, wait_until: Any) -> None:
    daemon = start_daemon(max_clients=4)
    for _ in range(20):
        raw = dial(daemon.config.socket_path)
        assert raw.greeted().session_id
        raw.sock.close()
        wait_until(lambda: daemon.call(lambda d: len(d.sessions)) == 0, "the session of a closed connection is gone")


def test_a_queued_descriptor_is_the_one_that_was_asked_for(daemon: Any, client: Client, dial: Dial) -> None:
    """A client that does not read its replies must not get whatever the number stands for later."""
    ns = client.open(Namespace("m", KVSpec.opaque(16, 4096)))
    ns.put(np.arange(16), np.ones((1, 4096), np.uint8))
    region = daemon.call(lambda d: next(iter(d.store.dram.regions.values())))
    raw = dial(daemon.config.socket_path)
    raw.hello()
    raw.receive()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(3000):  # more replies than the socket holds
        raw.send(Method.MAP_REGIONS, pb.MapRegionsRequest(region_ids=[region.id]), number)
    inode = os.fstat(region.fd).st_ino
    seen = 0
    data = b""
    while seen < 3000:
        part, fds, _, _ = socket.recv_fds(raw.sock, 1 << 16, 64)
        assert {os.fstat(fd).st_ino for fd in fds} <= {inode}
        for fd in fds:
            os.close(fd)
        data += part
        while len(data) >= HEADER_BYTES and len(data) >= HEADER_BYTES + HEADER.unpack_from(data)[0]:
            data = data[HEADER_BYTES + HEADER.unpack_from(data)[0] :]
            seen += 1
    raw.sock.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


frames = st.lists(
    st.one_of(
        st.binary(max_size=64),
        st.tuples(st.integers(0, 40), st.integers(0, 8), st.binary(max_size=80)).map(
            lambda t: struct.pack("<IHHQ", len(t[2]), t[0], t[1], 1) + t[2]
        ),
    ),
    max_size=6,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=frames, greet=st.booleans())
def test_garbage_never_hurts_the_daemon(daemon: Any, data: list[bytes], greet: bool, dial: Dial) -> None:
    raw = dial(daemon.config.socket_path)
    if greet:
        raw.hello()
        raw.receive()
    try:
        for part in data:
            raw.sock.sendall(part)
        raw.sock.shutdown(socket.SHUT_WR)
    except (BrokenPipeError, ConnectionResetError):
        pass
    while raw.receive() is not None:
        pass
    raw.sock.close()
    assert daemon.call(lambda d: len(d.store.leases) + len(d.store.reservations)) == 0
