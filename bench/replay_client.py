"""One replay client: the loop over its requests, in whichever process it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.bench import workload as work
from kvstore.bench.replay_hbm import HbmReader
from kvstore.bench.replay_journal import Journal
from kvstore.bench.simulate import HitCounts, Progress
from kvstore.bench.workload import Workload
from kvstore.client import Client, Lease, PutResult
from kvstore.errors import EndedError, UnavailableError
from kvstore.hints import Hints

OPERATIONS = ("match", "lease", "verify", "release", "put", "persist")

PERSIST_S_MAX = 60.0
_MAX_PUT_BYTES = 256 << 20
_READ_BACK_BLOCKS = 32
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What every client of a replay must know.

    ``durable_every``: requests between its waits for durability, 0 = never. ``comeback_s``: how long it waits for
    a daemon that has gone to come back, 0 = not at all, the rest is misses. ``hbm_device``: with which to read HBM, ""
    for not at all.
    """

    connect: str
    block_bytes: int
    seed: int
    timeout_s: float
    durable_every: int = 0
    comeback_s: float = 0.0
    attention_doubling_tokens: float = 0.0
    hbm_device: str = ""
    tenant: str = "default"


@dataclass(slots=True)
class ClientResult:
    """What one client counted. ``seconds`` has the timings of each operation.

    ``unanswered`` requests got a miss because the daemon did not answer in time; ``ended_leases`` ended
    before all of their bytes were compared. Both are 0 in a run worth quoting, unless its daemon was killed.
    ``late_blocks`` were not in DRAM when the lease was given.
    """

    counts: HitCounts = field(default_factory=HitCounts)
    mismatches: int = 0
    skipped_blocks: int = 0
    late_blocks: int = 0
    unanswered: int = 0
    ended_leases: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})
    journal: Journal = field(default_factory=Journal)

    def to_plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "journal": self.journal.to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ClientResult:
        """The inverse of ``to_plain``."""
        parts = {"counts": HitCounts(**plain["counts"]), "journal": Journal.from_plain(plain["journal"])}
        return cls(**{**plain, **parts})


def run_client(
    workload: Workload,
    options: ClientOptions,
    progress: Progress | None = None,
    ready: Callable[[], object] | None = None,
    between: Callable[[Journal], None] | None = None,
) -> ClientResult:
    """Replay all of ``workload`` over a connection of its own; ``ready`` is called once that is open.

    ``between`` is called ahead of each request and may block. Raises UnavailableError if a daemon that was to come
    back did not.
    """
    hbm_reader = HbmReader(options.hbm_device, options.block_bytes) if options.hbm_device else nullcontext()
    with hbm_reader as hbm, Client(options.connect, options.tenant, options.timeout_s) as client:
        run = ReplayClient(client, workload, options, hbm)
        if ready is not None:
            ready()
        for index in range(workload.n_requests):
            if between is not None:
                between(run.result.journal)
            run.step(index)
            if progress is not None:
                progress(1)
        run.make_durable()
    return run.result


