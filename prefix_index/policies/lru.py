"""Least recently used first."""

from __future__ import annotations

from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.policies.sequenced import SequencedPolicy
from kvstore.prefix_index.policy import Use


class LruPolicy(SequencedPolicy):
    """Least recently used first; of one path the tail first."""

    name = "lru"

    def accessed(self, ids: At, use: Use) -> float:  # noqa: ARG002 - only the order counts
        ranks = self.take(len(ids))
        self.set_ranks(ids, ranks)
        return float(ranks[-1]) if len(ids) else -1.0

    def inserted(self, ids: At, use: Use) -> None:
        self.accessed(ids, use)
