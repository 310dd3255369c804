"""One replay client: the loop over its requests, in whichever process it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.bench import workload as work
from kvstore.bench.simulate import HitCounts, Progress
from kvstore.bench.workload import Workload
from kvstore.client import Client, Lease, PutResult
from kvstore.errors import EndedError

OPERATIONS = ("match", "lease", "verify", "release", "put")

_MAX_PUT_BYTES = 256 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What every client of a replay must know."""

    connect: str
    block_bytes: int
    seed: int
    timeout_s: float


@dataclass(slots=True)
class ClientResult:
    """What one client counted. ``seconds`` has the timings of each operation.

    ``unanswered`` requests got a miss because the daemon did not answer in time; ``ended_leases`` ended
    before all of their bytes were compared. Both are 0 in a run worth quoting.
    """

    counts: HitCounts = field(default_factory=HitCounts)
    mismatches: int = 0
    skipped_blocks: int = 0
    unanswered: int = 0
    ended_leases: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})

    def to_plain(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ClientResult:
        """The inverse of ``to_plain``."""
        return cls(**{**plain, "counts": HitCounts(**plain["counts"])})


def run_client(
    workload: Workload,
    options: ClientOptions,
    progress: Progress | None = None,
    ready: Callable[[], object] | None = None,
) -> ClientResult:
    """Replay all of ``workload`` over a connection of its own; ``ready`` is called once that is open."""
    with Client(options.connect, timeout_s=options.timeout_s) as client:
        run = _ClientRun(client, workload, options)
        if ready is not None:
            ready()
        for index in range(workload.n_requests):
            run.step(index)
            if progress is not None:
                progress(1)
    return run.result


class _ClientRun:
    """The state of one client's loop."""

    def __init__(self, client: Client, workload: Workload, options: ClientOptions) -> None:
        self.result = ClientResult()
        self._workload = workload
        self._block_bytes = options.block_bytes
        self._payload = work.payload(workload, options.block_bytes, options.seed)
        model = f"replay:{workload.name}:{options.seed}"
        self._namespace = client.open(work.namespace(workload, options.block_bytes, model))
        self._buffer = np.empty((0, options.block_bytes), dtype=np.uint8)

    def step(self, index: int) -> None:
        """One request."""
        prompt = work.prompt(self._workload, index)
        keys = work.payload_keys(self._workload, index)
        self._timed("match", lambda: self._namespace.match(prompt))
        found_tokens = self._read(index, prompt, keys)
        whole = work.whole_blocks(self._workload, index, found_tokens)
        n_blocks, length = len(keys), self._workload.requests[index].input_length
        self.result.counts.count(n_blocks, whole, length, found_tokens)
        self._write(index, prompt, keys, whole)

    def _read(self, index: int, prompt: NDArray[Any], keys: NDArray[np.uint64]) -> int:
        """Lease the prefix and compare all of its bytes; returns the tokens found."""
        request = self._workload.requests[index]
        lease = self._timed("lease", lambda: self._namespace.lease(prompt, policy_time_s=request.timestamp_s))
        self.result.unanswered += bool(lease.reason)
        tokens = min(lease.n_tokens, request.input_length)
        try:
            if tokens:
                self._timed("verify", lambda: self._compare(lease, keys, tokens))
        except EndedError:
            self.result.ended_leases += 1
        finally:
            self._timed("release", lease.release)
        return tokens

    def _compare(self, lease: Lease, keys: NDArray[np.uint64], tokens: int) -> None:
        """Compare every byte that the lease covers; of a partly matching block the tokens that match."""
        block_tokens, payload = self._workload.block_tokens, self._payload
        masks = payload.masks(keys[: -(-tokens // block_tokens)])
        mismatches, n_bytes = 0, 0
        for at, mask in enumerate(masks):
            segments = payload.segments
            if segments > 1:
                segments = min(block_tokens, tokens - at * block_tokens)
            mismatches += not payload.matches(lease.view(at), mask, segments)
            n_bytes += self._block_bytes * segments // payload.segments
        self.result.mismatches += mismatches
        self.result.bytes_read += n_bytes

    def _write(self, index: int, prompt: NDArray[Any], keys: NDArray[np.uint64], first_block: int) -> None:
        """Put the absent blocks, all at once unless they are very many bytes."""
        most = max(1, _MAX_PUT_BYTES // self._block_bytes)
        now_s = self._workload.requests[index].timestamp_s
        for first in range(first_block, len(keys), most):
            done = self._put(prompt, self._blocks(keys[first : first + most]), first, now_s)
            self.result.skipped_blocks += done.n_skipped
            self.result.bytes_written += done.n_stored * self._block_bytes

    def _put(self, prompt: NDArray[Any], blocks: NDArray[np.uint8], first: int, now_s: float) -> PutResult:
        def call() -> PutResult:
            return self._namespace.put(prompt, blocks, first_block=first, policy_time_s=now_s)

        return self._timed("put", call)

    def _blocks(self, keys: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Block bytes for ``keys``, in a buffer that is used again by the next call."""
        if len(self._buffer) < len(keys):
            self._buffer = np.empty((len(keys), self._block_bytes), dtype=np.uint8)
        blocks = self._buffer[: len(keys)]
        self._payload.fill(keys, blocks)
        return blocks

    def _timed(self, operation: str, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = call()
        self.result.seconds[operation].append(time.perf_counter() - start)
        return result
