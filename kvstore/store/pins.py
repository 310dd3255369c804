"""How much pins hold, and how much more they may: of all tenants together, and of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.config import PinOptions, format_size
from kvstore.errors import BadInputError, IntegrityError
from kvstore.lease import ClaimTable, Pin
from kvstore.metrics import Counters
from kvstore.prefix_index.block_table import DRAM, At
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.shares import nominal_bytes
from kvstore.prefix_index.tenants import pages

PINS_PER_TENANT_MAX = 4096
PIN_ENTRIES_PER_TENANT_MAX = 1 << 20
"""Blocks in all pins of a tenant, each as often as it is pinned: what is pinned again takes no more room in the tier,
but some for the pin."""


class _Held(NamedTuple):
    """What the pins of a tenant hold."""

    n_bytes: int = 0
    n_pins: int = 0
    n_entries: int = 0


class PinQuota:
    """The pins of one store: a block counts once, however many pins it has, as long as it has one.

    What lies on NVMe only counts as well: it comes to DRAM with the next request, and stays there.
    """

    def __init__(
        self, index: PrefixIndex, pins: ClaimTable[Pin], counters: Counters, options: PinOptions, dram_bytes: int
    ) -> None:
        self._index = index
        self._pins = pins
        self._counters = counters
        self._tenant_bytes = options.tenant_bytes
        self.room_bytes = options.room_bytes(dram_bytes)
        """What all pins together may hold."""
        self._n_pins: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._held: dict[str, _Held] = {}

    @property
    def held_bytes(self) -> int:
        """What all pins hold."""
        return sum(each.n_bytes for each in self._held.values())

    def held_by(self, tenant: str) -> int:
        """What a tenant's pins hold, in bytes."""
        return self._of(tenant).n_bytes

    def n_pins_of(self, tenant: str) -> int:
        """How many pins a tenant has."""
        return self._of(tenant).n_pins

    def most_of(self, tenant: str) -> int:
        """What they may hold: as configured, else its share of what all may, among the tenants that have blocks."""
        tenants = self._index.tenants
        if self._tenant_bytes or not tenants.is_fair:
            return self._tenant_bytes or self.room_bytes
        return nominal_bytes(tenants, DRAM, self.room_bytes).get(tenants.number(tenant), self.room_bytes)

    def take(self, tenant: str, ids: At, now_s: float) -> None:
        """Count a pin on these distinct blocks. Raises BadInputError if that is too much; nothing has changed then."""
        at = self._grown(ids)
        more = int(pages(self._index.table.size_bytes[at[self._n_pins[at] == 0]]).sum())
        before, most = self._of(tenant), self.most_of(tenant)
        held, left = before.n_bytes, self.room_bytes - self.held_bytes
        after = _Held(held + more, before.n_pins + 1, before.n_entries + len(at))
        refusal = ""
        if after.n_bytes > most or more > left:
            refusal = self._refusal(tenant, more, held, most, left, now_s)
        elif after.n_pins > PINS_PER_TENANT_MAX or after.n_entries > PIN_ENTRIES_PER_TENANT_MAX:
            refusal = (
                f"tenant {tenant!r} has {before.n_pins} pins of {before.n_entries} blocks in all, the most are "
                f"{PINS_PER_TENANT_MAX} of {PIN_ENTRIES_PER_TENANT_MAX}: pin a prompt once, or unpin some"
            )
        if refusal:
            self._counters.add("refused_pins")
            raise BadInputError(refusal)
        self._n_pins[at] += 1
        self._held[tenant] = after

    def give_back(self, tenant: str, ids: At) -> None:
        """A pin on these blocks has ended; they are still in the table."""
        at = self._grown(ids)
        self._n_pins[at] -= 1
        less = int(pages(self._index.table.size_bytes[at[self._n_pins[at] == 0]]).sum())
        before = self._held[tenant]
        after = _Held(before.n_bytes - less, before.n_pins - 1, before.n_entries - len(at))
        if after.n_pins:
            self._held[tenant] = after
        else:
            del self._held[tenant]

    def stats(self) -> dict[str, float]:
        """Gauges."""
        return {"pinned_bytes": self.held_bytes, "pin_room_bytes": self.room_bytes}

    def check(self) -> None:
        """Raises IntegrityError if what is counted is not what the pins hold. For tests: looks at every pin."""
        counts = np.zeros(self._index.table.capacity_blocks, np.uint32)
        for pin in self._pins:
            np.add.at(counts, self._grown(pin.ids), 1)
        if not np.array_equal(counts[: len(self._n_pins)], self._n_pins):
            raise IntegrityError("pins hold other blocks than their quota has counted")
        if (self.held_bytes > 0) != bool(len(self._pins)):
            raise IntegrityError(f"{len(self._pins)} pins hold {self.held_bytes} bytes by their quota")
        for tenant, held in self._held.items():
            sizes = [len(pin.ids) for pin in self._pins if pin.tenant == tenant]
            if (len(sizes), sum(sizes)) != (held.n_pins, held.n_entries):
                raise IntegrityError(f"tenant {tenant!r} has {len(sizes)} pins, {held.n_pins} by its quota")

    def _of(self, tenant: str) -> _Held:
        return self._held.get(tenant, _Held())

    def _refusal(self, tenant: str, more: int, held: int, most: int, left: int, now_s: float) -> str:
        if held + more > most:
            flag = "--pin-tenant" if self._tenant_bytes else "its share of --pin-dram"
            limit = f"it has pinned {format_size(held)} of the {format_size(most)} that it may ({flag})"
        else:
            limit = (
                f"pins may hold {format_size(self.room_bytes)} in all (--pin-dram), {format_size(left)} of it are left"
            )
        ends_s = min((pin.deadline_s - now_s for pin in self._pins if pin.tenant == tenant), default=0.0)
        what = f"pin {format_size(more)} more" if more else "pin the same again"
        wait = f"; the next of its pins ends in {max(ends_s, 0.0):.0f} s" if ends_s else ""
        return (
            f"tenant {tenant!r} can't {what}: {limit}. Pin a shorter prefix, or unpin what is not needed any more{wait}"
        )

    def _grown(self, ids: At) -> NDArray[np.intp]:
        n = self._index.table.capacity_blocks
        if len(self._n_pins) < n:
            grown = np.zeros(n, np.uint32)
            grown[: len(self._n_pins)] = self._n_pins
            self._n_pins = grown
        return ids.astype(np.intp, copy=False)
