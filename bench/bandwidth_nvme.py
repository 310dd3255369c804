"""The part of the bandwidth benchmark that goes to the disk: durable writes and cold reads, beside the disk itself.

Everything through a daemon and clients, checksums included. A durable write is put and persist; a cold read is a
lease, with waiting, of blocks that are on NVMe only. The data set is larger than the daemon's DRAM.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.bandwidth_copy import BLOCK_TOKENS
from kvstore.bench.bandwidth_row import GIB, KIB, MIB, Row
from kvstore.bench.disk_limit import DiskLimit, LimitFile, disk_limit
from kvstore.bench.measure import paired, timed
from kvstore.client import Client, Lease
from kvstore.config import format_size
from kvstore.errors import BadInputError, KVStoreError
from kvstore.types import KVSpec, Namespace

WRITE, READ = "put + persist", "cold lease"
DRAM_BATCHES = 4
"""The daemon's DRAM holds so many batches. Those written last may stay there; of the others, read in turn, it never
holds the next one.
"""

_PUT_BYTES = 32 * MIB
_SPARE_BYTES = 512 * MIB

StartDaemon = Callable[[int], AbstractContextManager[Path]]
"""From the bytes of a block: a daemon with room for the data set, its DRAM and NVMe as the options say; its socket."""

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    """What to measure. ``batch_bytes`` one operation moves; ``file_bytes`` is the size of the file for the limit.

    ``depth``: I/Os that the daemon has on their way. ``sync_bytes``: what it writes between two syncs.
    """

    block_sizes: tuple[int, ...] = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
    pairs: int = 9
    batch_bytes: int = 256 * MIB
    file_bytes: int = 4 * GIB
    depth: int = 8
    sync_bytes: int = 32 * MIB
    seed: int = 0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("pairs", "depth", "sync_bytes"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.block_sizes or min(self.block_sizes) < 1 or any(size % 4096 for size in self.block_sizes):
            raise BadInputError(f"block_sizes is {self.block_sizes}; on NVMe they must be multiples of 4096")
        if self.file_bytes < 2 * self.batch_bytes:
            raise BadInputError(f"file_bytes is {self.file_bytes}; it must hold two batches of {self.batch_bytes}")
        if any(self.batch_bytes % size for size in self.block_sizes):
            raise BadInputError(f"batch_bytes is {self.batch_bytes}; it must be whole blocks of {self.block_sizes}")

    @property
    def batches(self) -> int:
        """Batches in the data set."""
        return max(self.pairs + 1, 2 * DRAM_BATCHES + 2)

    @property
    def cold_batches(self) -> int:
        """Those that are read."""
        return self.batches - DRAM_BATCHES

    @property
    def dram_bytes(self) -> int:
        """What the daemon's DRAM is to hold."""
        return DRAM_BATCHES * self.batch_bytes

    @property
    def write_behind_bytes(self) -> int:
        """What may wait to be written: a batch, with the headers of its frames."""
        return 2 * self.batch_bytes

    def data_set_blocks(self, block_bytes: int) -> int:
        """Blocks in the data set."""
        return self.batches * self.batch_bytes // block_bytes

    @property
    def namespace_model(self) -> str:
        """The model that the blocks belong to."""
        return f"bench:nvme:{self.seed}"

    def namespace(self, block_bytes: int) -> Namespace:
        """The namespace of the blocks."""
        return Namespace(self.namespace_model, KVSpec.opaque(BLOCK_TOKENS, block_bytes))


@dataclass(frozen=True, slots=True)
class NvmeReport:
    """What was measured; a row's limit is what ``limit`` names."""

    limit: str
    rows: tuple[Row, ...]
    mismatches: int
    pairs: int
    batch_bytes: int
    facts: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "limit": self.limit,
            "rows": [row.to_dict() for row in self.rows],
            "mismatches": self.mismatches,
            "pairs": self.pairs,
            "batch_bytes": self.batch_bytes,
            "facts": self.facts,
        }


def run_nvme(options: NvmeOptions, start: StartDaemon, folder: Path, step: Step | None = None) -> NvmeReport:
    """Measure all block sizes, each with a daemon of its own; blocks for a minute or so.

    ``folder`` is where the file for the limit lies: the file system of the daemons' tiers. Raises BadInputError if
    it is too small.
    """
    tell = step or (lambda _: None)
    rows: list[Row] = []
    mismatches, facts = 0, {}
    file_bytes = _file_bytes(options, folder)
    tell(f"the disk's own limit: writing a file of {format_size(file_bytes)}")
    with LimitFile(folder, file_bytes) as file:
        limit = disk_limit(file, options.depth, options.sync_bytes)
        for block_bytes in options.block_sizes:
            tell(f"NVMe, blocks of {format_size(block_bytes)}, beside {limit.name}")
            with start(block_bytes) as connect, NvmeBench(str(connect), options, block_bytes, limit) as bench:
                for name, pairs in bench.measure():
                    rows.append(Row.from_pairs(name, block_bytes, 1, options.batch_bytes, pairs))
                mismatches += bench.mismatches
                facts = bench.facts()
    return NvmeReport(limit.name, tuple(rows), mismatches, options.pairs, options.batch_bytes, facts)


