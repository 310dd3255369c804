"""Which tier holds a copy of which block: gains, counts of resident children, and what evictors are told.

Losses are the business of ``leaving``. Broken blocks, resident nowhere, are counted here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.prefix_index.block_table import (
    DRAM,
    FREE,
    HIDDEN,
    NO_PARENT,
    NVME,
    At,
    BlockTable,
    Ids,
    residency_bit,
)
from kvstore.prefix_index.fair_order import FairOrder
from kvstore.prefix_index.history import History, Left
from kvstore.prefix_index.policy import EvictionPolicy
from kvstore.prefix_index.tenants import Tenants


class Loss(StrEnum):
    """Why a copy is gone."""

    EVICTED = "evicted"
    CORRUPT = "corrupt"
    CLEARED = "cleared"
    EXPIRED = "expired"


class Witness(Protocol):
    """Who is told of every copy that comes or goes, parts of blocks too. It must change nothing."""

    def gained(self, at: At, tier: int, *, first: NDArray[np.bool_]) -> None:
        """Blocks have a copy in a tier now; ``first``: which had none anywhere before."""
        ...

    def lost(self, at: At, tier: int, reason: Loss, last: NDArray[np.bool_]) -> None:
        """Blocks have lost their copy in a tier; ``last``: which have none left. Their keys are still in the table."""
        ...


class Upper(Protocol):
    """Copies in a tier above these, of blocks that have one here; ``Above`` is one."""

    def changed(self, at: At, lowest_rank: float) -> None:
        """See ``Evictor.changed``."""
        ...

    def drop(self, at: At, reason: Loss) -> None:
        """These blocks have no copy here any more."""
        ...

    def unpinned(self, at: At) -> None:
        """These blocks have one pin less."""
        ...

    def check(self) -> None:
        """Raises IntegrityError that names what does not hold."""
        ...


class Copies:
    """The copies of all blocks in the tiers of one table that blocks live in. Ids of one call are distinct."""

    def __init__(self, table: BlockTable, policy: EvictionPolicy, tenants: Tenants) -> None:
        self._table = table
        self._policy = policy
        self.tenants = tenants
        tiers = (DRAM, NVME) if table.nvme else (DRAM,)
        self.evictors = [FairOrder(table, policy.of(tier), tenants, tier) for tier in tiers]
        self.n = [0, 0]
        """Copies per tier."""
        self.n_broken = 0
        """Blocks alive without a copy."""
        self._holes: set[int] = set()
        self.witness: Witness | None = None
        self.history: History | None = None
        """What remembers blocks that are gone."""
        self.above: Upper | None = None
        """Copies of these blocks in HBM, if there is such a tier."""

    def changed(self, at: At, lowest_rank: float = -np.inf) -> None:
        """Tell every evictor: see ``Evictor.changed``."""
        for evictor in self.evictors:
            evictor.changed(at, lowest_rank)
        if self.above is not None:
            self.above.changed(at, lowest_rank)

    def last_lost(self, at: At, reason: Loss = Loss.EVICTED) -> None:
        """These blocks have no copy in any of the tiers: they lose the one above, too."""
        if self.above is not None and len(at):
            self.above.drop(at, reason)

    def lost(self, at: At, tier: int) -> None:
        """Copies are gone otherwise than by eviction."""
        self._policy.left(at, tier)
        self.tenants.lost(at, tier)

    def gain(self, ids: At, tier: int, slots: NDArray[np.int64]) -> None:
        """Blocks get a copy. Raises IntegrityError if one has a copy there; nothing changed then."""
        table = self._table
        at = ids.astype(np.intp, copy=False)
        residency = table.residency[at]
        bit = np.uint64(residency_bit(tier))
        twice = (residency & bit) != 0
        if twice.any():
            raise IntegrityError(f"block {ids[twice][0]} has a copy in tier {tier} already")
        if table.nvme:
            self.n_broken -= int(np.count_nonzero(residency == 0))
        table.residency[at] = residency | bit
        self.slots(tier)[at] = slots
        parents = table.parent[at]
        parents = parents[parents != NO_PARENT]
        if table.nvme:
            np.add.at(self.children(tier), parents, 1)
        self.n[tier] += len(at)
        self._policy.entered(at, tier)
        self.tenants.gained(at, tier)
        self.changed(at)
        if self.witness is not None:
            self.witness.gained(at, tier, first=residency == 0)

    def slots(self, tier: int) -> NDArray[np.int64]:
        """The column of places in a tier."""
        return self._table.slot if tier == DRAM else self._table.nvme_slot

    def children(self, tier: int) -> NDArray[np.uint32]:
        """The column that counts children with a copy in a tier."""
        return self._table.n_dram_children if tier == DRAM else self._table.n_nvme_children

    def may_join_nvme(self, ids: Ids) -> NDArray[np.bool_]:
        """Which could get a copy on NVMe now, in this order: not hidden, without one, the parent with one."""
        table = self._table
        alive = (table.state[ids] != FREE) & (table.state[ids] != HIDDEN)
        there, parents = table.resident(ids, NVME), table.parent[ids]
        ready = np.zeros(len(ids), np.bool_)
        joined: set[int] = set()
        rows = zip(ids.tolist(), (alive & ~there).tolist(), parents.tolist(), strict=True)
        on_nvme = residency_bit(NVME)
        for i, (block, free, parent) in enumerate(rows):
            above = parent == NO_PARENT or parent in joined or int(table.residency[parent]) & on_nvme != 0
            if free and above and block not in joined:
                ready[i] = True
                joined.add(block)
        return ready

    def lost_nvme(self, at: At) -> None:
        """The NVMe copies of these blocks are bad: drop them, wherever in the tree they are."""
        table = self._table
        table.residency[at] &= ~np.uint64(residency_bit(NVME))
        table.nvme_slot[at] = -1
        self.n[NVME] -= len(at)
        self.lost(at, NVME)
        self.last_lost(at[table.residency[at] == 0], Loss.CORRUPT)
        self.n_broken += int(np.count_nonzero(table.residency[at] == 0))
        if self.witness is not None:
            self.witness.lost(at, NVME, Loss.CORRUPT, table.residency[at] == 0)
        if self.history:
            self.history.lost(at[table.residency[at] == 0], Left.CORRUPT, NVME)
        parents = table.parent[at]
        parents = parents[parents != NO_PARENT]
        np.subtract.at(table.n_nvme_children, parents, 1)
        self._holes.update(at[table.n_nvme_children[at] > 0].tolist())
        self.evictors[NVME].changed(parents.astype(np.intp))

    def holes(self) -> set[int]:
        """Blocks that are not on NVMe though a child of theirs is: what a broken copy leaves behind."""
        if self._holes:
            table = self._table
            at = np.fromiter(self._holes, np.intp, len(self._holes))
            known = (table.state[at] != FREE) & (table.state[at] != HIDDEN)
            is_hole = known & ~table.resident(at, NVME) & (table.n_nvme_children[at] > 0)
            self._holes = set(at[is_hole].tolist())
        return self._holes
