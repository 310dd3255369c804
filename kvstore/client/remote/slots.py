"""Blocks of a remote daemon: copied into this process when they are looked at, and sent when they are committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from kvstore import native
from kvstore.client.borrowing import AbandonedError, Borrowing, current
from kvstore.client.remote.channel import ChannelCalls, error_of
from kvstore.client.slots import Bytes, View
from kvstore.client.transport import RefusedError
from kvstore.errors import EndedError, ProtocolError, UnavailableError
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from kvstore.wire.block_chunks import BlockChunks, DamagedError
from kvstore.wire.chunks import CHUNK_MESSAGE_BYTES, Span, split_data
from kvstore.wire.framing import decode
from kvstore.wire.packing import I64, pack, unpack

CALL_BYTES_MAX = 256 << 20
"""Bytes moved by one call: so that it ends well within any deadline that a server may set."""
LOOKAHEAD_BYTES = 8 << 20
"""Fetched when one block is looked at: it and those that follow it."""
BYTES_PER_S_MIN = 8 << 20
"""What moves more slowly counts as not moving: this, and ``timeout_s``, give a call its deadline."""

T = TypeVar("T")


class BulkSession(Protocol):
    """What remote slots need of a session."""

    @property
    def timeout_s(self) -> float: ...

    def bulk(self, move: Callable[[Any], T]) -> T:
        """Move bytes of blocks: ``move(calls)``."""
        ...


class RemoteSlots:
    """See ``Slots``. The memory is this process's own; bytes that came were compared with the daemon's checksums."""

    def __init__(
        self, session: BulkSession, claim_id: int, message: pb.Slots | None, block_bytes: int, *, writable: bool
    ) -> None:
        self.block_bytes = block_bytes
        self._session = session
        self._claim_id = claim_id
        self._writable = writable
        self._ids = unpack("slots", message.ids if message is not None else b"", I64)
        self._lock = threading.Lock()
        self._blocks: Bytes | None = None
        self._there = np.zeros(len(self._ids), np.bool_)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """See ``Slots``. Fetches what is not there yet. Raises EndedError if that can't be had any more."""
        return native.row_addresses(self._fetched(0, len(self)))

    def view(self, i: int, hold: object) -> Bytes:  # noqa: ARG002 - a copy needs no hold
        """See ``Slots``. Fetches the block, and some that follow, if it is not there yet. Raises as ``addresses``."""
        ahead = max(LOOKAHEAD_BYTES // max(self.block_bytes, 1), 1)
        blocks = self._fetched(i, min(i + ahead, len(self)) if not self._there[i] else i + 1)
        address = blocks.ctypes.data + i * self.block_bytes
        return np.asarray(View(address, self.block_bytes, self._writable, blocks))

    def unchanged(self) -> bool:
        """See ``Slots``: a copy does not change."""
        return True

    def copy_out(self, rows: Bytes, threads: int, offset_bytes: int = 0) -> bool:
        """See ``Slots``. Straight into ``rows`` what was not fetched before; False if not all of it came."""
        n, n_bytes = rows.shape
        with self._lock:
            fetched = self._blocks if self._there[:n].all() else None
        try:
            if fetched is None and n_bytes == self.block_bytes:
                self._read(0, rows)
                return True
            if fetched is None:
                fetched = self._fetched(0, n)
            addresses = native.row_addresses(fetched[:n]) + np.uint64(offset_bytes)
            with current().touching():
                native.copy_batch(native.row_addresses(rows), addresses, n_bytes, threads=threads)
        except (EndedError, UnavailableError, ProtocolError):
            return False
        return True

    def fill(self, rows: Bytes, threads: int, *, kept: bool) -> None:
        """See ``Slots``."""
        if kept and self._blocks is None:
            self._blocks = rows
            return
        blocks = self._fetched(0, len(self))  # kept here until the copy has ended
        with current().touching():
            native.copy_batch(
                native.row_addresses(blocks), native.row_addresses(rows), self.block_bytes, threads=threads
            )

    def commit(self, request: pb.CommitRequest) -> Callable[[], pb.CommitReply]:
        """See ``Slots``: sends what was filled, and has it made visible once all of it is there."""
        blocks = self._own()[: request.n_blocks]
        return lambda: self._send(blocks, request)

    def forget(self) -> None:
        """See ``Slots``."""
        with self._lock:
            self._blocks = None
            self._there[:] = False

    # Reading -----------------------------------------------------------------------------------------

    def _own(self) -> Bytes:
        """The memory for all blocks. Pages that nothing is written to cost nothing."""
        if self._blocks is None:
            self._blocks = np.zeros((len(self), self.block_bytes), np.uint8)
        return self._blocks

    def _fetched(self, start: int, end: int) -> Bytes:
        with self._lock:
            blocks = self._own()
            if self._writable:
                return blocks
            missing = np.flatnonzero(~self._there[start:end]) + start
            if len(missing):
                first, last = int(missing[0]), int(missing[-1]) + 1
                try:
                    self._read(first, blocks[first:last])
                except (UnavailableError, ProtocolError) as error:
                    raise EndedError(f"blocks of lease {self._claim_id} can't be had any more: {error}") from error
                self._there[first:last] = True
            return blocks

    def _read(self, first: int, rows: Bytes) -> None:
        """Blocks from ``first`` on into ``rows``. Raises EndedError, UnavailableError or ProtocolError."""
        each = max(CALL_BYTES_MAX // self.block_bytes, 1)
        for start in range(0, len(rows), each):
            part = rows[start : start + each]
            ids = self._ids[first + start : first + start + len(part)]
            self._session.bulk(partial(self._read_call, ids=ids, rows=part))

    def _read_call(self, calls: ChannelCalls, ids: NDArray[np.int64], rows: Bytes) -> None:
        request = spb.ReadRequest(lease_id=self._claim_id, slots=pack(ids, I64))
        reading = _Reading(rows, len(rows))
        reading.run(calls, request, _time_for(self._session, rows.nbytes))

    # Writing -----------------------------------------------------------------------------------------

    def _send(self, blocks: Bytes, request: pb.CommitRequest) -> pb.CommitReply:
        each = max(CALL_BYTES_MAX // self.block_bytes, 1)
        reply = spb.WriteReply()
        for start in range(0, len(blocks), each):
            end = min(start + each, len(blocks))
            commit = request if end == len(blocks) else None
            reply = self._session.bulk(partial(self._write_call, blocks=blocks, start=start, end=end, commit=commit))
        return reply.commit

    def _write_call(
        self, calls: ChannelCalls, blocks: Bytes, start: int, end: int, commit: pb.CommitRequest | None
    ) -> spb.WriteReply:
        borrowing = current()  # the messages are made on a thread of gRPC's, from the caller's memory perhaps
        messages = _messages(borrowing, self._claim_id, blocks, start, end, calls.channel.message_bytes_max, commit)
        stream = calls.channel.write(messages, _time_for(self._session, (end - start) * self.block_bytes))
        try:
            reply = decode(spb.WriteReply, next(stream))
        except StopIteration:
            raise ProtocolError("a Write was not answered") from None
        except grpc.RpcError as error:
            raise error_of(error, calls.channel.address) from error
        finally:
            stream.cancel()
        borrowing.must_be_wanted()  # not all may have been sent
        if commit is None and reply.filled_bytes != end * self.block_bytes:
            raise RefusedError(f"{reply.filled_bytes} of {end * self.block_bytes} bytes are there: write again")
        return reply


def read_at_once(session: BulkSession, request: pb.LeaseRequest, rows: Bytes) -> pb.LeaseReply:
    """See ``Session.read_at_once``."""
    reading = _Reading(rows, None)
    timeout_s = _time_for(session, rows.nbytes) + request.wait_s
    session.bulk(lambda calls: reading.run(calls, spb.ReadRequest(lease=request), timeout_s))
    return reading.lease


def _time_for(session: BulkSession, n_bytes: int) -> float:
    return session.timeout_s + n_bytes / BYTES_PER_S_MIN


class _Reading:
    """One Read into ``rows``, of ``n_blocks``, or of as many as it brings."""

    def __init__(self, rows: Bytes, n_blocks: int | None) -> None:
        self._rows = rows
        self._n_blocks = n_blocks
        self._n_there = 0
        self._chunks = BlockChunks(native.row_addresses(rows), rows.shape[1])
        self.lease = pb.LeaseReply()

    def run(self, calls: ChannelCalls, request: spb.ReadRequest, timeout_s: float) -> None:
        """Blocks until all has come. Raises what the daemon answers, RefusedError for damaged blocks."""
        stream = calls.channel.read(request, timeout_s)
        try:
            for i, payload in enumerate(stream):
                self._take(payload, first=i == 0)
        except DamagedError as error:
            raise RefusedError(f"{error}: they are misses") from error  # the connection is as good as before
        except grpc.RpcError as error:
            raise error_of(error, calls.channel.address) from error
        finally:
            stream.cancel()
        if self._n_there != self._n_bytes:
            raise ProtocolError(f"{self._n_there} of {self._n_bytes} bytes came")

    @property
    def _n_bytes(self) -> int:
        return (self._n_blocks or 0) * int(self._rows.shape[1])

    def _take(self, payload: bytes, *, first: bool) -> None:
        """Put a piece that came where it belongs and compare the blocks that it ends."""
        message, data = split_data(spb.ReadReply, payload)
        if first:
            self._begin(message)
        n_there, n_bytes = self._n_there, self._n_bytes
        if message.offset != n_there or n_there + len(data) > n_bytes or (n_bytes and not len(data)):
            raise ProtocolError(f"{len(data)} bytes came at offset {message.offset}; {n_there} of {n_bytes} were there")
        if len(data):
            span = Span(n_there, len(data), self._rows.shape[1])
            with current().touching():
                self._chunks.take(span, data, message.checksums)
        self._n_there += len(data)

    def _begin(self, message: spb.ReadReply) -> None:
        n_rows, block_bytes = self._rows.shape
        if self._n_blocks is None:
            self.lease = message.lease
            self._n_blocks = message.n_blocks
        if self._n_blocks and (message.block_bytes != block_bytes or message.n_blocks != self._n_blocks):
            raise ProtocolError(
                f"{message.n_blocks} blocks of {message.block_bytes} bytes were to come, "
                f"not the {self._n_blocks} of {block_bytes} bytes asked for"
            )
        if self._n_blocks > n_rows:
            raise ProtocolError(f"{self._n_blocks} blocks were to come; there is room for {n_rows}")


def _messages(
    borrowing: Borrowing,
    reservation_id: int,
    blocks: Bytes,
    start: int,
    end: int,
    message_bytes_max: int,
    commit: pb.CommitRequest | None,
) -> Iterator[bytes]:
    """The messages of a Write of blocks ``start`` to ``end``; they end early if nobody waits for that any more."""
    block_bytes = blocks.shape[1]
    rest = spb.WriteRequest(reservation_id=reservation_id)
    chunks = BlockChunks(native.row_addresses(blocks), block_bytes)
    room = min(message_bytes_max, CHUNK_MESSAGE_BYTES)
    for span in Span.cut(start * block_bytes, end * block_bytes, block_bytes, room):
        rest.offset = span.offset
        if commit is not None and span.offset + span.n_bytes == end * block_bytes:
            rest.commit.CopyFrom(commit)
        try:
            with borrowing.touching():
                message = chunks.chunk_of(span, partial(_with_checksums, rest))
        except AbandonedError:
            return
        yield message
        rest = spb.WriteRequest()


def _with_checksums(message: spb.WriteRequest, checksums: bytes) -> bytes:
    message.checksums = checksums
    return message.SerializeToString()
