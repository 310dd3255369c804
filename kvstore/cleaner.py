"""Cleaning: blocks that only DRAM holds are written to NVMe before they are given up, or before the daemon ends."""

from __future__ import annotations

import numpy as np

from kvstore.metrics import Counters
from kvstore.offload import Offloader
from kvstore.prefix_index.block_table import DRAM, NVME, Ids
from kvstore.prefix_index.index import PrefixIndex

CLEAN_SHARE = 8
"""About this part of the DRAM tier is kept ready to be evicted without loss."""
CLEAN_BLOCKS_MAX = 1024


class Cleaner:
    """Chooses what to write ahead. Called on the store's thread only."""

    def __init__(self, index: PrefixIndex, offloader: Offloader, counters: Counters, dram_bytes: int) -> None:
        self._index = index
        self._offloader = offloader
        self._counters = counters
        self._clean_bytes = dram_bytes // CLEAN_SHARE
        self._looked_at = -1.0

    def clean(self) -> None:
        """Queue what DRAM would evict next, unless nothing has changed since the last time."""
        changes = self._counters["evicted_blocks"] + self._counters["committed_blocks"]
        if changes == self._looked_at or not self._offloader.has_much_room:
            return
        self._looked_at = changes
        ids = self._index.coldest(CLEAN_BLOCKS_MAX)
        ahead = np.cumsum(self._index.table.size_bytes[ids.astype(np.intp)], dtype=np.int64)
        ids = ids[: max(1, int(np.searchsorted(ahead, self._clean_bytes)))]
        self._write(ids[~self._index.resident(ids, NVME) & ~self._index.parts.is_spare(ids)])

    def drain(self) -> bool:
        """Before the end: queue what only DRAM holds, most valued first, and have names say longer lives; True once
        nothing is left to write.

        Call it again after each job. Looks at the whole table.
        """
        self._offloader.renew_lives()
        if self._offloader.suspended:
            return True
        if self._offloader.has_much_room:
            table, alive = self._index.table, self._index.table.alive()
            ids = alive[self._index.resident(alive, DRAM) & ~self._index.resident(alive, NVME)]
            ids = ids[~self._index.parts.is_spare(ids)]
            ids = ids[np.argsort(-self._index.rank(ids, NVME), kind="stable")]
            fits = np.cumsum(table.size_bytes[ids], dtype=np.int64) <= self._offloader.queue_bytes_max // 2
            self._write(ids[fits])
        return self._offloader.idle

    def _write(self, ids: Ids) -> None:
        """Offload those that the policy values more than what NVMe would have to give up for them.

        Else what was just pushed out would push out again what pushed it out.
        """
        short = self._offloader.short_of(ids)
        if short:
            first = self._index.coldest(1, NVME)
            ids = ids[self._index.rank(ids, NVME) > self._index.rank(first, NVME)] if len(first) else ids[:0]
        if len(ids):
            self._offloader.add(ids)
