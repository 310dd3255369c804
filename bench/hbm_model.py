"""What an HBM tier holds in a simulation: copies of blocks in DRAM that were used often, as a daemon makes them."""

from __future__ import annotations

import numpy as np

from kvstore.prefix_index.above import Above
from kvstore.prefix_index.block_table import DRAM, At
from kvstore.prefix_index.index import PrefixIndex

HBM_SHARE, DRAM_SHARE = 4, 8
"""Of the tiers, such parts are promoted at a time: see ``kvstore.promote.Promotion``."""


class HbmModel:
    """Room for ``n_blocks`` copies over an index that has such a tier. Copying takes no time."""

    def __init__(self, index: PrefixIndex, above: Above, n_blocks: int, hits: int, dram_blocks: int | None) -> None:
        """``dram_blocks``: None for as many as there are."""
        self._index = index
        self._above = above
        self._n_blocks = n_blocks
        self._hits = hits
        self._most = max(min(n_blocks // HBM_SHARE, (dram_blocks or n_blocks * DRAM_SHARE) // DRAM_SHARE), 1)
        self._next_slot = 0

    def used(self, ids: At) -> None:
        """Blocks of a path were used, and that has been counted: those of them in DRAM may be promoted."""
        index, above = self._index, self._above
        wanted = ids[index.resident(ids, DRAM) & above.may_join(ids) & (index.table.hits[ids] >= self._hits)]
        new = wanted[: self._most].astype(np.uint32)
        if not len(new):
            return
        index.pin(ids)  # whoever uses them reads them still
        short = above.n + len(new) - self._n_blocks
        if short > 0:
            above.evict(short)
        new = new[: self._n_blocks - above.n]
        self._next_slot += len(new)
        above.add(new, np.arange(self._next_slot - len(new), self._next_slot, dtype=np.int64))
        index.unpin(ids)
