"""Policies as the literature runs them: on single blocks, one access at a time, with no regard to prefixes.

The same policies as in the index, over the same table, but each block stands for itself. A request's blocks are
accessed from the tail of its prompt to the head; one that is absent first pushes one out if there is no room. A head
that is gone makes what follows it useless until it is back, and takes up room meanwhile; a hit is the longest run of
leading blocks that is present when the request comes. That is what cache simulators give, and what published tables
of hit ratios mean.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.bench import workload as work
from kvstore.bench.simulate import HitCounts, Progress
from kvstore.bench.trace import Trace
from kvstore.errors import BadInputError, IntegrityError
from kvstore.prefix_index.block_table import DRAM, DRAM_BIT, NO_PARENT, STORED, BlockTable
from kvstore.prefix_index.evictor import Evictor
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import EvictionPolicy, Use


def simulate_textbook(
    trace: Trace,
    policy: str | EvictionPolicy,
    capacity_blocks: int,
    *,
    attention_doubling_tokens: float = 0.0,
    progress: Progress | None = None,
) -> HitCounts:
    """Hits of a policy that knows single blocks only, with room for so many."""
    told = attention_doubling_tokens
    if capacity_blocks < 1:
        raise BadInputError(f"capacity is {capacity_blocks} blocks; it must be at least 1")
    cache = _FlatCache(make_policy(policy) if isinstance(policy, str) else policy, capacity_blocks)
    counts = HitCounts()
    for index, request in enumerate(trace.requests):
        ids = work.path_ids(trace, index)
        hits = cache.n_leading(ids)
        counts.count(len(ids), hits, request.input_length, work.hit_tokens(trace, index, hits), told)
        use = Use(
            request.timestamp_s, len(ids) * trace.block_tokens,
            block_tokens=trace.block_tokens, attention_doubling_tokens=told,
        )  # fmt: skip
        for block_id in reversed(ids):
            cache.access(block_id, use)
        if progress is not None:
            progress(1)
    counts.inserted, counts.evicted = cache.n_inserted, cache.n_inserted - cache.n
    counts.dram_block_hits = counts.block_hits
    return counts


class _FlatCache:
    """A table in which no block follows another, and that never grows: who comes takes the place of who goes."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        table = self._table = BlockTable(capacity)
        table.parent[:], table.state[:], table.residency[:], table.size_bytes[:] = NO_PARENT, STORED, DRAM_BIT, 1
        self._keys = table.key.view("<u8")
        self._policy = policy
        policy.attach(table)
        self._evictor = Evictor(table, policy)
        self._capacity = capacity
        self._blocks: dict[int, int] = {}
        self.n_inserted = 0

    @property
    def n(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    def n_leading(self, ids: list[int]) -> int:
        """How many of the leading ids are present."""
        return next((n for n, block_id in enumerate(ids) if block_id not in self._blocks), len(ids))

    def access(self, block_id: int, use: Use) -> None:
        """Use it; have it, if it was absent."""
        block = self._blocks.get(block_id)
        if block is not None:
            at = np.array([block], np.intp)
            self._evictor.changed(at, self._policy.accessed(at, use))
            return
        at = self._evict() if len(self._blocks) == self._capacity else self._table.allocate(1).astype(np.intp)
        self._blocks[block_id] = int(at[0])
        self._keys[at, 0] = block_id
        self._policy.inserted(at, use)
        self._policy.entered(at, DRAM)
        self._evictor.changed(at)
        self.n_inserted += 1

    def _evict(self) -> NDArray[np.intp]:
        """The place that is free now."""
        block = self._evictor.pop()
        if block < 0:
            raise IntegrityError("a cache of single blocks has none to give up")
        at = np.array([block], np.intp)
        self._policy.left(at, DRAM)
        self._policy.evicted(at)
        self._table.generation[at] += 1
        del self._blocks[int(self._keys[block, 0])]
        return at
