"""Read and Write: whole, in parts, damaged, cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from kvstore.config import GrpcOptions
from kvstore.errors import BadInputError, EndedError, UnavailableError
from kvstore.types import KVSpec, Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from kvstore.wire.block_chunks import BlockChunks
from kvstore.wire.rpc import SERVICE
from tests.server.grpc.conftest import BLOCK_BYTES, BLOCK_TOKENS, NAMESPACE, Bare, blocks_of, refused, tokens_of


def sums_of(data: bytes, block_bytes: int = BLOCK_BYTES) -> bytes:
    """xxh3_64 of each block, little-endian."""
    pieces = (data[start : start + block_bytes] for start in range(0, len(data), block_bytes))
    return b"".join(xxhash.xxh3_64_intdigest(piece).to_bytes(8, "little") for piece in pieces)


def put(bare: Bare, rows: bytes, blocks: NDArray[np.uint8], namespace: Namespace = NAMESPACE) -> spb.WriteReply:
    """Store blocks by one Write that brings its own reservation; returns the last answer."""
    reserve = pb.ReserveRequest(prompt=bare.prompt(rows, namespace), n_blocks=len(blocks))
    replies = bare.write(
        iter(
            [
                spb.WriteRequest(reserve=reserve),
                spb.WriteRequest(data=blocks.tobytes(), checksums=sums_of(blocks.tobytes(), blocks.shape[1])),
                spb.WriteRequest(commit=pb.CommitRequest()),
            ]
        )
    )
    first, last = list(replies)
    assert first.reserve.n_reserved == len(blocks)
    return last  # type: ignore[no-any-return]


def _first(stream: Any) -> Any:
    return next(stream)


def read_all(stream: Any) -> tuple[bytes, list[spb.ReadReply]]:
    replies = list(stream)
    data = b"".join(reply.data for reply in replies)
    at = 0
    for reply in replies:
        assert reply.offset == at
        at += len(reply.data)
    return data, replies


def test_blocks_come_back_as_they_were_written(bare: Bare, wait_until: Callable[..., None]) -> None:
    tokens, blocks = tokens_of(5), blocks_of(5)
    assert put(bare, tokens, blocks).commit.n_committed == 5
    request = spb.ReadRequest(lease=pb.LeaseRequest(prompt=bare.prompt(tokens)))
    data, replies = read_all(bare.read(request))
    assert data == blocks.tobytes()
    assert b"".join(reply.checksums for reply in replies) == sums_of(data)
    first = replies[0]
    assert (first.block_bytes, first.n_blocks, first.lease.n_blocks, first.lease.n_tokens) == (BLOCK_BYTES, 5, 5, 80)
    wait_until(lambda: bare.stats()["leases"] == bare.stats()["grpc_sessions"] == 0, "nothing is left of it")
    stats = bare.stats()
    assert (stats["grpc_read_bytes"], stats["grpc_written_bytes"]) == (len(data), len(data))


def test_a_miss_is_an_answer(bare: Bare) -> None:
    request = spb.ReadRequest(lease=pb.LeaseRequest(prompt=bare.prompt(tokens_of(3))))
    data, replies = read_all(bare.read(request))
    assert data == b""
    assert [reply.lease.lease_id for reply in replies] == [0]


@pytest.mark.parametrize(("block_bytes", "n_blocks"), [(100_000, 5), (4097, 20), (1, 300), (300_000, 3)])
@pytest.mark.parametrize("chunk_bytes", [0, 16 << 10, 50_000, 200_000])
def test_chunks_of_any_size_give_the_same_bytes(bare: Bare, block_bytes: int, n_blocks: int, chunk_bytes: int) -> None:
    namespace = Namespace("odd", KVSpec.opaque(BLOCK_TOKENS, block_bytes))
    blocks = blocks_of(n_blocks, block_bytes=block_bytes)
    rows = tokens_of(n_blocks)
    assert put(bare, rows, blocks, namespace).commit.n_committed == n_blocks
    lease = pb.LeaseRequest(prompt=bare.prompt(rows, namespace))
    data, replies = read_all(bare.read(spb.ReadRequest(lease=lease, chunk_bytes_max=chunk_bytes)))
    assert data == blocks.tobytes()
    assert b"".join(reply.checksums for reply in replies) == sums_of(data, block_bytes)
    most = chunk_bytes or (2 << 20) + (64 << 10)
    assert all(len(reply.SerializeToString()) <= most for reply in replies)


def test_a_lease_of_a_session_is_read_in_parts(bare: Bare) -> None:
    tokens, blocks = tokens_of(6), blocks_of(6)
    put(bare, tokens, blocks)
    session, stream, _ = bare.session()
    lease = session.call("Lease", pb.LeaseRequest(prompt=bare.prompt(tokens), first_block=1), pb.LeaseReply)
    data, replies = read_all(session.read(spb.ReadRequest(lease_id=lease.lease_id, first=1, n_blocks=2)))
    assert data == blocks[2:4].tobytes()
    assert not replies[0].HasField("lease")
    slots = np.frombuffer(lease.slots.ids, "<i8")
    backwards = slots[::-1].tobytes()
    data, _ = read_all(session.read(spb.ReadRequest(lease_id=lease.lease_id, slots=backwards)))
    assert data == blocks[:0:-1].tobytes()
    wrong = [
        spb.ReadRequest(lease_id=lease.lease_id, first=4, n_blocks=2),
        spb.ReadRequest(lease_id=lease.lease_id, slots=np.int64(slots.max() + 1).tobytes()),
        spb.ReadRequest(lease_id=lease.lease_id, slots=b"abc"),
        spb.ReadRequest(),
        spb.ReadRequest(lease_id=lease.lease_id, lease=pb.LeaseRequest()),
    ]
    for request in wrong:
        status, _ = refused(partial(_first, session.read(request)))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
    status, error = refused(lambda: next(bare.read(spb.ReadRequest(lease_id=lease.lease_id))))
    assert (status, type(error)) == (grpc.StatusCode.NOT_FOUND, EndedError)
    assert bare.stats()["leases"] == 1
    stream.cancel()


def test_nothing_is_seen_of_a_write_before_its_commit(bare: Bare, wait_until: Callable[..., None]) -> None:
    tokens, blocks = tokens_of(3), blocks_of(3)
    prompt = bare.prompt(tokens)
    go_on = threading.Event()

    def messages() -> Iterator[spb.WriteRequest]:
        yield spb.WriteRequest(reserve=pb.ReserveRequest(prompt=prompt, n_blocks=3))
        yield spb.WriteRequest(data=blocks.tobytes(), checksums=sums_of(blocks.tobytes()))
        go_on.wait(20)
        yield spb.WriteRequest(commit=pb.CommitRequest(n_blocks=2))

    replies = bare.write(messages())
    assert next(replies).reserve.n_reserved == 3
    match = pb.MatchRequest(prompt=prompt)
    assert bare.call("Match", match, pb.MatchReply).n_blocks == 0
    go_on.set()
    assert next(replies).commit.n_committed == 2
    assert bare.call("Match", match, pb.MatchReply).n_blocks == 2
    wait_until(lambda: bare.stats()["dram_reserved_bytes"] == 0, "the third slot is free")


@pytest.mark.parametrize("how", ["cancel", "end", "close"])
def test_a_write_that_breaks_off_leaves_nothing(bare: Bare, wait_until: Callable[..., None], how: str) -> None:
    tokens, blocks = tokens_of(3), blocks_of(3)
    prompt = bare.prompt(tokens)
    go_on = threading.Event()

    def messages() -> Iterator[spb.WriteRequest]:
        yield spb.WriteRequest(reserve=pb.ReserveRequest(prompt=prompt, n_blocks=3))
        yield spb.WriteRequest(data=blocks[:2].tobytes(), checksums=sums_of(blocks[:2].tobytes()))
        if how != "end":
            go_on.wait(20)

    replies = bare.write(messages())
    assert next(replies).reserve.n_reserved == 3
    if how == "cancel":
        replies.cancel()
    elif how == "end":
        assert next(replies).filled_bytes == 2 * BLOCK_BYTES
    else:
        other = grpc.insecure_channel("unix:/nowhere")
        other.close()
        replies.cancel()
    go_on.set()
    wait_until(lambda: bare.stats()["dram_reserved_bytes"] == bare.stats()["reservations"] == 0, "its slots are free")
    assert bare.call("Match", pb.MatchRequest(prompt=prompt), pb.MatchReply).n_tokens == 0


def test_damaged_blocks_are_refused_counted_and_not_stored(bare: Bare) -> None:
    tokens, blocks = tokens_of(3), blocks_of(3)
    session, stream, _ = bare.session()
    request = pb.ReserveRequest(prompt=bare.prompt(tokens), n_blocks=3)
    reserved = session.call("Reserve", request, pb.ReserveReply)
    sums = sums_of(blocks.tobytes())
    damaged = blocks.copy()
    damaged[1, 5000] ^= 4

    def write(data: bytes, commit: bool) -> Any:
        message = spb.WriteRequest(reservation_id=reserved.reservation_id, data=data, checksums=sums)
        if commit:
            message.commit.n_blocks = 3
        return next(session.write(iter([message])))

    status, error = refused(lambda: write(damaged.tobytes(), commit=True))
    assert (status, type(error)) == (grpc.StatusCode.UNAVAILABLE, UnavailableError)
    assert bare.call("Match", pb.MatchRequest(prompt=bare.prompt(tokens)), pb.MatchReply).n_tokens == 0
    # The reservation goes on, and what is written again is stored.
    assert write(blocks.tobytes(), commit=True).commit.n_committed == 3
    data, _ = read_all(bare.read(spb.ReadRequest(lease=pb.LeaseRequest(prompt=bare.prompt(tokens)))))
    assert data == blocks.tobytes()
    assert bare.stats()["grpc_damaged_blocks"] == 1
    stream.cancel()


def test_only_what_was_sent_can_be_committed(bare: Bare) -> None:
    """The other slots have bytes of earlier blocks."""
    tokens, blocks = tokens_of(4), blocks_of(4)
    session, stream, _ = bare.session()
    request = pb.ReserveRequest(prompt=bare.prompt(tokens), n_blocks=4)
    reserved = session.call("Reserve", request, pb.ReserveReply).reservation_id
    commit = pb.CommitRequest(reservation_id=reserved)
    status, error = refused(lambda: session.call("Commit", commit, pb.CommitReply))
    assert (status, type(error)) == (grpc.StatusCode.INVALID_ARGUMENT, BadInputError)
    first = blocks[:2].tobytes()
    message = spb.WriteRequest(reservation_id=reserved, data=first, checksums=sums_of(first))
    assert next(session.write(iter([message]))).filled_bytes == len(first)
    status, _ = refused(lambda: session.call("Commit", commit, pb.CommitReply))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    for offset in (0, BLOCK_BYTES, 3 * BLOCK_BYTES):
        wrong = spb.WriteRequest(reservation_id=reserved, data=first, checksums=sums_of(first), offset=offset)
        status, error = refused(partial(_first, session.write(iter([wrong]))))
        assert status is grpc.StatusCode.INVALID_ARGUMENT, offset
        assert "send the bytes that follow" in str(error)
    done = session.call("Commit", pb.CommitRequest(reservation_id=reserved, n_blocks=2), pb.CommitReply)
    assert done.n_committed == 2
    stream.cancel()


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [spb.WriteRequest(data=b"x")],
        [spb.WriteRequest(reservation_id=1, reserve=pb.ReserveRequest())],
    ],
)
def test_a_write_that_begins_wrongly_is_refused(bare: Bare, messages: list[spb.WriteRequest]) -> None:
    status, error = refused(lambda: next(bare.write(iter(messages))))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, BadInputError)


def test_a_cancelled_read_lets_go_of_its_lease(
    start_daemon: Callable[..., Any], options: GrpcOptions, wait_until: Callable[..., None]
) -> None:
    """The client takes one chunk of many: gRPC stops taking them from the daemon, whose thread waits."""
    start_daemon(dram_bytes=128 << 20)
    with grpc.insecure_channel(options.listen, (("grpc.max_send_message_length", -1),)) as channel:
        _cancel_a_read(Bare(channel), wait_until)


def _cancel_a_read(bare: Bare, wait_until: Callable[..., None]) -> None:
    block_bytes, n_blocks = 3_000_000, 30
    namespace = Namespace("big", KVSpec.opaque(BLOCK_TOKENS, block_bytes))
    rows = tokens_of(n_blocks)
    for n in range(3, n_blocks + 1, 3):
        reserve = pb.ReserveRequest(
            prompt=bare.prompt(rows[: n * BLOCK_TOKENS * 4], namespace), first_block=n - 3, n_blocks=3
        )
        data = blocks_of(3, n, block_bytes).tobytes()
        messages = [
            spb.WriteRequest(reserve=reserve),
            spb.WriteRequest(data=data, checksums=sums_of(data, block_bytes)),
            spb.WriteRequest(commit=pb.CommitRequest()),
        ]
        assert list(bare.write(iter(messages)))[1].commit.n_committed == 3
    lease = pb.LeaseRequest(prompt=bare.prompt(rows, namespace))
    stream = bare.read(spb.ReadRequest(lease=lease, chunk_bytes_max=64 << 10))
    next(stream)
    assert bare.stats()["leases"] == 1
    stream.cancel()
    wait_until(lambda: bare.stats()["leases"] == bare.stats()["grpc_sessions"] == 0, "the lease is gone")
    assert bare.stats()["grpc_read_bytes"] < block_bytes * n_blocks


def test_slots_are_freed_only_when_no_chunk_is_written_any_more(
    daemon: Any, bare: Bare, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the daemon is in the middle of a chunk when the session ends."""
    in_copy, go_on = threading.Event(), threading.Event()
    take = BlockChunks.take

    def slow(*arguments: Any) -> None:
        in_copy.set()
        assert go_on.wait(20)
        take(*arguments)

    monkeypatch.setattr(BlockChunks, "take", slow)
    tokens, blocks = tokens_of(3), blocks_of(3)
    session, stream, _ = bare.session()
    request = pb.ReserveRequest(prompt=bare.prompt(tokens), n_blocks=3)
    reserved = session.call("Reserve", request, pb.ReserveReply).reservation_id
    message = spb.WriteRequest(reservation_id=reserved, data=blocks.tobytes(), checksums=sums_of(blocks.tobytes()))
    replies = session.write(iter([message]))
    assert in_copy.wait(20)
    stream.cancel()
    wait_until(lambda: bare.stats()["grpc_sessions"] == 0, "the session has ended")
    stats = bare.stats()
    assert stats["dram_reserved_bytes"] + stats["dram_quarantined_bytes"] == 3 * BLOCK_BYTES
    daemon.call(lambda daemon: daemon.store.check())
    go_on.set()
    wait_until(lambda: bare.stats()["dram_quarantined_bytes"] == 0, "its slots are free")
    with pytest.raises(grpc.RpcError):
        list(replies)


