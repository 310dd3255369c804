"""Bulk messages: ordinary protobuf to everybody, and blocks in chunks come out as they went in."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ProtocolError
from kvstore.native import row_addresses
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from kvstore.wire.block_chunks import BlockChunks, DamagedError
from kvstore.wire.chunks import BLOCKS_PER_CHUNK_MAX, Span, frame_data, split_data

LENGTHS = [0, 1, 127, 128, 16383, 16384, 70_000, 2_097_151, 2_097_152]


def framed(data: bytes, rest: bytes) -> bytes:
    chunk = frame_data(len(data), len(rest))
    ctypes.memmove(chunk.data_address, data, len(data))
    chunk.write_rest(rest)
    return chunk.message


@pytest.mark.parametrize("length", LENGTHS)
def test_a_framed_message_is_a_protobuf_message_and_back(length: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    rest = spb.ReadReply(offset=7, checksums=b"12345678", lease=pb.LeaseReply(lease_id=9))
    message = framed(data, rest.SerializeToString())
    parsed = spb.ReadReply.FromString(message)
    assert parsed == spb.ReadReply(data=data, offset=7, checksums=b"12345678", lease=pb.LeaseReply(lease_id=9))
    again, view = split_data(spb.ReadReply, message)
    assert (again, bytes(view)) == (rest, data)
    again, view = split_data(spb.ReadReply, parsed.SerializeToString())
    assert (again.offset, bytes(view)) == (7, data)


def test_fields_in_another_order_are_taken_too() -> None:
    offset = spb.ReadReply(offset=7).SerializeToString()
    rest, view = split_data(spb.ReadReply, offset + spb.ReadReply(data=b"abc").SerializeToString())
    assert (rest.offset, bytes(view)) == (7, b"abc")
    rest, view = split_data(spb.ReadReply, b"")
    assert (rest, bytes(view)) == (spb.ReadReply(), b"")


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a",
        b"\x0a\x05abc",
        b"\x0a\xff\xff\xff\xff\xff\xff\x01",
        b"\x0a\x80",
        b"\x0a\x01a\x0a\x01b",
        b"\x0a\x01a\xff\xff",
        b"\x10",
    ],
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        split_data(spb.ReadReply, message)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(message=st.binary(max_size=40))
def test_no_bytes_do_harm(message: bytes) -> None:
    try:
        _, view = split_data(spb.WriteRequest, b"\x0a" + message)
    except ProtocolError:
        return
    assert len(view) <= len(message)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    block_bytes=st.one_of(st.integers(1, 300), st.integers(10_000, 70_000)),
    n_blocks=st.integers(1, 40),
    first=st.integers(0, 40),
    message_bytes_max=st.integers(1_000, 100_000),
)
def test_spans_cover_everything_once_and_fit(
    block_bytes: int, n_blocks: int, first: int, message_bytes_max: int
) -> None:
    start, end = min(first, n_blocks) * block_bytes, n_blocks * block_bytes
    at, ended = start, []
    for span in Span.cut(start, end, block_bytes, message_bytes_max):
        assert (span.offset, span.n_bytes > 0) == (at, True)
        at += span.n_bytes
        blocks = list(range(span.offset // block_bytes, (span.offset + span.n_bytes) // block_bytes))
        assert len(blocks) == span.n_ended
        ended += blocks
        assert len(blocks) <= BLOCKS_PER_CHUNK_MAX
        rest = spb.ReadReply(
            offset=span.offset, checksums=bytes(8 * len(blocks)), block_bytes=1 << 40, n_blocks=1 << 31
        ).SerializeToString()
        assert len(framed(bytes(span.n_bytes), rest)) <= message_bytes_max
    assert at == end
    assert ended == list(range(min(first, n_blocks), n_blocks))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    block_bytes=st.integers(1, 5000),
    cuts=st.lists(st.integers(0, 60_000), max_size=8),
    damaged=st.one_of(st.none(), st.integers(0, 59_999)),
)
def test_blocks_come_through_chunks_of_any_cut(block_bytes: int, cuts: list[int], damaged: int | None) -> None:
    """Pieces of any size are taken, as another implementation may cut them; a wrong byte is noticed."""
    n_bytes = max(60_000 // block_bytes, 1) * block_bytes
    source = np.random.default_rng(block_bytes).integers(0, 256, n_bytes, dtype=np.uint8).reshape(-1, block_bytes)
    out = np.zeros_like(source)
    order = np.random.default_rng(1).permutation(len(source))  # blocks lie anywhere
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < n_bytes}), n_bytes]
    sending = BlockChunks(row_addresses(source)[order], block_bytes)
    receiving = BlockChunks(row_addresses(out)[order], block_bytes)
    found_damage = False
    for begin, end in pairwise(edges):
        span = Span(begin, end - begin, block_bytes)
        message = sending.chunk_of(span, _filled)
        rest, data = split_data(spb.ReadReply, message)
        arrived = bytearray(data)
        if damaged is not None and begin <= damaged < end:
            arrived[damaged - begin] ^= 1
        try:
            receiving.take(span, memoryview(bytes(arrived)), rest.checksums)
        except DamagedError:
            found_damage = True
            break
    if damaged is not None and damaged < n_bytes:
        assert found_damage
    else:
        np.testing.assert_array_equal(out, source)


def _filled(checksums: bytes) -> bytes:
    return spb.ReadReply(checksums=checksums).SerializeToString()


def test_checksums_are_xxh3_of_each_block() -> None:
    source = np.random.default_rng(0).integers(0, 256, (3, 1000), dtype=np.uint8)
    message = spb.ReadReply.FromString(BlockChunks(row_addresses(source), 1000).chunk_of(Span(0, 3000, 1000), _filled))
    expected = b"".join(xxhash.xxh3_64_intdigest(row.tobytes()).to_bytes(8, "little") for row in source)
    assert (message.data, message.checksums) == (source.tobytes(), expected)


@pytest.mark.parametrize("n_sums", [0, 1, 3])
def test_too_few_or_many_checksums_are_no_message(n_sums: int) -> None:
    out = np.zeros((2, 10), np.uint8)
    with pytest.raises(ProtocolError, match="checksums"):
        BlockChunks(row_addresses(out), 10).take(Span(0, 20, 10), memoryview(bytes(20)), bytes(8 * n_sums))
    assert not out.any()