class ReplayClient:
    """The state of one client's loop. Requests are numbered as in ``workload``."""

    def __init__(
        self, client: Client, workload: Workload, options: ClientOptions, hbm: HbmReader | None = None
    ) -> None:
        self.result = ClientResult()
        self._client = client
        self._workload = workload
        self._options = options
        self._block_bytes = options.block_bytes
        self._payload = work.payload(workload, options.block_bytes, options.seed)
        model = f"replay:{workload.name}:{options.seed}"
        self._doubling_tokens = options.attention_doubling_tokens
        namespace = work.namespace(workload, options.block_bytes, model, options.tenant)
        self._namespace = client.open(namespace, attention_doubling_tokens=self._doubling_tokens)
        self._buffer = np.empty((0, options.block_bytes), dtype=np.uint8)
        self._not_durable: list[int] = []
        self._hbm = hbm
        if hbm is not None:
            hbm.serve(client)

    def step(self, index: int) -> None:
        """One request."""
        started_s = time.monotonic()
        prompt = work.prompt(self._workload, index)
        keys = work.payload_keys(self._workload, index)
        self._timed("match", lambda: self._namespace.match(prompt))
        found_tokens, n_nvme, in_hbm = self._read(index, prompt, keys)
        whole = work.whole_blocks(self._workload, index, found_tokens)
        self._count(index, len(keys), whole, found_tokens, n_nvme, int(np.count_nonzero(in_hbm < whole)))
        self._write(index, prompt, keys, whole)
        self._await_comeback()
        if self._options.durable_every:
            self.result.journal.access(index, started_s, time.monotonic())
            self._not_durable.append(index)
            if len(self._not_durable) >= self._options.durable_every:
                self.make_durable()

    def make_durable(self) -> None:
        """Wait until the blocks of all requests since the last time are durable, as far as they can be."""
        for index in self._not_durable:
            prompt = work.prompt(self._workload, index)
            done = self._timed("persist", partial(self._namespace.persist, prompt, PERSIST_S_MAX))
            if done.n_durable:
                self.result.journal.acknowledge(index, done.n_durable)
        self._not_durable.clear()
        self._await_comeback()

    def read_back(self, index: int, n_blocks: int) -> int:
        """How many of the leading ``n_blocks`` blocks of a request are found; bytes that differ are counted."""
        prompt, keys = work.prompt(self._workload, index), work.payload_keys(self._workload, index)
        now_s = self._workload.requests[index].timestamp_s
        length = self._workload.requests[index].input_length
        for first in range(0, n_blocks, _READ_BACK_BLOCKS):
            end = min(first + _READ_BACK_BLOCKS, n_blocks)
            with self._namespace.lease(prompt, first_block=first, max_blocks=end, policy_time_s=now_s) as lease:
                tokens = min(lease.n_tokens, length)
                found = min(work.whole_blocks(self._workload, index, tokens), end)
                if found > first:
                    self._compare_blocks(lease, self._payload.masks(keys[first:found]), tokens)
            if found < end:
                return found
        return n_blocks

    def _count(self, index: int, n_blocks: int, whole: int, found_tokens: int, n_nvme: int, n_hbm: int) -> None:
        counts = self.result.counts
        n_tokens = self._workload.requests[index].input_length
        counts.count(n_blocks, whole, n_tokens, found_tokens, self._doubling_tokens)
        counts.nvme_block_hits += min(n_nvme, whole)
        counts.hbm_block_hits += n_hbm
        counts.dram_block_hits += whole - min(n_nvme, whole) - n_hbm

    def _read(self, index: int, prompt: NDArray[Any], keys: NDArray[np.uint64]) -> tuple[int, int, NDArray[np.uint32]]:
        """Lease the prefix and compare all of its bytes.

        Returns the tokens found, how many blocks were read from NVMe, and which were in HBM.
        """
        request = self._workload.requests[index]
        hints = work.hints(self._workload, index, is_done=False)
        lease = self._timed(
            "lease",
            lambda: self._namespace.lease(
                prompt, policy_time_s=request.timestamp_s, hints=hints, hbm=self._hbm is not None
            ),
        )
        self.result.unanswered += bool(lease.reason)
        self.result.late_blocks += lease.n_pending
        tokens = min(lease.n_tokens, request.input_length)
        try:
            if tokens:
                masks = self._payload.masks(keys[: -(-tokens // self._workload.block_tokens)])
                self._timed("verify", lambda: self._compare_blocks(lease, masks, tokens))
        except EndedError:
            self.result.ended_leases += 1
        finally:
            self._timed("release", lease.release)
        return tokens, lease.n_nvme, lease.hbm.at

    def _compare_blocks(self, lease: Lease, masks: NDArray[np.uint64], tokens: int) -> None:
        """Compare every byte that the lease covers; of a partly matching block the tokens that match.

        ``masks`` belong to the blocks of the lease; ``tokens`` counts from the start of the prompt.
        """
        block_tokens, payload = self._workload.block_tokens, self._payload
        mismatches, n_bytes = 0, 0
        for at, block in self._blocks_of(lease, len(masks)):
            mask = masks[at]
            segments = payload.segments
            if segments > 1:
                segments = min(block_tokens, tokens - (lease.first_block + at) * block_tokens)
            mismatches += not payload.matches(block, mask, segments)
            n_bytes += self._block_bytes * segments // payload.segments
        self.result.mismatches += mismatches
        self.result.bytes_read += n_bytes

    def _blocks_of(self, lease: Lease, n_blocks: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The leading blocks of a lease, those in HBM first, each to be looked at before the next."""
        if self._hbm is not None:
            yield from self._hbm.read(lease, n_blocks)
        for at in sorted(set(range(n_blocks)) - set(lease.hbm.at.tolist())):
            yield at, lease.view(at)

    def _write(self, index: int, prompt: NDArray[Any], keys: NDArray[np.uint64], first_block: int) -> None:
        """Put the absent blocks, all at once unless they are very many bytes."""
        most = max(1, _MAX_PUT_BYTES // self._block_bytes)
        now_s, hints = self._workload.requests[index].timestamp_s, work.hints(self._workload, index, is_done=True)
        for first in range(first_block, len(keys), most):
            done = self._put(index, prompt, self._blocks(keys[first : first + most]), first, now_s, hints)
            self.result.skipped_blocks += done.n_skipped
            self.result.bytes_written += done.n_stored * self._block_bytes

    def _put(
        self, index: int, prompt: NDArray[Any], blocks: NDArray[np.uint8], first: int, now_s: float, hints: Hints | None
    ) -> PutResult:
        n_tokens = work.prompt_tokens(self._workload, index)

        def call() -> PutResult:
            return self._namespace.put(
                prompt, blocks, first_block=first, policy_time_s=now_s, hints=hints, n_prompt_tokens=n_tokens
            )

        return self._timed("put", call)

    def _blocks(self, keys: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Block bytes for ``keys``, in a buffer that is used again by the next call."""
        if len(self._buffer) < len(keys):
            self._buffer = np.empty((len(keys), self._block_bytes), dtype=np.uint8)
        blocks = self._buffer[: len(keys)]
        self._payload.fill(keys, blocks)
        return blocks

    def _await_comeback(self) -> None:
        """An engine would go on without a cache; here the rest of the trace would be over before the daemon is back."""
        within_s = self._options.comeback_s
        if within_s and not self._client.healthy and not self._client.wait_healthy(within_s):
            raise UnavailableError(f"the daemon did not come back within {within_s:.0f} s after it was killed")

    def _timed(self, operation: str, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = call()
        self.result.seconds[operation].append(time.perf_counter() - start)
        return result
