"""Calls as any language makes them: without a session, in one, within limits; health and reflection."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvstore.clock import ManualClock
from kvstore.config import GrpcOptions
from kvstore.errors import BadInputError, ConfigError, EndedError, SessionEndedError, SpecMismatchError, VersionError
from kvstore.server.remote import HOLDING, LOCAL
from kvstore.types import KVSpec, Namespace
from kvstore.wire import faults
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from kvstore.wire.framing import REPLIES, REQUESTS, Method
from kvstore.wire.rpc import ERROR_KEY, SERVICE, rpc_name, status_of
from tests.server.grpc.conftest import NAMESPACE, Bare, blocks_of, refused, tokens_of
from tests.server.grpc.test_streams import put


def test_the_schema_has_every_method_and_no_other() -> None:
    described = {
        method.name: (method.input_type.name, method.output_type.name)
        for method in spb.DESCRIPTOR.services_by_name["KVStore"].methods
    }
    for name in ("Session", "Read", "Write"):
        described.pop(name)
    expected = {
        rpc_name(method.name): (REQUESTS[method].DESCRIPTOR.name, REPLIES[method].DESCRIPTOR.name)
        for method in Method
        if method not in LOCAL
    }
    assert described == expected


def test_what_grants_nothing_needs_no_session(bare: Bare) -> None:
    tokens = tokens_of(4)
    put(bare, tokens, blocks_of(4))
    assert bare.call("Match", pb.MatchRequest(prompt=bare.prompt(tokens)), pb.MatchReply).n_blocks == 4
    assert bare.call("Prefetch", pb.PrefetchRequest(prompt=bare.prompt(tokens)), pb.PrefetchReply).n_ready == 4
    assert "no NVMe" in bare.call("Persist", pb.PersistRequest(prompt=bare.prompt(tokens)), pb.PersistReply).reason
    assert bare.stats()["blocks"] == 4


@pytest.mark.parametrize("method", sorted(HOLDING))
def test_what_is_held_belongs_to_a_session(bare: Bare, method: int) -> None:
    name = rpc_name(Method(method).name)
    status, error = refused(lambda: bare.call(name, REQUESTS[method](), REPLIES[method]))
    assert status is grpc.StatusCode.ABORTED
    assert isinstance(error, SessionEndedError)


def test_a_session_holds_leases_reservations_and_pins_until_its_stream_ends(
    bare: Bare, wait_until: Callable[..., None]
) -> None:
    put(bare, tokens_of(4), blocks_of(4))
    session, stream, hello = bare.session()
    assert hello.session_id > 0
    lease = session.call("Lease", pb.LeaseRequest(prompt=bare.prompt(tokens_of(4))), pb.LeaseReply)
    pin = session.call("Pin", pb.PinRequest(prompt=bare.prompt(tokens_of(4))), pb.PinReply)
    reserve = pb.ReserveRequest(prompt=bare.prompt(tokens_of(3, seed=1)), n_blocks=3)
    reserved = session.call("Reserve", reserve, pb.ReserveReply)
    assert lease.lease_id
    assert (pin.n_blocks, reserved.n_reserved) == (4, 3)
    stats = bare.stats()
    assert (stats["leases"], stats["pins"], stats["reservations"], stats["grpc_sessions"]) == (1, 1, 1, 1)
    assert stats["dram_reserved_bytes"] == 3 * 8192
    stream.cancel()
    wait_until(lambda: bare.stats()["grpc_sessions"] == 0, "the session ends with its stream")
    stats = bare.stats()
    assert (stats["leases"], stats["pins"], stats["reservations"]) == (0, 0, 0)
    # Free at once: nobody but the daemon could write there.
    assert (stats["dram_reserved_bytes"], stats["dram_quarantined_bytes"]) == (0, 0)
    status, error = refused(lambda: session.call("Heartbeat", pb.HeartbeatRequest(), pb.HeartbeatReply))
    assert status is grpc.StatusCode.ABORTED
    assert isinstance(error, SessionEndedError)


def test_goodbye_ends_the_stream(bare: Bare) -> None:
    session, stream, _ = bare.session()
    assert session.call("Heartbeat", pb.HeartbeatRequest(), pb.HeartbeatReply).epoch > 0
    session.call("Goodbye", pb.GoodbyeRequest(), pb.GoodbyeReply)
    assert list(stream) == []
    assert bare.stats()["grpc_sessions"] == 0


def test_a_session_without_heartbeats_ends(
    start_daemon: Callable[..., Any], options: GrpcOptions, wait_until: Callable[..., None]
) -> None:
    clock = ManualClock(100.0)
    start_daemon(clock, heartbeat_s=10.0)
    with grpc.insecure_channel(options.listen) as channel:
        bare = Bare(channel)
        put(bare, tokens_of(2), blocks_of(2))
        session, stream, _ = bare.session()
        session.call("Lease", pb.LeaseRequest(prompt=bare.prompt(tokens_of(2)), ttl_s=500), pb.LeaseReply)
        clock.advance(29.0)
        session.call("Heartbeat", pb.HeartbeatRequest(), pb.HeartbeatReply)
        clock.advance(29.0)
        assert bare.stats()["leases"] == 1
        clock.advance(2.0)
        wait_until(lambda: bare.stats()["leases"] == 0, "its lease goes with it")
        assert list(stream) == []


def test_the_end_of_a_lease_is_an_event_and_needs_no_answer(
    start_daemon: Callable[..., Any], options: GrpcOptions, wait_until: Callable[..., None]
) -> None:
    clock = ManualClock(100.0)
    start_daemon(clock, heartbeat_s=3600.0)
    with grpc.insecure_channel(options.listen) as channel:
        bare = Bare(channel)
        put(bare, tokens_of(2), blocks_of(2))
        session, stream, _ = bare.session()
        request = pb.LeaseRequest(prompt=bare.prompt(tokens_of(2)), ttl_s=5)
        lease = session.call("Lease", request, pb.LeaseReply)
        clock.advance(6.0)
        assert list(next(stream).event.ended_leases) == [lease.lease_id]
        wait_until(lambda: bare.stats()["leases_ended_unacknowledged"] == 0, "nothing is left of it")
        status, error = refused(lambda: next(session.read(spb.ReadRequest(lease_id=lease.lease_id))))
        assert status is grpc.StatusCode.NOT_FOUND
        assert isinstance(error, EndedError)
        stream.cancel()


# Errors and limits -------------------------------------------------------------------------------------


def test_errors_keep_their_kind(bare: Bare) -> None:
    other = Namespace("model", KVSpec.opaque(32, 8192))

    def name(namespace: Namespace) -> Any:
        request = pb.OpenNamespaceRequest(description_json=json.dumps(namespace.to_dict()), name="prod")
        return bare.call("OpenNamespace", request, pb.OpenNamespaceReply)

    name(NAMESPACE)
    status, error = refused(lambda: name(other))
    assert (status, type(error)) == (grpc.StatusCode.FAILED_PRECONDITION, SpecMismatchError)
    status, error = refused(lambda: bare.call("Match", pb.MatchRequest(prompt=pb.Prompt(rows=b"abc")), pb.MatchReply))
    assert (status, type(error)) == (grpc.StatusCode.NOT_FOUND, EndedError)
    bad = pb.MatchRequest(prompt=pb.Prompt(namespace=bare.open(), rows=b"abc"))
    status, error = refused(lambda: bare.call("Match", bad, pb.MatchReply))
    assert (status, type(error)) == (grpc.StatusCode.INVALID_ARGUMENT, BadInputError)
    stub = bare.channel.unary_unary(f"/{SERVICE}/Match")
    status, _ = refused(lambda: stub(b"\xff\xff\xff", timeout=10))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    hello = bare.channel.unary_stream(f"/{SERVICE}/Session")
    request = pb.HelloRequest(version_min=99, version_max=99)
    status, error = refused(lambda: next(hello(request.SerializeToString(), timeout=10)))
    assert (status, type(error)) == (grpc.StatusCode.FAILED_PRECONDITION, VersionError)


def test_a_fault_of_the_daemon_keeps_its_text() -> None:
    status, message = status_of(RuntimeError("secret"))
    assert status is grpc.StatusCode.INTERNAL
    assert "secret" not in message.message
    assert type(faults.to_exception(message)).__name__ == "KVStoreError"
    assert ERROR_KEY.endswith("-bin")


def test_a_message_that_is_too_long_is_refused(start_daemon: Callable[..., Any], options: GrpcOptions) -> None:
    start_daemon(grpc=replace(options, message_bytes_max=64 << 10))
    with grpc.insecure_channel(options.listen) as channel:
        bare = Bare(channel)
        request = pb.MatchRequest(prompt=pb.Prompt(namespace=bare.open(), rows=bytes(80 << 10)))
        status, _ = refused(lambda: bare.call("Match", request, pb.MatchReply))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "matches" not in bare.stats()


def test_calls_beyond_the_most_are_refused_and_counted(
    start_daemon: Callable[..., Any], options: GrpcOptions, nvme: dict[str, Any], wait_until: Callable[..., None]
) -> None:
    start_daemon(grpc=replace(options, calls_max=2), **nvme)
    with grpc.insecure_channel(options.listen) as channel:
        bare = Bare(channel)
        session, stream, _ = bare.session()
        held = [watch(session), watch(session)]  # they wait for events that do not come
        other = Bare(channel)

        def one_too_many() -> bool:
            try:
                other.stats()
            except grpc.RpcError as error:
                return bool(error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
            return False

        def both_run() -> bool:
            # One that came while the third had a place was refused itself.
            held[:] = [watch(session) if call.done() else call for call in held]
            return one_too_many()

        wait_until(both_run, "two calls run")
        for call in held:
            call.cancel()
        wait_until(lambda: not one_too_many(), "there is room again")
        assert other.stats()["grpc_refused_calls"] >= 1
        stream.cancel()


def watch(bare: Bare, timeout_s: float | None = None) -> Any:
    """A call that is not answered for an hour."""
    request = pb.WatchRequest(from_now=True, wait_s=3600)
    stub = bare.channel.unary_unary(f"/{SERVICE}/Watch")
    return stub.future(request.SerializeToString(), timeout=timeout_s, metadata=bare.metadata)


@pytest.mark.parametrize("asked_s", [None, 3600.0])
def test_no_call_lasts_longer_than_the_daemon_allows(
    start_daemon: Callable[..., Any], options: GrpcOptions, asked_s: float | None
) -> None:
    start_daemon(grpc=replace(options, deadline_s_max=0.2))
    with grpc.insecure_channel(options.listen) as channel:
        call = watch(Bare(channel), asked_s)
        assert call.exception(timeout=20).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_lease_that_nobody_waits_for_is_given_back(bare: Bare, wait_until: Callable[..., None], daemon: Any) -> None:
    """The daemon's loop is held up until the client has given up: what it grants then must not stay."""
    put(bare, tokens_of(2), blocks_of(2))
    session, stream, _ = bare.session()
    prompt = bare.prompt(tokens_of(2))
    go_on = threading.Event()
    daemon._loop.call_soon_threadsafe(go_on.wait, 20)
    with pytest.raises(grpc.RpcError) as caught:
        session.call("Lease", pb.LeaseRequest(prompt=prompt), pb.LeaseReply, timeout_s=0.1)
    go_on.set()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: bare.stats()["leases"] == 0, "the lease is given back")
    stream.cancel()


