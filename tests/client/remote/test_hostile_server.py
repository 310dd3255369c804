"""What a server sends that is not what was asked for: an error by name, and never a byte outside the caller's array."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore.client.remote.slots import _Reading
from kvstore.client.transport import RefusedError
from kvstore.errors import ProtocolError
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb

BLOCK_BYTES = 100
BLOCKS = np.random.default_rng(4).integers(0, 256, (3, BLOCK_BYTES), dtype=np.uint8)
SUMS = [xxhash.xxh3_64_intdigest(block.tobytes()).to_bytes(8, "little") for block in BLOCKS]


class Stream:
    """The answers of a server."""

    def __init__(self, replies: list[spb.ReadReply]) -> None:
        self._replies = replies
        self.cancelled = False

    def __iter__(self) -> Iterator[bytes]:
        return (reply.SerializeToString() for reply in self._replies)

    def cancel(self) -> None:
        self.cancelled = True


def read(replies: list[spb.ReadReply], n_blocks: int | None = 3, n_rows: int = 3) -> Any:
    """Read three blocks from a server that answers so; what lies around them must stay as it is."""
    memory = np.full((n_rows + 2, BLOCK_BYTES), 7, np.uint8)
    stream = Stream(replies)
    channel = SimpleNamespace(read=lambda _request, _timeout_s: stream, address="there")
    reading = _Reading(memory[1:-1], n_blocks)
    try:
        reading.run(SimpleNamespace(channel=channel), spb.ReadRequest(), 1.0)  # type: ignore[arg-type]
    finally:
        assert stream.cancelled
        assert (memory[[0, -1]] == 7).all()
    return reading, memory[1:-1]


def piece(start: int, end: int, **fields: Any) -> spb.ReadReply:
    sums = b"".join(SUMS[start // BLOCK_BYTES : end // BLOCK_BYTES])
    first = {"block_bytes": BLOCK_BYTES, "n_blocks": 3} if start == 0 else {}
    whole = {"data": BLOCKS.tobytes()[start:end], "offset": start, "checksums": sums, **first, **fields}
    return spb.ReadReply(**whole)


def test_what_was_asked_for_is_taken_in_any_pieces() -> None:
    for cuts in ([0, 300], [0, 100, 300], [0, 1, 99, 150, 299, 300]):
        _, rows = read([piece(*each) for each in pairwise(cuts)])
        np.testing.assert_array_equal(rows, BLOCKS)


def test_as_many_as_come_with_the_lease_are_taken() -> None:
    lease = pb.LeaseReply(lease_id=5, n_blocks=3)
    reading, rows = read([piece(0, 300, lease=lease)], n_blocks=None, n_rows=5)
    assert reading.lease.n_blocks == 3
    np.testing.assert_array_equal(rows[:3], BLOCKS)
    reading, _ = read([spb.ReadReply(lease=pb.LeaseReply())], n_blocks=None)
    assert reading.lease.lease_id == 0


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        ([], "0 of 300 bytes came"),
        ([piece(0, 200)], "200 of 300 bytes came"),
        ([piece(0, 100), piece(200, 300)], "at offset 200; 100 of 300"),
        ([piece(0, 100), piece(0, 100)], "at offset 0; 100 of 300"),
        ([piece(0, 300), piece(300, 300, data=b"x")], "1 bytes came at offset 300"),
        ([piece(0, 300, n_blocks=2)], "2 blocks of 100 bytes were to come"),
        ([piece(0, 300, block_bytes=150, n_blocks=3)], "3 blocks of 150 bytes"),
        ([piece(0, 300, checksums=b"")], "checksums has 0 items"),
        ([piece(0, 300, checksums=b"123")], "checksums has 3 bytes"),
        ([piece(0, 100), spb.ReadReply(offset=100)], "0 bytes came"),
    ],
)
def test_anything_else_is_named(replies: list[spb.ReadReply], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read(replies)


def test_more_blocks_than_there_is_room_for_are_not_taken() -> None:
    with pytest.raises(ProtocolError, match="room for 2"):
        read([piece(0, 300, lease=pb.LeaseReply(lease_id=5))], n_blocks=None, n_rows=2)


@pytest.mark.parametrize("at", [0, 99, 100, 299])
def test_a_wrong_byte_is_noticed(at: int) -> None:
    data = bytearray(BLOCKS.tobytes())
    data[at] ^= 32
    for cuts in ([0, 300], [0, 150, 300]):
        replies = [piece(a, b, data=bytes(data[a:b])) for a, b in pairwise(cuts)]
        with pytest.raises(RefusedError, match="did not arrive"):
            read(replies)
