"""A store inside the program beside a daemon behind its Unix socket: the same calls of the same blocks, in turn.

Both have sockets between the store and its caller, and the store on a thread or in a process of its own; inside the
program the two share Python's lock. A ratio is the median over pairs of bursts of their medians. What is read is
compared after the timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import embedded
from kvstore.bench.bandwidth_row import KIB, MIB
from kvstore.bench.measure import paired, timed_s
from kvstore.client import Client
from kvstore.errors import BadInputError, IntegrityError
from kvstore.types import KVSpec, Namespace

BLOCK_TOKENS = 16
TIMEOUT_S = 30.0
DRAM_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class EmbeddedBenchOptions:
    """A prompt of ``n_blocks`` blocks; bursts of ``calls`` calls each, ``pairs`` of them."""

    pairs: int = 40
    calls: int = 50
    n_blocks: int = 16
    block_bytes: int = 16 * KIB
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("pairs", "calls", "n_blocks", "block_bytes"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.n_blocks * self.block_bytes > DRAM_BYTES // 4:
            raise BadInputError(f"{self.n_blocks} blocks of {self.block_bytes} bytes are too many: give smaller ones")


def run(options: EmbeddedBenchOptions, socket_path: Path) -> dict[str, float]:
    """Figures by name: of each call the median times and their ratio, embedded to socket. Blocks for some seconds.

    Raises UnavailableError if no daemon is at ``socket_path``, IntegrityError for wrong bytes.
    """
    figures: dict[str, float] = {"pairs": options.pairs}
    with Client(socket_path, timeout_s=TIMEOUT_S) as client, embedded.open(dram=DRAM_BYTES) as store:
        inside, behind = _Side(store, options), _Side(client, options)
        for name in inside.calls:
            inside.burst_s(name), behind.burst_s(name)  # what the first calls set up is not what is measured
            seconds = paired(options.pairs, inside.bursts(name), behind.bursts(name))
            figures[f"{name}_embedded_us"], figures[f"{name}_socket_us"] = (np.median(seconds, axis=0) * 1e6).tolist()
            figures[f"{name}_ratio"] = float(np.median(seconds[:, 0] / seconds[:, 1]))
        inside.compare()
        behind.compare()
    return figures


class _Side:
    """One of the two stores, with the blocks in it."""

    def __init__(self, store: Client, options: EmbeddedBenchOptions) -> None:
        self._n_calls = options.calls
        rng = np.random.default_rng(options.seed)
        self._tokens = rng.integers(0, 1 << 31, options.n_blocks * BLOCK_TOKENS, dtype=np.uint32)
        self._blocks = rng.integers(0, 256, (options.n_blocks, options.block_bytes), dtype=np.uint8)
        self._out = np.zeros_like(self._blocks)
        self._namespace = store.open(Namespace("bench:embedded", KVSpec.opaque(BLOCK_TOKENS, options.block_bytes)))
        self._namespace.put(self._tokens, self._blocks)
        namespace, tokens = self._namespace, self._tokens
        self.calls: dict[str, Callable[[], Any]] = {
            "match": lambda: namespace.match(tokens),
            "lease": lambda: namespace.lease(tokens).release(),
            "get_into": lambda: namespace.get_into(tokens, self._out),
        }

    def burst_s(self, name: str) -> float:
        """The median time of a burst of calls."""
        return float(np.median([timed_s(self.calls[name]) for _ in range(self._n_calls)]))

    def bursts(self, name: str) -> Callable[[int], float]:
        """``burst_s`` as ``paired`` wants it."""
        return lambda _: self.burst_s(name)

    def compare(self) -> None:
        """Raises IntegrityError unless what was read is what was stored."""
        if not np.array_equal(self._out, self._blocks):
            raise IntegrityError("blocks came back with other bytes than were stored")
