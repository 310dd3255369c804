"""Blocks over gRPC beside gRPC itself: the same bytes in equal chunks, streamed by a process that has them ready.

That one neither looks anything up, copies, nor makes or compares checksums; the store does all of it. Beside it stands
the same stream with what any receiver must do, one copy to where the bytes are to lie (``landed``). All three run next
to each other in the same run; a figure is the median of their ratios. All bytes are compared after the timing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.bandwidth_row import KIB, MIB, Row
from kvstore.bench.grpc_bare import BareClient, bare_server
from kvstore.bench.grpc_crowd import Crowd, measure_crowd
from kvstore.bench.measure import Latency, ordinary_array, timed
from kvstore.client import Client, NamespaceHandle
from kvstore.errors import BadInputError, IntegrityError, UnavailableError
from kvstore.types import KVSpec, Namespace

BLOCK_TOKENS = 16
CHUNK_BYTES = 2 * MIB
"""As the server and the client cut blocks."""
TIMEOUT_S = 30.0
PAIRS_MIN = 20


@dataclass(frozen=True, slots=True)
class GrpcBenchOptions:
    """One measurement moves ``batch_bytes``; then ``clients`` make ``rounds`` of three calls each at once."""

    block_sizes: tuple[int, ...] = (16 * KIB, 256 * KIB, 4 * MIB)
    pairs: int = 21
    batch_bytes: int = 64 * MIB
    clients: int = 200
    rounds: int = 20
    calls: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("pairs", "batch_bytes", "clients", "rounds", "calls"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.block_sizes or any(not 1 <= size <= self.batch_bytes for size in self.block_sizes):
            raise BadInputError(f"block_sizes is {self.block_sizes}; give sizes from 1 to {self.batch_bytes} bytes")

    @property
    def dram_bytes(self) -> int:
        """What the daemon must have."""
        return max(6 * self.batch_bytes, 256 * MIB)


@dataclass(frozen=True, slots=True)
class GrpcReport:
    """``rows``: Read and Write beside bare streams; ``landed``: the same beside bare streams that end in memory.

    ``calls``: single calls, and a bare echo, one client.
    """

    rows: tuple[Row, ...]
    landed: tuple[Row, ...]
    calls: dict[str, Latency]
    crowd: Crowd
    pairs: int
    batch_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """One JSON-able object."""
        return {
            "mode": "grpc",
            "rows": [row.to_dict() for row in self.rows],
            "landed": [row.to_dict() for row in self.landed],
            "calls": {name: latency.to_dict() for name, latency in self.calls.items()},
            "crowd": self.crowd.to_dict(),
            "pairs": self.pairs,
            "batch_bytes": self.batch_bytes,
        }


def run(options: GrpcBenchOptions, address: str, step: Callable[[str], None] = lambda _: None) -> GrpcReport:
    """Measure against a daemon of its own whose gRPC address this is. Blocks for a minute or so.

    Raises IntegrityError for wrong bytes, UnavailableError if the daemon or gRPC can't be reached.
    """
    rows: list[tuple[Row, Row]] = []
    n_chunks = max(options.batch_bytes // CHUNK_BYTES, 1)
    chunk_bytes = min(CHUNK_BYTES, options.batch_bytes)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        bare_address = f"unix:{Path(folder) / 'bare.sock'}"
        with (
            bare_server(bare_address, chunk_bytes, n_chunks),
            BareClient(bare_address, chunk_bytes, n_chunks) as bare,
            Client(address, timeout_s=TIMEOUT_S) as client,
        ):
            for block_bytes in options.block_sizes:
                step(f"blocks of {block_bytes >> 10} KiB")
                side = _Side(client, options, block_bytes)
                rows += side.measure(bare)
            step("single calls")
            calls = _calls(client, bare, options.calls, options.seed)
    step(f"{options.clients} clients")
    crowd = measure_crowd(address, options.clients, options.rounds, options.seed)
    if crowd.mismatches:
        raise IntegrityError(f"{crowd.mismatches} of {crowd.n_calls} answers had other bytes than were stored")
    beside_bare, beside_landed = zip(*rows, strict=True)
    return GrpcReport(beside_bare, beside_landed, calls, crowd, options.pairs, options.batch_bytes)


class _Side:
    """The store's side: blocks of one size."""

    def __init__(self, client: Client, options: GrpcBenchOptions, block_bytes: int) -> None:
        self._options = options
        self._block_bytes = block_bytes
        self._n = options.batch_bytes // block_bytes
        self._rng = np.random.default_rng(options.seed + block_bytes)
        self._blocks = self._rng.integers(0, 256, (self._n, block_bytes), dtype=np.uint8)
        self._out = ordinary_array(self._n * block_bytes).reshape(self._n, block_bytes)
        spec = KVSpec.opaque(BLOCK_TOKENS, block_bytes)
        self._namespace: NamespaceHandle = client.open(Namespace("bench-grpc", spec))
        self._tokens = self._prompt()

    def _prompt(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return self._rng.integers(0, 1 << 31, self._n * BLOCK_TOKENS, dtype=np.uint32)

    def measure(self, bare: BareClient) -> list[tuple[Row, Row]]:
        """Write and Read, each beside a bare stream and beside one that ends in memory."""
        n_bytes = self._n * self._block_bytes
        sides = {
            "put": (self._put_s, bare.write_s, bare.write_landed_s),
            "get_into": (self._get_s, bare.read_s, bare.read_landed_s),
        }
        for _ in range(2):  # what is set up by the first calls is not what is measured
            for side in sides.values():
                for call in side:
                    call(0)
        rows = []
        for name, (own, limit, landed) in sides.items():
            seconds = np.empty((self._options.pairs, 3))
            for i in range(len(seconds)):
                for turn in range(3):  # who goes first changes, so that nobody always finds another's caches
                    which = (i + turn) % 3
                    seconds[i, which] = (own, limit, landed)[which](i)
            beside = (Row.from_pairs(name, self._block_bytes, 1, n_bytes, seconds[:, [0, which]]) for which in (1, 2))
            rows.append((next(beside), next(beside)))
        return rows

    def _put_s(self, _: int = 0) -> float:
        self._tokens = self._prompt()
        seconds, result = timed(lambda: self._namespace.put(self._tokens, self._blocks))
        if result.n_stored != self._n:
            raise UnavailableError(f"{result.n_stored} of {self._n} blocks were stored: {result.reason}")
        return seconds

    def _get_s(self, _: int = 0) -> float:
        seconds, result = timed(lambda: self._namespace.get_into(self._tokens, self._out))
        if result.n_blocks != self._n:
            raise UnavailableError(f"{result.n_blocks} of {self._n} blocks came: {result.reason}")
        if not np.array_equal(self._out, self._blocks):
            raise IntegrityError("blocks came back with other bytes than were stored")
        self._out[:, 0] ^= 0xFF  # what is not written again is seen the next time
        return seconds


def _calls(client: Client, bare: BareClient, n: int, seed: int) -> dict[str, Latency]:
    """Times of single calls, interleaved, of a prompt of 16 blocks of 16 KiB."""
    rng = np.random.default_rng(seed)
    namespace = client.open(Namespace("bench-calls", KVSpec.opaque(BLOCK_TOKENS, 16 * KIB)))
    tokens = rng.integers(0, 1 << 31, 16 * BLOCK_TOKENS, dtype=np.uint32)
    blocks = rng.integers(0, 256, (16, 16 * KIB), dtype=np.uint8)
    namespace.put(tokens, blocks)
    out, echo = np.zeros_like(blocks), tokens.tobytes()
    calls: dict[str, Callable[[], float]] = {
        "bare echo of 1 KiB": lambda: bare.echo_s(echo),
        "match": lambda: timed(lambda: namespace.match(tokens))[0],
        "lease and release": lambda: timed(lambda: namespace.lease(tokens).release())[0],
        "get_into, 256 KiB": lambda: timed(lambda: namespace.get_into(tokens, out))[0],
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(n):
        for name, call in calls.items():
            seconds[name].append(call())
    if not np.array_equal(out, blocks):
        raise IntegrityError("blocks came back with other bytes than were stored")
    return {name: Latency.from_seconds(each) for name, each in seconds.items()}
