"""Messages whose first field is bulk ``data``: written and read without copying it through protobuf.

A serialized message is its fields one after the other, in the order of their numbers. So ``data``, field 1, is a tag,
a length and the bytes; everything else follows. Room for the bytes is left when a message is made, to be filled by
whoever has them (without Python's lock), and a message that came is looked at in place. Both ends are ordinary
protobuf messages to everybody else; one that has its fields in another order is taken as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np

from kvstore.errors import ProtocolError
from kvstore.wire.framing import decode

DATA_TAG = 0x0A
"""Field 1, length-delimited."""
CHECKSUM_BYTES = 8
OVERHEAD_BYTES = 256
"""More than a chunk's message has beside its data and its checksums."""
CHUNK_MESSAGE_BYTES = (2 << 20) + (64 << 10)
"""2 MiB of data and what goes with it. Longer ones are hardly faster, and make others wait longer for Python's lock,
which gRPC keeps while it copies a message."""
BLOCKS_PER_CHUNK_MAX = 8192
"""So that the checksums of tiny blocks stay small beside a message."""


class Bulk(Protocol):
    """A message with ``data`` as field 1."""

    @property
    def data(self) -> bytes: ...

    def SerializeToString(self) -> bytes: ...  # noqa: N802 - protobuf's name

    def ParseFromString(self, serialized: bytes) -> int: ...  # noqa: N802

    def __init__(self) -> None: ...


BulkT = TypeVar("BulkT", bound=Bulk)


def _new_bytes() -> object:
    function = ctypes.pythonapi.PyBytes_FromStringAndSize
    function.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
    function.restype = ctypes.py_object
    return function


_uninitialized_bytes = _new_bytes()


class Chunk(NamedTuple):
    """A message to be sent, and where its data and its other fields are written before anybody else sees it."""

    message: bytes
    data_address: int
    rest_address: int

    def write_rest(self, rest: bytes) -> None:
        """The other fields, serialized: as many bytes as were left for them."""
        ctypes.memmove(self.rest_address, rest, len(rest))


def frame_data(n_bytes: int, n_rest_bytes: int) -> Chunk:
    """A serialized message, but for its ``n_bytes`` of data, and ``n_rest_bytes`` of other fields."""
    head = bytes((DATA_TAG, *_varint(n_bytes)))
    # What the C API is for: bytes of a known size, filled by whoever made them.
    message: bytes = _uninitialized_bytes(None, len(head) + n_bytes + n_rest_bytes)  # type: ignore[operator]
    address = np.frombuffer(message, np.uint8).ctypes.data
    ctypes.memmove(address, head, len(head))
    return Chunk(message, address + len(head), address + len(head) + n_bytes)


def split_data(kind: type[BulkT], message: bytes) -> tuple[BulkT, memoryview]:
    """The message without its data, and a view of the data. Raises ProtocolError for what is no such message."""
    if not message or message[0] != DATA_TAG:
        parsed = decode(kind, message)  # type: ignore[type-var]
        return parsed, memoryview(parsed.data)
    length, start = _read_varint(message)
    if length > len(message) - start:
        raise ProtocolError(f"a message of {len(message)} bytes announces {length} bytes of data")
    rest = decode(kind, message[start + length :])  # type: ignore[type-var]
    if rest.data:
        raise ProtocolError("a message has its data twice")
    return rest, memoryview(message)[start : start + length]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes) -> tuple[int, int]:
    """The length behind the first tag, and where the data starts."""
    value = 0
    for i, byte in enumerate(message[1:6]):
        value |= (byte & 0x7F) << (7 * i)
        if not byte & 0x80:
            return value, i + 2
    raise ProtocolError("a message announces more data than any message can have")


class Span(NamedTuple):
    """A piece of equally long blocks that are counted as lying one after the other."""

    offset: int
    n_bytes: int
    block_bytes: int

    @property
    def n_ended(self) -> int:
        """How many blocks have their last byte in it."""
        return (self.offset + self.n_bytes) // self.block_bytes - self.offset // self.block_bytes

    @classmethod
    def cut(cls, start: int, end: int, block_bytes: int, message_bytes_max: int) -> Iterator[Self]:
        """The bytes ``start`` to ``end``, both where a block starts, in spans that fit messages.

        Each is some whole blocks, or a part of one.
        """
        room = message_bytes_max - OVERHEAD_BYTES
        whole = min(room // (block_bytes + CHECKSUM_BYTES), BLOCKS_PER_CHUNK_MAX)
        part = -(-block_bytes // -(-block_bytes // (room - CHECKSUM_BYTES)))  # equal parts, no crumbs
        while start < end:
            stop = start + whole * block_bytes if whole else min(start + part, _end_of(start, block_bytes))
            stop = min(stop, end)
            yield cls(start, stop - start, block_bytes)
            start = stop


def _end_of(offset: int, block_bytes: int) -> int:
    """Where the block ends that has the byte at ``offset``."""
    return (offset // block_bytes + 1) * block_bytes
