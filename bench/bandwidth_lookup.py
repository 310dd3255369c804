"""The part of the bandwidth benchmark that finds and leases blocks without moving any."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.limits import Echo, Limits
from kvstore.bench.measure import Latency, timed_s
from kvstore.client import Client, NamespaceHandle
from kvstore.errors import BadInputError
from kvstore.types import KVSpec, Namespace, RowKind

BLOCK_TOKENS = 16
_HASH_BYTES = 8
_WARM_UP = 5
_BURST = 50

T = TypeVar("T")


class LookupOptions(Protocol):
    """What this part needs of the benchmark's options."""

    @property
    def lookup_blocks(self) -> int: ...
    @property
    def lookups(self) -> int: ...
    @property
    def lease_block_sizes(self) -> tuple[int, ...]: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LookupRow:
    """A lookup of a resident prefix beside echoes that ran in turn with it. ``lease`` matches, too.

    ``kv_bytes`` is what the blocks hold; ``copy_us`` how long numpy would need to copy that much. A lookup
    that takes a small part of it, whatever the size of the blocks, can't have moved them.
    """

    name: str
    rows: str
    n_blocks: int
    block_bytes: int
    latency: Latency
    echo: Latency
    echo_ratio: float
    grpc_ratio: float | None
    kv_bytes: int
    copy_us: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "name": self.name,
            "rows": self.rows,
            "n_blocks": self.n_blocks,
            "block_bytes": self.block_bytes,
            **{k: v for k, v in self.latency.to_dict().items() if k != "n"},
            "echo_p50_us": self.echo.p50_us,
            "echo_ratio": self.echo_ratio,
            "grpc_ratio": self.grpc_ratio,
            "kv_bytes": self.kv_bytes,
            "copy_us": self.copy_us,
        }


def measure_lookups(client: Client, options: LookupOptions, limits: Limits) -> list[LookupRow]:
    """Match, lease, and both after each other, for token rows and engine hashes; then lease by block size."""
    rows: list[LookupRow] = []
    with Echo() as echo:
        for kind in (RowKind.TOKENS, RowKind.HASHES):
            prefix = _Prefix(client, options, kind, options.lease_block_sizes[0])
            rows.extend(prefix.measure(echo, limits, options.lookups))
        for block_bytes in options.lease_block_sizes[1:]:
            prefix = _Prefix(client, options, RowKind.TOKENS, block_bytes)
            rows.extend(r for r in prefix.measure(echo, limits, options.lookups) if r.name == "lease")
    return rows


class _Prefix:
    """A resident prefix of one namespace."""

    def __init__(self, client: Client, options: LookupOptions, kind: RowKind, block_bytes: int) -> None:
        self._n = options.lookup_blocks
        self._kind = kind
        self._block_bytes = block_bytes
        rng = np.random.default_rng([options.seed, block_bytes])
        self._prompt: NDArray[Any] = (
            rng.integers(0, 256, (self._n, _HASH_BYTES), dtype=np.uint8)
            if kind is RowKind.HASHES
            else rng.integers(0, 1 << 32, self._n * BLOCK_TOKENS, dtype=np.uint32)
        )
        self._namespace = self._open(client, options.seed)
        part = np.zeros((1, block_bytes), dtype=np.uint8)
        for first in range(self._n):
            self._namespace.put(self._prompt, part, first_block=first)

    def _open(self, client: Client, seed: int) -> NamespaceHandle:
        return client.open(
            Namespace(
                f"bench:lookup:{seed}",
                KVSpec.opaque(BLOCK_TOKENS, self._block_bytes),
                row_kind=self._kind,
                hash_bytes=_HASH_BYTES if self._kind is RowKind.HASHES else 0,
            )
        )

    def measure(self, echo: Echo, limits: Limits, lookups: int) -> list[LookupRow]:
        """Bursts of match and of lease (which matches too, up to usable pointers) and bursts of echoes in turn.

        Bursts rather than single calls: an echo right after other work first pays for waking its server: on
        a busy machine several times the echo, which would make every lookup beside it look fast.
        """
        rounds = max(1, lookups // _BURST)
        lookup_s = np.empty((rounds, _BURST, 2))
        echo_s = np.empty((rounds, _BURST))
        for index in range(rounds):
            lookup_s[index] = _burst(lambda: (self._match_s(), self._lease_s()))
            echo_s[index] = _burst(lambda: timed_s(echo.round_trip))
        match, lease, echoes = lookup_s[..., 0].ravel(), lookup_s[..., 1].ravel(), echo_s.ravel()
        return [self._row(name, seconds, echoes, limits) for name, seconds in (("match", match), ("lease", lease))]

    def _match_s(self) -> float:
        start = time.perf_counter()
        found = self._namespace.match(self._prompt)
        seconds = time.perf_counter() - start
        self._must_be_whole(found.n_blocks)
        return seconds

    def _lease_s(self) -> float:
        """From the call to pointers that can be used; the release is not part of it."""
        start = time.perf_counter()
        lease = self._namespace.lease(self._prompt)
        addresses = lease.addresses
        seconds = time.perf_counter() - start
        lease.release()
        self._must_be_whole(len(addresses))
        return seconds

    def _must_be_whole(self, n_blocks: int) -> None:
        if n_blocks != self._n:
            raise BadInputError(f"{n_blocks} of {self._n} blocks are resident; give the daemon more DRAM")

    def _row(self, name: str, seconds: NDArray[np.float64], echoes: NDArray[np.float64], limits: Limits) -> LookupRow:
        latency, echo = Latency.from_seconds(seconds), Latency.from_seconds(echoes)
        grpc = limits.grpc_aio_echo
        kv_bytes = self._n * self._block_bytes
        return LookupRow(
            name=name,
            rows=self._kind.value,
            n_blocks=self._n,
            block_bytes=self._block_bytes,
            latency=latency,
            echo=echo,
            echo_ratio=latency.p50_us / echo.p50_us,
            grpc_ratio=latency.p50_us / grpc.p50_us if grpc else None,
            kv_bytes=kv_bytes,
            copy_us=kv_bytes / limits.copy_1_thread_gb_per_s / 1e3,
        )


def _burst(call: Callable[[], T]) -> list[T]:
    """What a burst of calls returned, without the first few, which wake everybody up."""
    return [call() for _ in range(_WARM_UP + _BURST)][_WARM_UP:]