def _file_bytes(options: NvmeOptions, folder: Path) -> int:
    """As asked for, or what the disk has beside the data set."""
    # Frames of the smallest blocks take most room beyond their payload: half as much again is ample.
    taken = options.batches * options.batch_bytes * 3 // 2 + _SPARE_BYTES
    room = shutil.disk_usage(folder).free - taken
    if room < 2 * options.batch_bytes:
        raise BadInputError(
            f"{folder} has {format_size(room + taken)} of room; measuring NVMe needs "
            f"{format_size(taken + 2 * options.batch_bytes)}: choose an --nvme-dir on a larger disk"
        )
    return min(options.file_bytes, room)


class NvmeBench:
    """A writer and a reader (two clients) of blocks of one size. A context manager."""

    def __init__(self, connect: str, options: NvmeOptions, block_bytes: int, limit: DiskLimit) -> None:
        self.mismatches = 0
        self._options = options
        self._block_bytes = block_bytes
        self._limit = limit
        self._n_blocks = options.batch_bytes // block_bytes
        rng = np.random.default_rng([options.seed, block_bytes])
        words = rng.integers(0, 1 << 64, options.batch_bytes // 8, dtype=np.uint64)
        self._source: NDArray[np.uint8] = words.view(np.uint8).reshape(self._n_blocks, block_bytes)
        self._clients = [Client(connect, timeout_s=options.timeout_s) for _ in range(2)]
        namespace = options.namespace(block_bytes)
        self._writer, self._reader = (client.open(namespace) for client in self._clients)

    def measure(self) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """Seconds of each operation beside those of the disk alone, float64 [pairs, 2]."""
        options, n_bytes = self._options, self._options.batch_bytes
        # The first ones have to map and touch memory; enough of them that all of DRAM was in use once.
        untimed = options.batches - options.pairs
        for number in range(untimed):
            self._write_s(number)
        yield (
            WRITE,
            paired(
                options.pairs,
                lambda i: self._write_s(untimed + i),
                lambda _: self._limit.write_s(n_bytes, self._block_bytes),
            ),
        )
        for number in range(options.cold_batches):
            self._lease(self._tokens(number)).release()  # whatever comes: room in DRAM changes hands here
        yield (
            READ,
            paired(
                options.pairs,
                lambda i: self._read_s(i % options.cold_batches),
                lambda _: self._limit.read_s(n_bytes, self._block_bytes),
            ),
        )

    def facts(self) -> dict[str, Any]:
        """The daemon's numbers about NVMe."""
        prefixes = ("nvme_", "offload", "onboard")
        return {name: value for name, value in self._clients[0].stats().items() if name.startswith(prefixes)}

    def close(self) -> None:
        """Close both clients."""
        for client in self._clients:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What is timed -------------------------------------------------------------------------------

    def _write_s(self, number: int) -> float:
        tokens, batch = self._tokens(number), self._stamped(number)
        seconds, n_durable = timed(lambda: self._write(tokens, batch))
        self._must_be_all("are durable", n_durable)
        return seconds

    def _write(self, tokens: NDArray[np.uint32], batch: NDArray[np.uint8]) -> int:
        """As an engine stores a long prompt: part by part, and then it wants to be sure of it."""
        blocks = max(1, _PUT_BYTES // self._block_bytes)
        for first in range(0, self._n_blocks, blocks):
            part = batch[first : first + blocks]
            done = self._writer.put(tokens[: (first + len(part)) * BLOCK_TOKENS], part, first_block=first)
            self._must_be_all("were stored", done.n_stored, len(part), done.reason)
        return self._writer.persist(tokens, self._options.timeout_s).n_durable

    def _read_s(self, number: int) -> float:
        tokens = self._tokens(number)
        seconds, lease = timed(lambda: self._lease(tokens))
        with lease:
            held = f"{len(lease)} are in DRAM, {lease.n_pending} are on their way"
            self._must_be_all("were read from NVMe", lease.n_nvme, reason=lease.reason or held)
            expected = self._stamped(number)
            for i in range(self._n_blocks):
                self.mismatches += not np.array_equal(lease.view(i), expected[i])
        return seconds

    def _lease(self, tokens: NDArray[np.uint32]) -> Lease:
        """Up to pointers that can be used."""
        lease = self._reader.lease(tokens, wait=self._options.timeout_s)
        if lease:
            _ = lease.addresses
        return lease

    def _must_be_all(self, what: str, n_blocks: int, wanted: int | None = None, reason: str = "") -> None:
        """A call that moved less than everything has no bandwidth worth showing."""
        wanted = self._n_blocks if wanted is None else wanted
        if n_blocks != wanted:
            raise KVStoreError(
                f"{n_blocks} of {wanted} blocks of {self._block_bytes} bytes {what}{reason and ': ' + reason}; "
                "the benchmark needs a daemon of its own, and a disk that takes what it is given"
            )

    # Data ----------------------------------------------------------------------------------------

    def _stamped(self, number: int) -> NDArray[np.uint8]:
        """The batch of that number: random bytes, with number and place in each block."""
        stamps = np.arange(self._n_blocks, dtype="<u4") | np.uint32((number & 0xFFFF) << 16)
        self._source[:, :4] = stamps.view(np.uint8).reshape(-1, 4)
        return self._source

    def _tokens(self, number: int) -> NDArray[np.uint32]:
        rng = np.random.default_rng([self._options.seed, self._block_bytes, number])
        return rng.integers(0, 1 << 32, self._n_blocks * BLOCK_TOKENS, dtype=np.uint32)
