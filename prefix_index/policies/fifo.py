"""First in, first out."""

from __future__ import annotations

import math

from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.policies.sequenced import SequencedPolicy
from kvstore.prefix_index.policy import Use


class FifoPolicy(SequencedPolicy):
    """What came into the tier first goes first; of what came together the tail of the path.

    An access changes nothing, unless the block was demoted: then it counts as just come.
    """

    name = "fifo"

    def accessed(self, ids: At, use: Use) -> float:  # noqa: ARG002 - an access changes nothing
        lowest = math.inf
        for tier in self.tiers:
            ranks = self.table.ranks(tier)
            back = ids[ranks[ids] < 0]
            if len(back):
                ranks[back] = self.take(len(back))
                lowest = -math.inf
        return lowest

    def inserted(self, ids: At, use: Use) -> None:  # noqa: ARG002 - only the order counts
        self.set_ranks(ids, self.take(len(ids)))

    def entered(self, ids: At, tier: int) -> None:
        self.table.ranks(tier)[ids] = self.take(len(ids))
