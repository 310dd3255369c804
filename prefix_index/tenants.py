"""Whose the blocks are, and how much each tenant has in each tier; kept up as copies come and go.

Tenants have numbers here, and so have namespaces, each of which is one tenant's. Room is counted in whole pages, as
blocks take it up in every tier.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.config.tenants import EVERYBODY, TenantOptions
from kvstore.config.units import PAGE_BYTES
from kvstore.prefix_index.block_table import DRAM, HBM, NVME, At, BlockTable

NOBODY = 0
"""The number of the tenant of blocks that nobody has described: found on disk, their namespace not yet opened."""

N_TIERS = 3

Sums = NDArray[np.int64]


class Asker(NamedTuple):
    """For whose sake room is made in a tier: a tenant's number, and how many bytes it is about to have more."""

    tenant: int
    n_bytes: int = 0
    gives_own: bool = True
    """Whether its own copies go where nobody has more than is due to it."""


class Tenants:
    """The tenants of one block table. One thread uses them; nothing here blocks."""

    def __init__(self, table: BlockTable, options: TenantOptions | None = None) -> None:
        options = options or TenantOptions()
        self.is_fair = options.shares == "fair"
        """Whether shares count."""
        self._table = table
        self._weight_of = options.weight_of()
        self._least_of, self._most_of = (
            [*(options.least(tier) for tier in ("dram", "nvme")), {}],
            [*(options.most(tier) for tier in ("dram", "nvme")), {}],
        )
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self.weights: NDArray[np.float64] = np.empty(0)
        self.used_bytes: Sums = np.zeros((N_TIERS, 0), np.int64)
        """int64 [tiers, tenants]; so are the next ones."""
        self.held_bytes: Sums = self.used_bytes
        """Of slots that are being filled."""
        self.least_bytes: Sums = self.used_bytes
        self.most_bytes: Sums = self.used_bytes
        self.n_evicted: Sums = self.used_bytes
        """Copies that went for the tenant's own sake, or for nobody's."""
        self.n_suffered: Sums = self.used_bytes
        """Its copies that went for the sake of others."""
        self.n_caused: Sums = self.used_bytes
        """Copies of others that went for its sake."""
        self.room_for_all = [0] * N_TIERS
        """How many bytes all tenants together may have in each tier; 0: as many as they have."""
        self._owners: NDArray[np.intp] = np.zeros(16, np.intp)
        self.version = 0
        """Another one after blocks have turned out to be another tenant's."""
        self.n_present = [0] * N_TIERS
        """How many tenants have a copy in each tier."""
        self.number("")

    def __len__(self) -> int:
        return len(self._names)

    @property
    def n_with_blocks(self) -> int:
        """How many tenants have a copy in any tier."""
        return int(np.count_nonzero(self.used_bytes.any(axis=0)))

    @property
    def names(self) -> list[str]:
        """By number; empty for ``NOBODY``."""
        return self._names

    def number(self, name: str) -> int:
        """The number of a tenant, given now if it has none."""
        number = self._numbers.setdefault(name, len(self._names))
        if number == len(self._names):
            self._names.append(name)
            self.weights = np.append(self.weights, self._setting(self._weight_of, name, 1.0))
            for column in ("used_bytes", "held_bytes", "n_evicted", "n_suffered", "n_caused"):
                setattr(self, column, np.concatenate((getattr(self, column), np.zeros((N_TIERS, 1), np.int64)), axis=1))
            for column, tables, default in (
                ("least_bytes", self._least_of, 0),
                ("most_bytes", self._most_of, np.iinfo(np.int64).max),
            ):
                values = np.array([[self._setting(table, name, default)] for table in tables], np.int64)
                setattr(self, column, np.concatenate((getattr(self, column), values), axis=1))
        return number

    @staticmethod
    def _setting(table: dict[str, int] | dict[str, float], name: str, default: float) -> float:
        # What nobody has described is no tenant that an operator could mean.
        return table.get(name, table.get(EVERYBODY, default)) if name else default

    # Whose -------------------------------------------------------------------------------------------

    def owner(self, namespace: int) -> int:
        """The number of the tenant that a namespace belongs to."""
        return int(self._owners[namespace]) if namespace < len(self._owners) else NOBODY

    def owns(self, tenant: int, namespace: int) -> None:
        """A namespace belongs to a tenant. Looks at the whole table if it was another's before and has blocks."""
        if namespace >= len(self._owners):
            grown = np.zeros(max(namespace + 1, 2 * len(self._owners)), np.intp)
            grown[: len(self._owners)] = self._owners
            self._owners = grown
        if self._owners[namespace] != tenant:
            at = np.flatnonzero(self._table.namespace[: self._table.n_used] == namespace)
            at = at[self._table.residency[at] != 0]
            self._count_all(at, -1)
            self._owners[namespace] = tenant
            self._count_all(at, 1)
            self.version += len(at) > 0

    def move(self, ids: At, namespace: int) -> None:
        """These blocks are of this namespace, whatever a tier said when they were found there."""
        at = ids.astype(np.intp, copy=False)
        known = self._table.namespace[at]
        if not (known != namespace).any():
            return
        changes = bool((self.owners(at) != self.owner(namespace)).any())
        if changes:
            self._count_all(at, -1)
        self._table.namespace[at] = namespace
        if changes:
            self._count_all(at, 1)
            self.version += 1

    def owners(self, at: At) -> NDArray[np.intp]:
        """The tenants of blocks, intp [n]."""
        namespaces = self._table.namespace[at]
        if len(namespaces) and int(namespaces.max()) >= len(self._owners):
            namespaces = np.minimum(namespaces, len(self._owners))
            return np.append(self._owners, NOBODY)[namespaces]
        owners: NDArray[np.intp] = self._owners[namespaces]
        return owners

    def is_of(self, tenant: int, at: At) -> NDArray[np.bool_]:
        """Which blocks are this tenant's, bool [n]."""
        mask: NDArray[np.bool_] = self.owners(at) == tenant
        return mask

    # How much ----------------------------------------------------------------------------------------

    def gained(self, at: At, tier: int) -> None:
        """Blocks have got a copy in a tier."""
        self._count(at, tier, 1)

    def stored(self, namespace: int, n: int, size_bytes: int) -> None:
        """As ``gained`` in DRAM, for ``n`` blocks of one namespace and size."""
        self._add(self.owner(namespace), DRAM, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES * n)

    def lost(self, at: At, tier: int) -> None:
        """Blocks have lost theirs; they are still in the table."""
        self._count(at, tier, -1)

    def evicted(self, at: At, tier: int, asker: Asker | None) -> None:
        """As ``lost``, by eviction for somebody's sake."""
        if not len(at):
            return
        owner = self._count(at, tier, -1)
        if owner is not None:
            self._blame(tier, owner, len(at), asker)
            return
        owners, counts = np.unique(self.owners(at), return_counts=True)
        for tenant, n in zip(owners.tolist(), counts.tolist(), strict=True):
            self._blame(tier, tenant, n, asker)

    def hold(self, tenant: int, tier: int, n_bytes: int) -> None:
        """So many bytes more (or less) are slots that the tenant is filling."""
        self.held_bytes[tier, tenant] += n_bytes

    def room_bytes(self, tenant: int, tier: int) -> int:
        """How much more a tenant may have in a tier, by its quota; below 0 if that is over."""
        return int(self.most_bytes[tier, tenant] - self.used_bytes[tier, tenant] - self.held_bytes[tier, tenant])

    def census(self) -> Sums:
        """What ``used_bytes`` should say, counted anew. Looks at the whole table."""
        table = self._table
        sums = np.zeros_like(self.used_bytes)
        for tier in self._tiers:
            at = table.all_resident(tier)
            sums[tier] = np.bincount(self.owners(at), pages(table.size_bytes[at]), len(self))
        return sums

    @property
    def _tiers(self) -> tuple[int, ...]:
        return (DRAM, *((NVME,) if self._table.nvme else ()), *((HBM,) if self._table.hbm else ()))

    def _count_all(self, at: At, sign: int) -> None:
        for tier in self._tiers:
            self._count(at[self._table.resident(at, tier)], tier, sign)

    def _count(self, at: At, tier: int, sign: int) -> int | None:
        """The tenant, if the blocks are all of one namespace."""
        n = len(at)
        if not n:
            return None
        table, used = self._table, self.used_bytes[tier]
        sizes, namespaces = pages(table.size_bytes[at]), table.namespace[at]
        first = int(namespaces[0])
        if n == 1 or (namespaces == first).all():
            owner = self.owner(first)
            self._add(owner, tier, sign * int(sizes.sum()))
            return owner
        used += sign * np.bincount(self.owners(at), sizes, len(self)).astype(np.int64)
        self.n_present[tier] = int(np.count_nonzero(used > 0))
        return None

    def _add(self, tenant: int, tier: int, n_bytes: int) -> None:
        before = int(self.used_bytes[tier, tenant])
        self.used_bytes[tier, tenant] = after = before + n_bytes
        self.n_present[tier] += (after > 0) - (before > 0)

    def _blame(self, tier: int, owner: int, n: int, asker: Asker | None) -> None:
        if asker is None or asker.tenant == owner:
            self.n_evicted[tier, owner] += n
        else:
            self.n_suffered[tier, owner] += n
            self.n_caused[tier, asker.tenant] += n


def pages(size_bytes: NDArray[np.uint32]) -> NDArray[np.int64]:
    """What blocks of these sizes take up."""
    return (size_bytes.astype(np.int64) + (PAGE_BYTES - 1)) // PAGE_BYTES * PAGE_BYTES
