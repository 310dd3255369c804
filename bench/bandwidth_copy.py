"""The part of the bandwidth benchmark that moves bytes: one block size, any number of threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.measure import Team, ordinary_array, paired, timed
from kvstore.client import Client
from kvstore.errors import KVStoreError
from kvstore.types import KVSpec, Namespace

BLOCK_TOKENS = 16
_POOL = 4
"""Source and target arrays per side: together larger than the last-level cache."""

_PAGE_BYTES = 4096

Batch = NDArray[np.uint8]


class CopyOptions(Protocol):
    """What this part needs of the benchmark's options."""

    @property
    def pairs(self) -> int: ...
    @property
    def batch_bytes(self) -> int: ...
    @property
    def dram_bytes(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...


class CopyBench:
    """A writer and a reader (two clients) of blocks of one size. A context manager.

    The reader is a client of its own, as an engine that reads another's blocks is: it maps sealed memory.
    """

    def __init__(self, connect: str, options: CopyOptions, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.n_blocks = max(1, options.batch_bytes // block_bytes)
        self.batch_bytes = self.n_blocks * block_bytes
        self.mismatches = 0
        self._options = options
        self._rng = np.random.default_rng([options.seed, block_bytes])
        self._sources = [self._random_batch() for _ in range(_POOL)]
        self._targets = [self._plain_batch() for _ in range(_POOL)]
        self._aligned_targets = [self._plain_batch(_PAGE_BYTES) for _ in range(_POOL)]
        self._batch_numbers = itertools.count()
        self._clients = [Client(connect, timeout_s=options.timeout_s) for _ in range(2)]
        namespace = Namespace(f"bench:{block_bytes}:{options.seed}", KVSpec.opaque(BLOCK_TOKENS, block_bytes))
        self._writer, self._reader = (client.open(namespace) for client in self._clients)

    def warm_up(self) -> Iterator[tuple[str, float]]:
        """Fill the whole tier with this size and read all of it, so that every mapping has its pages.

        Yields the seconds of each side's first call, which had to map and touch memory.
        """
        batches = 2 + self._options.dram_bytes // self.batch_bytes
        for index in range(batches):
            number, put_s = self._timed_put(1)
            get_s = self._timed_get(number, 1)
            if index == 0:
                yield "put, first call", put_s
                yield "get_into, first call", get_s

    def measure(self, threads: int) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """Seconds of each operation beside those of the numpy copy, float64 [pairs, 2]."""
        pairs = self._options.pairs
        with Team(threads) as team:
            yield "put", paired(pairs, lambda _: self._checked_put(threads), lambda i: self._copy(team, i))
            stored = [self._timed_put(1)[0] for _ in range(_POOL)]
            yield (
                "get_into",
                paired(
                    pairs,
                    lambda i: self._timed_get(stored[i % _POOL], threads),
                    lambda i: self._copy(team, i),
                ),
            )
            yield (
                "lease + copy out of views",
                paired(
                    pairs,
                    lambda i: self._timed_read_views(stored[i % _POOL], team),
                    lambda i: self._copy(team, i),
                ),
            )

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

    def _timed_put(self, threads: int) -> tuple[int, float]:
        """Store a batch under new keys; returns its number and the seconds it took."""
        number = next(self._batch_numbers)
        tokens, batch = self._tokens(number), self._stamped(number)
        seconds, done = timed(lambda: self._writer.put(tokens, batch, threads=threads))
        self._must_be_all("put stored", done.n_stored, done.reason)
        return number, seconds

    def _checked_put(self, threads: int) -> float:
        number, seconds = self._timed_put(threads)
        self._timed_get(number, 1)
        return seconds

    def _timed_get(self, number: int, threads: int) -> float:
        tokens, out = self._tokens(number), self._targets[number % _POOL]
        out[:, 0] ^= 1  # whatever an earlier read left here must not pass for this one's bytes
        seconds, got = timed(lambda: self._reader.get_into(tokens, out, threads=threads))
        self._must_be_all("get_into found", got.n_blocks, got.reason)
        self._compare(number, out)
        return seconds

    def _timed_read_views(self, number: int, team: Team) -> float:
        """Lease, then copy out of the views with numpy as a reader of its own would.

        To page-aligned memory, as engines have it: from a page-aligned source to an array at 16 bytes past a
        page, where numpy puts large arrays, memcpy of less than about 1 MiB is 6 x slower on some processors.
        """
        tokens, out = self._tokens(number), self._aligned_targets[number % _POOL]
        out[:, 0] ^= 1
        seconds, n_found = timed(lambda: self._read_views(tokens, out, team))
        self._must_be_all("lease found", n_found)
        self._compare(number, out)
        return seconds

    def _read_views(self, tokens: NDArray[np.uint32], out: Batch, team: Team) -> int:
        with self._reader.lease(tokens) as lease:
            views = [lease.view(i) for i in range(len(lease))]

            def copy_part(part: int) -> None:
                for i in range(part, len(views), team.threads):
                    np.copyto(out[i], views[i])

            team.time_s([partial(copy_part, part) for part in range(team.threads)])
            return len(views)

    def _copy(self, team: Team, index: int) -> float:
        """numpy between ordinary arrays: the limit."""
        source, target = self._sources[index % _POOL], self._targets[(index + 1) % _POOL]
        parts = zip(
            np.array_split(target.reshape(-1), team.threads),
            np.array_split(source.reshape(-1), team.threads),
            strict=True,
        )
        return team.time_s([partial(np.copyto, into, out_of) for into, out_of in parts])

    def _must_be_all(self, what: str, n_blocks: int, reason: str = "") -> None:
        """A call that moved less than everything has no bandwidth worth showing."""
        if n_blocks != self.n_blocks:
            raise KVStoreError(
                f"{what} {n_blocks} of {self.n_blocks} blocks of {self.block_bytes} bytes"
                f"{reason and ': ' + reason}; the benchmark needs a daemon of its own with "
                f"{self._options.dram_bytes} bytes of DRAM"
            )

    # Data ----------------------------------------------------------------------------------------

    def _compare(self, number: int, out: Batch) -> None:
        expected = self._stamped(number)
        if not np.array_equal(out, expected):
            self.mismatches += int(np.count_nonzero(np.any(out != expected, axis=1)))

    def _stamped(self, number: int) -> Batch:
        """The batch of that number: one of the random arrays, with number and place in each block."""
        batch = self._sources[number % _POOL]
        stamps = np.arange(self.n_blocks, dtype="<u4") | np.uint32((number & 0xFFFF) << 16)
        batch[:, :4] = stamps.view(np.uint8).reshape(-1, 4)
        return batch

    def _tokens(self, number: int) -> NDArray[np.uint32]:
        rng = np.random.default_rng([self._options.seed, self.block_bytes, number])
        return rng.integers(0, 1 << 32, self.n_blocks * BLOCK_TOKENS, dtype=np.uint32)

    def _random_batch(self) -> Batch:
        words = self._rng.integers(0, 1 << 64, -(-self.batch_bytes // 8), dtype=np.uint64)
        return words.view(np.uint8)[: self.batch_bytes].reshape(self.n_blocks, self.block_bytes)

    def _plain_batch(self, alignment: int = 1) -> Batch:
        return ordinary_array(self.batch_bytes, alignment).reshape(self.n_blocks, self.block_bytes)
