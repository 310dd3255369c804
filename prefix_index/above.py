"""Copies in HBM, above the tiers that blocks live in.

Each is of a block that lies in DRAM or on NVMe, too. So to give one up moves no byte, waits for nothing and loses
nothing, and in the step in which a block loses its last copy below it loses that in HBM: nobody finds it any more.
Of a block that is in use then, the slot is held back until it is not.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.prefix_index.block_table import FREE, HBM, NO_PARENT, At, BlockTable, Ids
from kvstore.prefix_index.copies import Copies, Loss
from kvstore.prefix_index.fair_order import FairOrder
from kvstore.prefix_index.policy import EvictionPolicy
from kvstore.prefix_index.shares import Standing
from kvstore.prefix_index.tenants import Asker
from kvstore.prefix_index.tree import as_ids

Slots = NDArray[np.int64]


class Places(Protocol):
    """Who owns the slots in HBM. Told in the step in which copies go."""

    def free(self, slots: Slots) -> None:
        """Nobody uses what lies there; the slots may be handed out again."""
        ...

    def quarantine(self, slots: Slots) -> None:
        """No block is found there any more, but readers may still look at them; ``free`` follows."""
        ...


class Nowhere:
    """Nobody wants to know."""

    def free(self, slots: Slots) -> None:
        pass

    def quarantine(self, slots: Slots) -> None:
        pass


class Above:
    """The copies in HBM of one table's blocks, and the order in which they go: a path's tail first."""

    def __init__(self, table: BlockTable, policy: EvictionPolicy, copies: Copies) -> None:
        self._table = table
        self._policy = policy
        self._copies = copies
        self._order = FairOrder(table, policy.of(HBM), copies.tenants, HBM)
        self._held: dict[int, list[int]] = {}
        self.places: Places = Nowhere()
        self.n = 0
        """Copies."""

    @property
    def n_held(self) -> int:
        """Slots of copies that are gone, held back as their blocks are still in use."""
        return sum(map(len, self._held.values()))

    def slots(self, ids: At) -> Slots:
        """Where the copies of these blocks lie, -1 where there is none; a copy."""
        return self._table.hbm_slot[ids.astype(np.intp, copy=False)]

    def may_join(self, ids: At) -> NDArray[np.bool_]:
        """Which of these blocks have a copy below and none here."""
        mask: NDArray[np.bool_] = (self._table.residency[ids] != 0) & (self._table.hbm_slot[ids] < 0)
        return mask

    def add(self, ids: Ids, slots: Slots) -> None:
        """These blocks (distinct) are in HBM now too. Raises IntegrityError, and changes nothing, where ``may_join``
        is False."""
        table, at = self._table, ids.astype(np.intp)
        refused = ~self.may_join(at)
        if refused.any():
            raise IntegrityError(f"block {ids[refused][0]} is in HBM already, or in no tier below: ask may_join first")
        table.hbm_slot[at] = slots
        parents = table.parent[at]
        np.add.at(table.n_hbm_children, parents[parents != NO_PARENT], 1)
        self.n += len(at)
        self._policy.entered(at, HBM)
        self._copies.tenants.gained(at, HBM)
        self._order.changed(at)
        if self._copies.witness is not None and len(at):
            self._copies.witness.gained(at, HBM, first=np.zeros(len(at), np.bool_))

    def evict(
        self,
        n: int,
        asker: Asker | None = None,
        of: Sequence[int] | None = None,
        worth: Callable[[int], int] | None = None,
        most_passed: int = 0,
    ) -> Ids:
        """Drop the copies that are to go first, until their slots are worth ``n``; returns whose they were.

        ``worth(slot)`` says what each counts, 1 if not given; one that counts nothing is passed over and stays, and
        after ``most_passed`` of them it ends. Never a pinned block's. See ``FairOrder.begin`` for ``asker`` and ``of``.
        """
        table, order = self._table, self._order
        order.begin(asker, of)
        out, slots = array("I"), array("q")
        gained = n_passed = 0
        while gained < n and n_passed <= most_passed and (block := order.pop()) >= 0:
            slot = int(table.hbm_slot[block])
            value = worth(slot) if worth is not None else 1
            if value <= 0:
                n_passed += 1
                order.pass_over(block)
                continue
            gained += value
            out.append(block)
            slots.append(slot)
            table.hbm_slot[block] = -1
            parent = int(table.parent[block])
            if parent != NO_PARENT:
                left = int(table.n_hbm_children[parent]) - 1
                table.n_hbm_children[parent] = left
                if left == 0:
                    order.became_leaf(parent)
        order.take_back()
        ids = as_ids(out)
        if len(ids):
            self._copies.tenants.evicted(ids.astype(np.intp), HBM, asker)
            self._gone(ids.astype(np.intp), np.array(slots, np.int64), Loss.EVICTED)
        return ids

    def drop(self, at: At, reason: Loss = Loss.EVICTED) -> None:
        """The copies of these blocks go, if there are any, pinned or not."""
        table = self._table
        at = at.astype(np.intp, copy=False)
        at = at[table.hbm_slot[at] >= 0]
        if not len(at):
            return
        slots = table.hbm_slot[at]
        table.hbm_slot[at] = -1
        parents = table.parent[at]
        parents = parents[parents != NO_PARENT].astype(np.intp)
        np.subtract.at(table.n_hbm_children, parents, 1)
        self._copies.tenants.lost(at, HBM)
        self._gone(at, slots, reason)
        self._order.changed(parents)

    def standing(self, asker: Asker) -> Standing:
        """What the asker will have of HBM beside its share."""
        return self._order.standing(asker)

    def changed(self, at: At, lowest_rank: float = -np.inf) -> None:
        """See ``Evictor.changed``."""
        self._order.changed(at, lowest_rank)

    def unpinned(self, at: At) -> None:
        """Blocks have one pin less: what is held back for those that have none left is free."""
        if self._held:
            done = [block for block in at[self._table.refs[at] == 0].tolist() if block in self._held]
            for block in done:
                self.places.free(np.array(self._held.pop(block), np.int64))

    def _gone(self, at: At, slots: Slots, reason: Loss) -> None:
        """Copies are out of the table: tell everybody, and see to their slots."""
        self.n -= len(at)
        self._policy.left(at, HBM)
        if self._copies.witness is not None:
            self._copies.witness.lost(at, HBM, reason, np.zeros(len(at), np.bool_))
        in_use = self._table.refs[at] > 0
        for block, slot in zip(at[in_use].tolist(), slots[in_use].tolist(), strict=True):
            self._held.setdefault(block, []).append(slot)
        if in_use.any():
            self.places.quarantine(slots[in_use])
        self.places.free(slots[~in_use])

    def held_slots(self) -> Slots:
        """The slots that are held back."""
        return np.array([slot for slots in self._held.values() for slot in slots], np.int64)

    def check(self) -> None:
        """Raises IntegrityError that names what does not hold. Looks at the whole table."""
        table = self._table
        used = slice(table.n_used)
        here = np.flatnonzero(table.hbm_slot[used] >= 0)
        if len(here) != self.n:
            raise IntegrityError(f"{len(here)} blocks have a copy in HBM, {self.n} are counted")
        lost = here[(table.residency[here] == 0) | (table.state[here] == FREE)]
        if len(lost):
            raise IntegrityError(f"block {lost[0]} has a copy in HBM and none below")
        slots = np.concatenate((table.hbm_slot[here], self.held_slots()))
        if len(np.unique(slots)) != len(slots):
            raise IntegrityError("two copies in HBM have the same slot")
        parents = table.parent[here]
        n_children = np.bincount(parents[parents != NO_PARENT], minlength=table.n_used)
        if not np.array_equal(n_children[: table.n_used], table.n_hbm_children[used]):
            raise IntegrityError("the children that blocks have in HBM are counted wrong")
        if not all(table.refs[block] > 0 for block in self._held):
            raise IntegrityError("a slot in HBM is held back for a block that nobody uses")
        self._order.check()
