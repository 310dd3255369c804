"""Fair shares of a tier: who has more of it than is due to it, and by how much.

The share of a tenant is its part by weight of what a tier has room for, at least what it is guaranteed. Who has no
more, with what it is about to have, keeps it; what is left is due to the others, again by weight, and never less than
their share. Who has more than is due to it gives first, and nobody else. Where nobody has, as there is room but not for
everybody's blocks, whoever asks for some gives its own.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.config.units import PAGE_BYTES
from kvstore.prefix_index.tenants import Asker, Tenants

ASKED_MAX = 16
"""Most tenants among whose blocks the policy chooses: those that exceed what is due to them most, for their weight."""

WELL_BELOW = 0.75
"""Who has less than this part of its share gets room from others alone; nearer to it that is not worth its trouble."""
LOOKED_AHEAD = 64
"""Of what is in a tier, this part is thought to be needed where nobody asks for anything."""

Values = NDArray[np.float64]


def shares(total: float, weights: Values, least: Values) -> Values:
    """``total`` by weight, at least ``least`` for each; float64 [n].

    The sum is ``total``, or that of ``least`` if it is more.
    """
    if not len(weights):
        return np.empty(0)
    if not least.any():
        return weights * (total / float(weights.sum()))
    # Who gets its least because that is more than its part comes first: the rest is divided among the others.
    order = np.argsort(-least / weights, kind="stable")
    rest = total - np.concatenate(((0.0,), np.cumsum(least[order])[:-1]))
    level = rest / np.cumsum(weights[order][::-1])[::-1]
    fits = np.flatnonzero(level >= (least / weights)[order])
    out = least.astype(np.float64)
    if len(fits):
        others = order[fits[0] :]
        out[others] = level[fits[0]] * weights[others]
    return out


class Standing(Enum):
    """What a tenant has, with what it asks for. OVER: more than is due to it, or nobody else has anything. BELOW: far
    less. WITHIN: about its share."""

    OVER = "over"
    WITHIN = "within"
    BELOW = "below"


class Round:
    """Who gives up copies in a tier now: reckoned once, then counted down as they go.

    A tenant that is asked gives as long as it has more than was due to it at the beginning.
    """

    def __init__(self, tenants: Tenants, tier: int, asker: Asker | None) -> None:
        had: NDArray[np.int64] = tenants.used_bytes[tier] + tenants.held_bytes[tier]
        if asker is not None:
            had[asker.tenant] += asker.n_bytes
        self._had = had
        self._weights = tenants.weights
        self._least = tenants.least_bytes[tier]
        self._room = float(tenants.room_for_all[tier])
        self._needed = max(asker.n_bytes if asker is not None else int(had.sum()) // LOOKED_AHEAD, PAGE_BYTES)
        self._has = tenants.used_bytes[tier] > 0
        self._due: dict[int, int] = {}
        self._share_of: dict[int, float] = {}
        self.begin()

    @property
    def asked(self) -> list[int]:
        """The tenants among whose blocks the next to go is."""
        return list(self._due)

    def begin(self) -> None:
        """Reckon anew, after what has gone."""
        at = np.flatnonzero(self._had > 0)
        had, weights, least = self._had[at].astype(np.float64), self._weights[at], self._least[at].astype(np.float64)
        left = float(had.sum()) - self._needed
        due = entitled(max(self._room, left), left, had, weights, least)
        excess = (had - due) / weights
        over = np.flatnonzero(excess > 0)
        over = over[self._has[at[over]]]
        if len(over) > ASKED_MAX:
            over = over[np.argsort(-excess[over], kind="stable")[:ASKED_MAX]]
        self._due = {int(at[i]): int(due[i]) for i in over}
        self._share_of = dict(zip(at.tolist(), due.tolist(), strict=True))

    def standing(self, tenant: int) -> Standing:
        """How much a tenant has beside its share, and what else is due to it."""
        if tenant in self._due:
            return Standing.OVER
        had, share = int(self._had[tenant]), self._share_of.get(tenant, 0)
        return Standing.BELOW if had < share * WELL_BELOW else Standing.WITHIN

    def is_over(self, tenant: int) -> bool:
        """Whether it has still more than is due to it."""
        return bool(self._had[tenant] > self._due.get(tenant, self._had[tenant]))

    def excess_bytes(self, tenant: int) -> int:
        """By how much."""
        return int(self._had[tenant]) - self._due[tenant]

    def gives(self, tenant: int, n_bytes: int) -> None:
        """Copies of so many bytes go (below 0: they stay after all)."""
        self._had[tenant] -= n_bytes

    def others(self, asker: Asker | None) -> list[int]:
        """Who is left to give while nobody has more than is due to it: the asker, or everybody if there is none."""
        if asker is not None:
            return [asker.tenant] if asker.gives_own and self._has[asker.tenant] else []
        at: list[int] = np.flatnonzero(self._has).tolist()
        return at

    def leave_out(self, tenant: int) -> None:
        """The tenant has nothing that may go: it is not asked any more."""
        self._has[tenant] = False
        self._due.pop(tenant, None)


def entitled(room: float, left: float, wanted: Values, weights: Values, least: Values) -> Values:
    """What is due to each of those that want so much, float64 [n]: of ``room`` in all, ``left`` of which is to stay
    taken. See the module."""
    due = shares(room, weights, least)
    over = wanted > due
    if over.any():
        rest = shares(left - float(wanted[~over].sum()), weights[over], least[over])
        due[over] = np.maximum(due[over], rest)
    return due


def nominal_bytes(tenants: Tenants, tier: int, capacity_bytes: int) -> dict[int, int]:
    """The share of each tenant that has something in a tier of this capacity, by number."""
    at: NDArray[np.integer[Any]] = np.flatnonzero(tenants.used_bytes[tier] > 0)
    due = shares(float(capacity_bytes), tenants.weights[at], tenants.least_bytes[tier][at].astype(np.float64))
    return {int(tenant): int(n_bytes) for tenant, n_bytes in zip(at, due, strict=True)}
