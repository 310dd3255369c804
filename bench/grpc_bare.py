"""What gRPC itself can do here: a process that streams chunks that are there already, and takes chunks to drop them."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np

from kvstore.bench.measure import leave_interrupts_to_parent
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
    server = grpc.server(ThreadPoolExecutor(8), options=_NO_LIMIT)
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
        "Read": grpc.unary_stream_rpc_method_handler(lambda _request, _context: iter(chunks)),
        "Write": grpc.stream_unary_rpc_method_handler(lambda requests, _: b"%d" % sum(map(len, requests))),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", handlers),))
    server.add_insecure_port(address)
    server.start()
    ready.send_bytes(b"ready")
    server.wait_for_termination()


class BareClient:
    """The other end. A context manager."""

    def __init__(self, address: str, chunk_bytes: int, n_chunks: int) -> None:
        import grpc

        self._channel = grpc.insecure_channel(address, options=_NO_LIMIT)
        self._chunks = [np.random.default_rng(seed).bytes(chunk_bytes) for seed in range(n_chunks)]
        self._echo: Any = self._channel.unary_unary("/bench.Bare/Echo")
        self._read: Any = self._channel.unary_stream("/bench.Bare/Read")
        self._write: Any = self._channel.stream_unary("/bench.Bare/Write")

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

    def echo_s(self, message: bytes) -> float:
        """Seconds for one call."""
        start = time.perf_counter()
        self._echo(message)
        return time.perf_counter() - start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