# Health and reflection ---------------------------------------------------------------------------------


def test_health_is_told(bare: Bare) -> None:
    check = bare.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    for service in ("", SERVICE):
        assert check(health_pb2.HealthCheckRequest(service=service), timeout=10).status == 1
    status, _ = refused(lambda: check(health_pb2.HealthCheckRequest(service="other"), timeout=10))
    assert status is grpc.StatusCode.NOT_FOUND


def test_reflection_describes_the_service(bare: Bare) -> None:
    info = bare.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    services, files = info(iter(requests), timeout=10)
    assert SERVICE in [each.name for each in services.list_services_response.service]
    described = b"".join(files.file_descriptor_response.file_descriptor_proto)
    assert b"OpenNamespace" in described
    assert b"LeaseRequest" in described


def test_without_grpcio_the_daemon_says_what_to_install(
    start_daemon: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvstore.server.grpc.server", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[grpc\]' in a checkout"):
        start_daemon()


def test_a_daemon_that_stops_ends_sessions_and_calls(start_daemon: Callable[..., Any], options: GrpcOptions) -> None:
    daemon = start_daemon()
    with grpc.insecure_channel(options.listen) as channel:
        bare = Bare(channel)
        _, stream, _ = bare.session()
        waiting = watch(bare)
        daemon.stop()
        assert waiting.exception(timeout=20).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        with contextlib.suppress(grpc.RpcError):
            assert list(stream) == []
