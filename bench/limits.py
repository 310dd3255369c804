"""The machine's own limits, measured in the same run as whatever is compared with them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvstore.bench.measure import Latency, Team, leave_interrupts_to_parent, ordinary_array, timed_s
from kvstore.errors import UnavailableError

ECHO_BYTES = 4096
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine can do. ``grpc_aio_echo`` is None where grpcio is absent; ``notes`` says so."""

    copy_1_thread_gb_per_s: float
    copy_2_threads_gb_per_s: float
    unix_echo: Latency
    grpc_aio_echo: Latency | None
    token_compare: Latency
    token_compare_tokens: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """JSON-able."""
        return {
            "copy_1_thread_gb_per_s": self.copy_1_thread_gb_per_s,
            "copy_2_threads_gb_per_s": self.copy_2_threads_gb_per_s,
            "unix_echo_4k": self.unix_echo.to_dict(),
            "grpc_aio_echo_4k": None if self.grpc_aio_echo is None else self.grpc_aio_echo.to_dict(),
            "token_compare": {"tokens": self.token_compare_tokens, **self.token_compare.to_dict()},
            "notes": list(self.notes),
        }


def measure_limits(
    echoes: int = 2000, grpc_echoes: int = 500, copy_bytes: int = 64 << 20, compare_tokens: int = 131_072
) -> Limits:
    """Measure everything once; takes a few seconds and blocks."""
    grpc_echo = measure_grpc_aio_echo(grpc_echoes)
    notes = (grpc_echo,) if isinstance(grpc_echo, str) else ()
    with Echo() as echo:
        unix_echo = Latency.from_seconds([timed_s(echo.round_trip) for _ in range(echoes)])
    return Limits(
        copy_1_thread_gb_per_s=measure_copy(copy_bytes, 1),
        copy_2_threads_gb_per_s=measure_copy(copy_bytes, 2),
        unix_echo=unix_echo,
        grpc_aio_echo=None if isinstance(grpc_echo, str) else grpc_echo,
        token_compare=measure_token_compare(compare_tokens),
        token_compare_tokens=compare_tokens,
        notes=notes,
    )


def measure_copy(bytes_per_thread: int, threads: int, repeats: int = 15) -> float:
    """GB/s of numpy copying between ordinary prefaulted arrays, median of ``repeats``."""
    sources = [ordinary_array(bytes_per_thread) for _ in range(threads)]
    targets = [ordinary_array(bytes_per_thread) for _ in range(threads)]

    work = [partial(np.copyto, target, source) for target, source in zip(targets, sources, strict=True)]
    with Team(threads) as team:
        team.time_s(work)
        seconds = [team.time_s(work) for _ in range(repeats)]
    return bytes_per_thread * threads / float(np.median(seconds)) / 1e9


def measure_token_compare(n_tokens: int, repeats: int = 200) -> Latency:
    """One numpy comparison of two equal uint32 arrays of ``n_tokens``."""
    left = np.random.default_rng(0).integers(0, 1 << 32, n_tokens, dtype=np.uint32)
    right = left.copy()
    return Latency.from_seconds([timed_s(lambda: np.array_equal(left, right)) for _ in range(repeats)])


class Echo:
    """A blocking Unix-socket echo of 4 KiB each way, its server in another process. A context manager."""

    def __init__(self, n_bytes: int = ECHO_BYTES) -> None:
        self._message = bytes(n_bytes)
        self._reply = bytearray(n_bytes)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_START_TIMEOUT_S)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve_echo, args=(theirs, n_bytes), daemon=True)
        try:
            self._process.start()
        finally:
            theirs.close()
        self._socket.setblocking(True)
        self.round_trip()

    def round_trip(self) -> None:
        """Send 4 KiB and wait for all of it to come back."""
        self._socket.sendall(self._message)
        _receive_exactly(self._socket, self._reply)

    def close(self) -> None:
        """End the server; blocks until it is gone."""
        self._socket.close()
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _receive_exactly(connection: socket.socket, into: bytearray) -> None:
    view, got = memoryview(into), 0
    while got < len(into):
        n = connection.recv_into(view[got:])
        if n == 0:
            raise UnavailableError("the echo server went away; run the benchmark again")
        got += n


def _serve_echo(connection: socket.socket, n_bytes: int) -> None:
    leave_interrupts_to_parent()
    connection.setblocking(True)
    buffer = bytearray(n_bytes)
    with connection, contextlib.suppress(UnavailableError, OSError):
        while True:
            _receive_exactly(connection, buffer)
            connection.sendall(buffer)


def measure_grpc_aio_echo(calls: int) -> Latency | str:
    """Unary grpc.aio echo of 4 KiB over a Unix socket, or the reason why it was not measured."""
    if importlib.util.find_spec("grpc") is None:
        return "grpc.aio echo not measured: grpcio is not installed (pip install '.[bench]' from a checkout)"
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        address = f"unix:{Path(folder) / 'echo.sock'}"
        with _grpc_server(address) as ready:
            if not ready:
                return "grpc.aio echo not measured: its server did not start"
            return Latency.from_seconds(asyncio.run(_call_grpc(address, calls)))


@contextlib.contextmanager
def _grpc_server(address: str) -> Iterator[bool]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve_grpc, args=(address, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield mine.poll(_START_TIMEOUT_S) and _said_ready(mine)
    finally:
        mine.close()
        process.kill()
        process.join()
        process.close()


def _said_ready(pipe: Connection) -> bool:
    try:
        return pipe.recv_bytes() == b"ready"
    except EOFError:
        return False


def _serve_grpc(address: str, ready: Connection) -> None:
    leave_interrupts_to_parent()
    asyncio.run(_run_grpc_server(address, ready))


async def _run_grpc_server(address: str, ready: Connection) -> None:
    import grpc

    async def echo(request: bytes, _context: object) -> bytes:
        return request

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Echo": handler}),))
    server.add_insecure_port(address)
    await server.start()
    ready.send_bytes(b"ready")
    await server.wait_for_termination()


async def _call_grpc(address: str, calls: int) -> list[float]:
    import grpc

    message, seconds = bytes(ECHO_BYTES), []
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/bench.Echo/Echo")
        for _ in range(20):
            await call(message)
        for _ in range(calls):
            start = time.perf_counter()
            await call(message)
            seconds.append(time.perf_counter() - start)
    return seconds