def _drain(call: Any, request: Any, session: Bare) -> list[bytes]:
    return list(call(request, timeout=20, metadata=session.metadata))


def test_no_bytes_do_harm(bare: Bare) -> None:
    """Garbage is answered as such, whatever call it comes to, and the daemon goes on."""
    rng = np.random.default_rng(11)
    allowed = {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,  # it may ask for all tenants
    }
    session, stream, _ = bare.session()
    names = {method.name for method in spb.DESCRIPTOR.services_by_name["KVStore"].methods}
    unary = sorted(names - {"Session", "Read", "Write", "Goodbye"})
    for turn in range(120):
        garbage = rng.bytes(int(rng.integers(0, 60)))
        first = bytes([0x0A]) + garbage
        read = session.channel.unary_stream(f"/{SERVICE}/Read")
        write = session.channel.stream_stream(f"/{SERVICE}/Write")
        plain = session.channel.unary_unary(f"/{SERVICE}/{unary[turn % len(unary)]}")
        calls: list[Callable[[], Any]] = [
            partial(_drain, read, garbage, session),
            partial(_drain, write, iter([garbage]), session),
            partial(_drain, write, iter([first]), session),
            partial(plain, garbage, timeout=20, metadata=session.metadata),
        ]
        for call in calls:
            try:
                call()
            except grpc.RpcError as error:
                assert error.code() in allowed, (garbage, error)  # noqa: PT017 - most calls, not all, are refused
    assert session.call("Heartbeat", pb.HeartbeatRequest(), pb.HeartbeatReply).epoch > 0
    stream.cancel()
