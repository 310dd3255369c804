"""Which blocks are worth a place in a tier that is full: those not clearly worth less than what goes first for them.

What is kept out is gone with its copy in DRAM, however long the tier would have kept it, and ranks are guesses. So a
newcomer has to be worth less than the first to go, by a margin that the policy says.
"""

from __future__ import annotations

from kvstore.prefix_index.block_table import Ids
from kvstore.prefix_index.index import PrefixIndex


def outlasting(index: PrefixIndex, ids: Ids, n_short: int, tier: int) -> Ids:
    """Of blocks that are to get copies in a tier, which lacks ``n_short`` places for them, those worth one.

    All of them where it lacks none, or the policy never takes newcomers for worth less than what is there
    (``weighs``). Changes nothing.
    """
    policy = index.policy.of(tier)
    if n_short <= 0 or not len(ids) or not policy.weighs:
        return ids
    first = index.coldest(1, tier)
    if not len(first):
        return ids
    return ids[index.rank(ids, tier) + policy.margin >= index.rank(first, tier)]
