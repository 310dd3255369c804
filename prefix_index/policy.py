"""Eviction policies: each gives every block a rank, and the evictable leaf of lowest rank goes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError
from kvstore.prefix_index.block_table import At, BlockTable


class EvictionPolicy(Protocol):
    """Orders blocks by vectors over their ids; keeps no object per block.

    Ranks may be anything but NaN. The one in force stands in ``table.rank``: ``accessed`` and ``inserted``
    write it there for the ids of the call, and the evictor takes those up at once. Ranks that change at
    other times (a formula over time, ranks of unrelated blocks) come into force when ``rank`` is next asked,
    for each snapshot that the evictor takes of all evictable leaves. A policy that wants them in force now
    raises ``version``: a new snapshot looks at the whole table, so do it once per many evictions.
    """

    name: str
    version: int

    def attach(self, table: BlockTable) -> None:
        """Called once, before anything else."""
        ...

    def accessed(self, ids: At, now_s: float) -> float:
        """One access of blocks of a path, first block first. Returns their lowest new rank, or -inf."""
        ...

    def inserted(self, ids: At, now_s: float) -> None:
        """These blocks are new, in path order; their access is part of being inserted."""
        ...

    def demoted(self, ids: At) -> None:
        """These blocks are to go before all others, until they are accessed again; their order is as of a path."""
        ...

    def evicted(self, ids: At) -> None:
        """These blocks are about to leave the table."""
        ...

    def rank(self, ids: At) -> NDArray[np.float64]:
        """Lower goes first. Changes nothing; the evictor writes the answer to ``table.rank``."""
        ...


class LruPolicy:
    """Least recently used first; of one path the tail first.

    Each access takes fresh ranks from a counter, the path's head the highest of them, so that all ranks
    differ and the order is total. The counter is exact up to 2**53 block accesses.
    """

    name = "lru"
    version = 0
    _table: BlockTable

    def __init__(self) -> None:
        self._next_rank = 1
        self._lowest_rank = 0

    def attach(self, table: BlockTable) -> None:
        self._table = table

    def accessed(self, ids: At, now_s: float) -> float:  # noqa: ARG002
        first = self._next_rank
        self._next_rank = first + len(ids)
        self._table.rank[ids] = np.arange(self._next_rank - 1, first - 1, -1, dtype=np.float64)
        return float(first)

    def inserted(self, ids: At, now_s: float) -> None:
        self.accessed(ids, now_s)

    def demoted(self, ids: At) -> None:
        first = self._lowest_rank - len(ids)
        self._table.rank[ids] = np.arange(self._lowest_rank - 1, first - 1, -1, dtype=np.float64)
        self._lowest_rank = first

    def evicted(self, ids: At) -> None:
        pass

    def rank(self, ids: At) -> NDArray[np.float64]:
        return self._table.rank[ids]


POLICIES: dict[str, Callable[..., EvictionPolicy]] = {"lru": LruPolicy}
"""Policies by name. To add one, put its class here."""


def make_policy(name: str, **options: Any) -> EvictionPolicy:
    """A fresh policy. Raises ConfigError for an unknown name or an option it doesn't have."""
    factory = POLICIES.get(name)
    if factory is None:
        raise ConfigError(f"policy is {name!r}; known are {', '.join(sorted(POLICIES))}", ("policy",))
    try:
        return factory(**options)
    except TypeError:
        given = ", ".join(sorted(options))
        raise ConfigError(f"policy {name!r} does not take these options: {given}") from None
