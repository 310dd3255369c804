"""Which blocks are worth a place in a tier that is full: those that would not clearly be the first to go for the others.

What is left out is gone with its copy in DRAM, however long the tier would have kept it. So a newcomer must be worth
less by a margin: without one, declining cost hits on generated traffic (.004 with little room), with one it saves a sixth
to a quarter of the writes there and costs at most .001.
"""

from __future__ import annotations

import numpy as np

from kvstore.prefix_index.block_table import Ids
from kvstore.prefix_index.index import PrefixIndex


def outlasting(index: PrefixIndex, ids: Ids, n_short: int, tier: int) -> Ids:
    """Of blocks that are to get copies in a tier, those that are not among the ``n_short`` to go first with them there,
    were their ranks higher by the policy's ``margin``.

    ``ids`` are in path order; of equal ones the last go first. All of them stay where the policy never takes newcomers
    for worth less than what is there (``weighs``). Changes nothing.
    """
    policy = index.policy.of(tier)
    if n_short <= 0 or not len(ids) or not policy.weighs:
        return ids
    going = index.coldest(n_short, tier)
    tail_first = ids[::-1]
    order = np.argsort(np.concatenate((index.rank(going, tier), index.rank(tail_first, tier) + policy.margin)), kind="stable")
    stays = np.ones(len(going) + len(ids), np.bool_)
    stays[order[:n_short]] = False
    return ids[stays[len(going) :][::-1]]
