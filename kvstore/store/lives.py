"""The lives of blocks on NVMe: from the daemon's clock, which is another after each start, to Unix time and back.

A name on disk says until when its block may be found. A life that gets longer in use would have it written with each
request; so it is renewed when it says less than half of what is left. A crash can make a life shorter by that, never
longer. One without end is renewed at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.prefix_index.block_table import NVME, At, Ids
from kvstore.prefix_index.index import PrefixIndex
from kvstore.tiers.nvme.tier import NvmeTier


class Lives:
    """Keeps what NVMe says of the lives of blocks in step with the index. On the store's thread; nothing blocks."""

    def __init__(
        self, index: PrefixIndex, nvme: NvmeTier, clock: Clock, unix_s: Callable[[], float] = time.time
    ) -> None:
        """``unix_s`` gives the Unix time."""
        self._index = index
        self._nvme = nvme
        self._clock = clock
        self._unix_s = unix_s

    def until_s(self, ids: At) -> NDArray[np.float64]:
        """Until when each of the blocks may be found: Unix time, inf for no end."""
        return self._index.hints.expire_s(ids) + self._ahead_s()

    def found(self, ids: Ids, until_s: NDArray[np.float64]) -> None:
        """Blocks were found on disk that may be found until then; see ``until_s``."""
        self._index.hints.found(ids, until_s - self._ahead_s())

    def renew(self) -> None:
        """Have longer lives written where that is due."""
        moved = self._index.hints.take_moved()
        moved = moved[self._index.resident(moved, NVME)]
        if not len(moved):
            return
        slots, until_s, now_s = self._index.table.nvme_slot[moved], self.until_s(moved), self._unix_s()
        said_s = self._nvme.until_s(slots)
        due = np.isfinite(said_s) & (until_s - now_s > 2 * np.maximum(said_s - now_s, 0))
        self._nvme.live_until(slots[due], until_s[due])

    def _ahead_s(self) -> float:
        return self._unix_s() - self._clock.now_s()
