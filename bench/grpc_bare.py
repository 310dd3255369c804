"""What gRPC itself can do here: a process that streams chunks that are there already, and takes chunks.

Whoever receives drops them (the limit), or copies them to where they are to lie, once, without looking at them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.measure import leave_interrupts_to_parent, ordinary_array
from kvstore.errors import UnavailableError

START_S = 30.0
_NO_LIMIT = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@contextlib.contextmanager
def bare_server(address: str, chunk_bytes: int, n_chunks: int) -> Iterator[None]:
    """A process that serves ``n_chunks`` random chunks at ``address``. Raises UnavailableError if it can't."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(address, chunk_bytes, n_chunks, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not mine.poll(START_S):
            raise UnavailableError("the bare gRPC server did not start")
        yield
    finally:
        mine.close()
        process.kill()
        process.join()
        process.close()


def _serve(address: str, chunk_bytes: int, n_chunks: int, ready: Connection) -> None:
    import grpc

    leave_interrupts_to_parent()
    chunks = [np.random.default_rng(seed).bytes(chunk_bytes) for seed in range(n_chunks)]
    place = ordinary_array(chunk_bytes * n_chunks)
    server = grpc.server(ThreadPoolExecutor(8), options=_NO_LIMIT)
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
        "Read": grpc.unary_stream_rpc_method_handler(lambda _request, _context: iter(chunks)),
        "Write": grpc.stream_unary_rpc_method_handler(lambda requests, _: b"%d" % sum(map(len, requests))),
        "Land": grpc.stream_unary_rpc_method_handler(lambda requests, _: b"%d" % _land(requests, place)),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", handlers),))
    server.add_insecure_port(address)
    server.start()
    ready.send_bytes(b"ready")
    server.wait_for_termination()


def _land(chunks: Iterable[bytes], place: NDArray[np.uint8]) -> int:
    """Copy chunks to uint8 ``[n]``, one behind the other; returns how many bytes there were."""
    at = 0
    for chunk in chunks:
        place[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)
    return at


class BareClient:
    """The other end. A context manager."""

    def __init__(self, address: str, chunk_bytes: int, n_chunks: int) -> None:
        import grpc

        self._channel = grpc.insecure_channel(address, options=_NO_LIMIT)
        self._chunks = [np.random.default_rng(seed).bytes(chunk_bytes) for seed in range(n_chunks)]
        self._echo: Any = self._channel.unary_unary("/bench.Bare/Echo")
        self._read: Any = self._channel.unary_stream("/bench.Bare/Read")
        self._write: Any = self._channel.stream_unary("/bench.Bare/Write")
        self._land: Any = self._channel.stream_unary("/bench.Bare/Land")
        self.place = ordinary_array(chunk_bytes * n_chunks)
        """Where ``read_landed_s`` puts what came, uint8 [bytes of all chunks]."""

    def read_s(self, _: int = 0) -> float:
        """Seconds to receive all chunks and drop them."""
        start = time.perf_counter()
        for _ in self._read(b""):
            pass
        return time.perf_counter() - start

    def write_s(self, _: int = 0) -> float:
        """Seconds to send all chunks."""
        start = time.perf_counter()
        self._write(iter(self._chunks))
        return time.perf_counter() - start

    def read_landed_s(self, _: int = 0) -> float:
        """Seconds to receive all chunks and copy them to ``place``."""
        start = time.perf_counter()
        _land(self._read(b""), self.place)
        return time.perf_counter() - start

    def write_landed_s(self, _: int = 0) -> float:
        """Seconds to send all chunks to where they are copied to memory."""
        start = time.perf_counter()
        self._land(iter(self._chunks))
        return time.perf_counter() - start

    def echo_s(self, message: bytes) -> float:
        """Seconds for one call."""
        start = time.perf_counter()
        self._echo(message)
        return time.perf_counter() - start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
