"""The lives of blocks on NVMe: from the daemon's clock, which is another after each start, to Unix time and back.

A name on disk says until when its block may be found. A life that gets longer in use would have it written with each
request; so it is renewed when it says less than half of what is left. A crash can make a life shorter by that, never
longer. One without end is renewed at once. Until a name that is to be changed has been, its block isn't durable.

Lives follow the wall clock of the machine: where that is set back, what lies on disk lives longer by as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.hints import TTL_S_MAX
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
        self._awaited: set[int] = set()

    def until_s(self, ids: At) -> NDArray[np.float64]:
        """Until when each of the blocks may be found: Unix time, inf for no end."""
        return self._index.hints.expire_s(ids) + self._ahead_s()

    def found(self, ids: Ids, until_s: NDArray[np.float64]) -> None:
        """Blocks were found on disk that may be found until then; see ``until_s``.

        None lives longer than a request can ask for, whatever has become of the wall clock.
        """
        most_s = self._unix_s() + TTL_S_MAX
        until_s = np.where(np.isfinite(until_s), np.minimum(until_s, most_s), np.inf)
        self._index.hints.found(ids, until_s - self._ahead_s())

    def renew(self, ids: Ids | None = None) -> None:
        """Have longer lives written where that is due: of these blocks, or of all that live longer than before."""
        at = self._index.hints.take_moved() if ids is None else ids.astype(np.intp)
        at = at[self._index.resident(at, NVME)]
        if self._index.hints.has_ttl and len(at):
            at = at[self._is_due(at)]
            self._nvme.live_until(self._index.table.nvme_slot[at], self.until_s(at))

    def is_late(self, ids: At) -> NDArray[np.bool_]:
        """Which blocks lie on NVMe under a name that is still to say a longer life; bool [n].

        Not those for which ``renew`` leaves it at the shorter one.
        """
        if not self._index.hints.has_ttl:
            return np.zeros(len(ids), np.bool_)
        late = self._index.resident(ids, NVME)
        at = ids[late].astype(np.intp)
        due = self._index.hints.has_moved(at) & self._is_due(at)
        late[late] = due | self._nvme.is_changing(self._index.table.nvme_slot[at])
        return late

    def await_names(self, ids: Ids) -> list[int]:
        """As ``renew``; returns those that ``is_late`` names then. ``take_said`` gives each of them once."""
        self.renew(ids)
        late: list[int] = ids[self.is_late(ids)].tolist()
        self._awaited.update(late)
        return late

    def take_said(self, *, given_up: bool) -> list[int]:
        """Awaited blocks that are late no more; all of them if they are given up."""
        if not self._awaited:
            return []
        ids = np.array(list(self._awaited), np.uint32)
        late = self.is_late(ids) & (not given_up)
        self._awaited = set(ids[late].tolist())
        said: list[int] = ids[~late].tolist()
        return said

    def _is_due(self, at: At) -> NDArray[np.bool_]:
        """Of blocks on NVMe: whose name says less than half of what is left."""
        now_s, said_s = self._unix_s(), self._nvme.until_s(self._index.table.nvme_slot[at])
        due: NDArray[np.bool_] = np.isfinite(said_s) & (self.until_s(at) - now_s > 2 * np.maximum(said_s - now_s, 0))
        return due

    def _ahead_s(self) -> float:
        return self._unix_s() - self._clock.now_s()
