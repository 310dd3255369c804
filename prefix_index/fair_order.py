"""The order of eviction from a tier that several tenants share: who has more than is due to it gives first.

Among the blocks of those that are asked (see ``shares``) the policy's order holds. Each tenant has an order of its own,
so that it costs nothing when somebody crosses the line between the two. Where one tenant has the tier for itself, there
is one order, that of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush

import numpy as np

from kvstore.prefix_index.block_table import DRAM, At, BlockTable, Ids
from kvstore.prefix_index.evictor import Evictor
from kvstore.prefix_index.policy import EvictionPolicy
from kvstore.prefix_index.shares import ASKED_MAX, Round, Standing
from kvstore.prefix_index.tenants import Asker, Tenants, pages


class FairOrder:
    """Like an ``Evictor``, to which ``begin`` says for whose sake copies go. Tell it of every change."""

    def __init__(self, table: BlockTable, policy: EvictionPolicy, tenants: Tenants, tier: int = DRAM) -> None:
        self._table = table
        self._policy = policy
        self._tenants = tenants
        self._tier = tier
        self._whole = Evictor(table, policy, tier)
        self._each: dict[int, Evictor] = {}
        self._version = tenants.version
        self._passed: set[int] = set()
        self._shared = False
        self._ahead = False
        self._round: Round | None = None
        self._asker: Asker | None = None
        self._asked: list[int] = []
        self._is_last_resort = False
        self._went = True
        self._heads: list[tuple[float, int, int]] = []
        self._of = -1
        """Whose block came from ``pop`` last."""

    @property
    def is_shared(self) -> bool:
        """Whether it is among the blocks of several tenants since ``begin``, or of some only."""
        return self._shared

    # Changes -------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what is known of the order; the next question looks again."""
        self._whole.forget()
        self._each.clear()

    def changed(self, at: At, lowest_rank: float = -math.inf) -> None:
        """See ``Evictor.changed``."""
        self._whole.changed(at, lowest_rank)
        if not self._each or not len(at):
            return
        owners = self._tenants.owners(at)
        first = int(owners[0])
        if (owners == first).all():
            if (own := self._each.get(first)) is not None:
                own.changed(at, lowest_rank)
            return
        for tenant in np.unique(owners).tolist():
            if (own := self._each.get(tenant)) is not None:
                own.changed(at[owners == tenant], lowest_rank)

    def became_leaf(self, block: int) -> None:
        """See ``Evictor.became_leaf``."""
        self._whole.became_leaf(block)
        if self._each and (own := self._each.get(self._owner(block))) is not None:
            own.became_leaf(block)

    # Order ---------------------------------------------------------------------------------------

    def begin(self, asker: Asker | None = None, of: Sequence[int] | None = None, *, ahead: bool = False) -> None:
        """Copies are to go for the asker's sake. ``of``: those of these tenants only, whatever they have.

        ``ahead``: nothing goes yet, what is passed over counts as gone.
        """
        tenants = self._tenants
        if self._version != tenants.version:
            self._version = tenants.version
            self._each.clear()
        self._shared = of is not None or self._matters(asker)
        self._ahead = ahead
        if not self._shared:
            self._each.clear()
            return
        self._whole.forget()
        self._asker = asker
        self._is_last_resort = False
        self._round = Round(tenants, self._tier, asker) if of is None else None
        self._ask(self._round.asked if self._round is not None else list(of or ()))

    def standing(self, asker: Asker) -> Standing:
        """How much the asker will have beside what is due to it."""
        if not self._matters(asker):
            return Standing.OVER
        return Round(self._tenants, self._tier, asker).standing(asker.tenant)

    def pop(self) -> int:
        """The evictable leaf to go first, or -1. Before asking again the caller evicts it or passes it over."""
        if not self._shared:
            return self._whole.pop()
        self._put_head(self._of)
        if self._is_last_resort and self._went:
            self._asked = []  # that may have put somebody above what is due to it
        self._went = True
        while True:
            tenant = self._next()
            if tenant < 0:
                if not self._ask_again():
                    return -1
                continue
            block = self._order_of(tenant).pop()
            if block < 0:
                self._has_nothing(tenant)
                continue
            self._of = tenant
            if self._round is not None:
                self._round.gives(tenant, self._bytes_of(block))
            return block

    def run(self, ids: Ids) -> int:
        """See ``Evictor.run``."""
        if not self._shared:
            return self._whole.run(ids)
        n = self._order_of(self._of).run(ids)
        if n > 1 and self._heads:
            behind = np.flatnonzero(self._table.ranks(self._tier)[ids[1:n]] >= self._heads[0][0])
            n = 1 + int(behind[0]) if len(behind) else n
        if n > 1 and self._round is not None:
            after = np.cumsum(pages(self._table.size_bytes[ids[1:n]]))
            if self._of in self._round.asked:
                left = self._round.excess_bytes(self._of)
                n = 1 + int(np.count_nonzero(np.concatenate(((0,), after[:-1])) < left))
            else:
                n = 1  # what goes as nobody has more than is due to it: asked block by block
            if n > 1:
                self._round.gives(self._of, int(after[n - 2]))
        return n

    def pass_over(self, block: int) -> None:
        """See ``Evictor.pass_over``."""
        if not self._shared:
            self._whole.pass_over(block)
            return
        self._went = self._ahead
        self._order_of(self._of).pass_over(block)
        self._passed.add(self._of)
        if self._round is not None and not self._ahead:
            self._round.gives(self._of, -self._bytes_of(block))

    def take_back(self) -> None:
        """See ``Evictor.take_back``."""
        if not self._shared:
            self._whole.take_back()
        for tenant in self._passed:
            self._order_of(tenant).take_back()
        self._passed.clear()

    def check(self) -> None:
        """See ``Evictor.check``."""
        each = self._each.values() if self._version == self._tenants.version else ()
        for order in (self._whole, *each):
            order.check()

    # Own -----------------------------------------------------------------------------------------

    def _matters(self, asker: Asker | None) -> bool:
        """Whether there is more than one tenant to choose among."""
        tenants = self._tenants
        alone = tenants.n_present[self._tier] <= 1
        return tenants.is_fair and not (alone and (asker is None or tenants.used_bytes[self._tier, asker.tenant] > 0))

    def _ask(self, tenants: list[int]) -> None:
        """The next blocks are of these."""
        self._asked = tenants
        self._heads = []
        self._of = -1
        if len(tenants) > 1:
            for tenant in tenants:
                self._put_head(tenant)

    def _put_head(self, tenant: int) -> None:
        """What the tenant would give next stands among what the others would."""
        if tenant < 0 or len(self._asked) < 2:
            return
        head = self._order_of(tenant).first()
        if head is None:
            self._has_nothing(tenant)
        else:
            heappush(self._heads, (*head, tenant))
        self._of = -1

    def _next(self) -> int:
        """Who gives next of those that are asked, or -1."""
        if len(self._asked) == 1:
            tenant = self._asked[0]
            return tenant if self._gives(tenant) else -1
        while self._asked and self._heads:
            tenant = heappop(self._heads)[2]
            if self._gives(tenant):
                return tenant
        return -1

    def _gives(self, tenant: int) -> bool:
        if self._round is None:
            return True
        return tenant not in self._round.asked or self._round.is_over(tenant)

    def _has_nothing(self, tenant: int) -> None:
        if self._round is not None:
            self._round.leave_out(tenant)
        self._asked = [each for each in self._asked if each != tenant]
        self._heads = [head for head in self._heads if head[2] != tenant and len(self._asked) > 1]
        heapify(self._heads)

    def _ask_again(self) -> bool:
        """Reckon anew who is to give; False if nobody has anything for this asker."""
        if self._round is None:
            return False
        self._round.begin()
        asked = self._round.asked
        self._is_last_resort = not asked
        if not asked:
            # Nobody has more than is due to it, or nobody that has may give anything: the asker's own, no other's.
            asked = self._round.others(self._asker)[:ASKED_MAX]
        self._ask(asked)
        return bool(asked)

    def _order_of(self, tenant: int) -> Evictor:
        order = self._each.get(tenant)
        if order is None:
            order = self._each[tenant] = Evictor(
                self._table, self._policy, self._tier, partial(self._tenants.is_of, tenant)
            )
        return order

    def _owner(self, block: int) -> int:
        return self._tenants.owner(int(self._table.namespace[block]))

    def _bytes_of(self, block: int) -> int:
        return int(pages(self._table.size_bytes[block : block + 1])[0])
