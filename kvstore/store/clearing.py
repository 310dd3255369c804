"""Clearing: blocks of whole namespaces stop being found at once, then leave every tier a few at a time.

    found -> hidden -> gone        hidden: out of the index, so that requests miss; copies are still there
                                   gone: nobody uses the block, and no tier has a copy

A crash on the way leaves those blocks to be found again whose names are still on NVMe. ``is_durable`` says when
there are none. Names go in transactions of a bounded size, so that none of them takes long.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from kvstore.jobs import Job, Jobs, Lane
from kvstore.metrics import Counters
from kvstore.prefix_index.block_table import DRAM, NVME, Ids
from kvstore.prefix_index.hiding import Hidden
from kvstore.prefix_index.index import PrefixIndex
from kvstore.store.hierarchy import Hierarchy
from kvstore.store.namespaces import Namespaces
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme.cleared import MarkJob
from kvstore.tiers.nvme.tier import FrameState

SCAN_BLOCKS, DROP_BLOCKS = 4096, 128
"""A step looks at so many blocks, and takes so many away: some tenths of a millisecond."""
STEPS_PER_TICK = 4
NAMES_MAX = 8192
"""Names on NVMe that may wait for their transaction before more are added."""


class Stage(StrEnum):
    """How far names on NVMe are. DROPPING: hidden blocks may have copies there. SETTLING: some may be just being
    written. UNNAMING: the names of all are about to go. DURABLE: they are gone."""

    DROPPING = "dropping"
    SETTLING = "settling"
    UNNAMING = "unnaming"
    DURABLE = "durable"


class LastClear(NamedTuple):
    """When a namespace was cleared last, by the clock, and how many blocks it had."""

    at_s: float
    n_blocks: int


class Clearing:
    """What is to go, and how far it has gone. Called on the store's thread only."""

    def __init__(
        self,
        index: PrefixIndex,
        dram: DramTier,
        hierarchy: Hierarchy | None,
        namespaces: Namespaces,
        jobs: Jobs,
        counters: Counters,
    ) -> None:
        self._index = index
        self._namespaces = namespaces
        self._jobs = jobs
        self._to_mark: set[bytes] = set()
        """Namespaces whose frames a rebuilt catalog would still find."""
        self._marking: MarkJob | None = None
        self._dram = dram
        self._hierarchy = hierarchy
        self._counters = counters
        self._stage = Stage.DURABLE
        self._at = 0
        """Where the present pass over the block table is; hidden blocks that are in use wait for the next one."""
        self._n_dropped = 0
        """Copies that this pass has taken."""
        self._n_kept = 0
        """Copies on NVMe that this pass has left, as too many names were waiting."""
        self._n_named = 0
        self._dying = np.empty(0, np.int64)

    def begin(self, namespaces: Collection[int]) -> dict[int, Hidden]:
        """Hide the blocks of these namespaces (numbers of the block table); says how many, and where they were.

        Looks at every block once, with vectors. ``step`` takes them away.
        """
        hidden = self._index.hiding.hide(namespaces)
        self._counters.add("cleared_blocks", sum(each.n_blocks for each in hidden.values()))
        if self._hierarchy is not None:
            self._n_named += sum(each.n_nvme_blocks for each in hidden.values())
            self._stage = Stage.DROPPING
            self._to_mark |= {self._namespaces.digest(namespace) for namespace in namespaces}
            self._mark()
        self._begin_pass()
        return hidden

    @property
    def n_left_blocks(self) -> int:
        """Blocks that are hidden and still there: in use, or about to go."""
        return self._index.n_hidden_blocks

    @property
    def n_left_names(self) -> int:
        """About how many names of hidden blocks are still on NVMe; 0 exactly when none is: when it is durable."""
        return 0 if self.is_durable else max(self._n_named + len(self._dying), 1)

    @property
    def is_durable(self) -> bool:
        """Whether no crash can bring a hidden block back."""
        return self._stage is Stage.DURABLE

    def tick(self) -> None:
        """Go on, a little; call it often."""
        self._mark()
        for _ in range(STEPS_PER_TICK):
            if not self.step():
                return

    def step(self) -> bool:
        """A bounded part of what is to be done; False when no more can be done before something else has happened."""
        index, n_used = self._index, self._index.table.n_used
        if not index.n_hidden_blocks:
            self._n_kept = 0
            self._advance()
            return False
        if self._at >= n_used:
            self._advance()
            progress = self._n_dropped > 0
            self._begin_pass()
            return progress
        if not self._drop(self._at, min(self._at + SCAN_BLOCKS, n_used)):
            self._at += SCAN_BLOCKS
        return True

    def _mark(self) -> None:
        """Have frames marked as cleared, if any are to be and it can be written."""
        hierarchy = self._hierarchy
        if not self._to_mark or self._marking is not None or hierarchy is None or not hierarchy.nvme.may_write:
            return
        digests, self._to_mark = self._to_mark, set()
        job = self._marking = hierarchy.nvme.begin_mark(digests)
        self._jobs.append(Job(Lane.CATALOG, job.run, lambda: self._marked(job, digests)))

    def _marked(self, job: MarkJob, digests: set[bytes]) -> None:
        self._marking = None
        if self._hierarchy is not None and not self._hierarchy.nvme.finish_mark(job):
            self._to_mark |= digests  # tried again as soon as anything may be written
        self._mark()

    def _begin_pass(self) -> None:
        self._at = self._n_dropped = self._n_kept = 0

    def _drop(self, first: int, end: int) -> bool:
        """Take what can be taken at once among the blocks with these ids; False if nothing can."""
        index = self._index
        unnamed = self._unname(index.hiding.hidden(first, end))
        n_removed, lost = index.hiding.remove(first, end, DROP_BLOCKS)
        self._dram.free(lost.slots)
        self._n_dropped += unnamed + n_removed
        if n_removed or unnamed:
            return True
        # Whoever reads what is left goes on reading it; a later daemon must not find it.
        left = index.hiding.hidden(first, end)
        self._dram.withdraw(index.slots(left[index.resident(left, DRAM)]))
        return False

    def _unname(self, ids: Ids) -> int:
        """Hidden blocks lose their copies on NVMe, some at a time; returns how many."""
        index, hierarchy = self._index, self._hierarchy
        if hierarchy is None:
            return 0
        named = ids[index.resident(ids, NVME)]
        n = min(DROP_BLOCKS, max(NAMES_MAX - hierarchy.nvme.n_names_to_remove, 0))
        lost = index.hiding.lose_nvme(named[:n])
        if len(lost.slots):
            hierarchy.nvme.free(lost.slots, soon=True)
            hierarchy.offloader.has_work = True  # it has names removed
            self._n_named = max(self._n_named - len(lost.slots), 0)
        else:
            self._n_kept += len(named)
        return len(lost.slots)

    def _advance(self) -> None:
        """At the end of a pass over all blocks, or when none is left."""
        hierarchy = self._hierarchy
        if hierarchy is None or self._stage is Stage.DURABLE:
            return
        if self._stage is Stage.DROPPING and not self._n_kept:
            self._stage, self._n_named = Stage.SETTLING, 0
        settled = not (hierarchy.offloader.writes_hidden or self._to_mark or self._marking)
        if self._stage is Stage.SETTLING and settled:
            self._stage, self._dying = Stage.UNNAMING, hierarchy.nvme.dying()
        if self._stage is Stage.UNNAMING:
            self._dying = self._dying[hierarchy.nvme.states(self._dying) != FrameState.FREE]
            if not len(self._dying):
                self._stage = Stage.DURABLE
