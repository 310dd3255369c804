"""What tiers have in common that hand out slots of regions: states, generations, and who maps what.

A tier knows slots, writers and mappers, and no keys: what lies in a slot is the caller's ``tag``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.tiers.book import RegionBook, RegionT
from kvstore.tiers.generations import Generations
from kvstore.tiers.memfd import PAGE_BYTES
from kvstore.tiers.slots import Described, Int64s, SlotState, SlotTable
from kvstore.types import SLOT_BITS

_RUN_REGIONS = 8
"""Regions searched for one run of slots before scattered ones do: a bound on the work of an allocation."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where slots lie, one entry a slot: region, offset in its descriptor in bytes, generation now."""

    region_ids: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    generations: NDArray[np.uint64]


class SlottedTier(ABC, Generic[RegionT]):
    """Slots in regions, each of one writer, tenant and slot size. One thread calls it; nothing here waits for a client:
    what a client still maps counts until the client says that it is unmapped."""

    _table: SlotTable
    _book: RegionBook[RegionT]
    _generations: Generations

    @abstractmethod
    def _new_region(self, writer: int, tenant: str, slot_bytes: int, missing: int) -> RegionT | None:
        """A region for ``missing`` slots more, or for some of them; None when the budget has no room for one."""

    # -- slots ----------------------------------------------------------------------------------

    def slot_bytes(self, block_bytes: int) -> int:
        """Bytes of a slot that holds a block: whole pages. Raises BadInputError below 1."""
        if block_bytes < 1:
            raise BadInputError(f"block_bytes is {block_bytes}; it must be at least 1")
        return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES

    def allocate(self, writer: int, tenant: str, slot_bytes: int, n: int) -> Int64s:
        """Up to ``n`` slots that the writer may fill, now reserved; int64, fewer or none when full.

        Uses free slots of the writer's regions (a run of ``n`` where one is near, else the lowest), then
        new regions while the budget lasts. Mutates; makes no copy and evicts nothing. Raises BadInputError for an
        impossible size.
        """
        if slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES:
            raise BadInputError(f"slot_bytes is {slot_bytes}; it must be a multiple of {PAGE_BYTES}: see slot_bytes()")
        if n < 0:
            raise BadInputError(f"n is {n}; it must be 0 or more slots")
        slots = self._open_slots(writer, tenant, slot_bytes, n)
        while len(slots) < n:
            region = self._new_region(writer, tenant, slot_bytes, n - len(slots))
            if region is None:
                break
            slots = np.append(slots, self._table.first_run(region.id, min(n - len(slots), region.n_slots)))
        self._table.hand_out(slots)
        return slots

    def free_slots(self, writer: int, tenant: str, slot_bytes: int) -> int:
        """How many slots ``allocate`` would give now: free ones, and those the budget has room for."""
        rows = self._table.rows(self._book.usable_ids(writer, tenant, slot_bytes))
        free = int(self._table.counts[SlotState.FREE, rows].sum())
        return free + self._book.available_bytes // slot_bytes

    def usable_regions(self, writer: int, tenant: str, slot_bytes: int) -> frozenset[int]:
        """Ids of the regions whose free slots the writer may fill."""
        return frozenset(self._book.usable_ids(writer, tenant, slot_bytes).tolist())

    def commit(self, slots: Int64s, tags: Int64s) -> None:
        """Reserved slots become live under tags (0 or above). Raises IntegrityError before any change."""
        self._table.commit(slots, tags)

    def free(self, slots: Int64s) -> None:
        """Slots may be handed out again; their generations move on. Raises IntegrityError before any change.

        Only for slots that no client can use any more: see ``quarantine``.
        """
        self._table.free(slots)

    def quarantine(self, slots: Int64s) -> None:
        """Reserved or live slots stop being anyone's but are not reused before ``free``.

        For slots that a client may still write or read although its right ended. They lose their tags and
        count against capacity. Raises IntegrityError before any change.
        """
        self._table.quarantine(slots)

    def tags(self, slots: Int64s) -> Int64s:
        """The tags of slots, -1 for those not live."""
        return self._table.tags_of(slots)

    def set_tags(self, slots: Int64s, tags: Int64s) -> None:
        """Give live slots other tags. Raises IntegrityError before any change."""
        self._table.set_tags(slots, tags)

    def states(self, slots: Int64s) -> NDArray[np.uint8]:
        """The ``SlotState`` of each slot."""
        return self._table.states[self._table.resolve(slots).places]

    def locate(self, slots: Int64s) -> Located:
        """Where slots lie. Raises IntegrityError for a slot of no region."""
        found = self._table.resolve(slots)
        return Located(
            (slots >> SLOT_BITS).astype(np.uint32),
            (found.indexes * self._table.slot_bytes[found.rows]).astype(np.uint64),
            self._generations.values[found.places],
        )

    def describe(self, slots: Int64s) -> Described:
        """What a client needs to find slots in its own mappings. Raises IntegrityError for an unknown one."""
        return self._table.describe(slots)

    def addresses(self, slots: Int64s) -> NDArray[np.uint64]:
        """Where slots lie for the daemon, which may write there; valid while their regions are there."""
        return self._book.addresses(slots)

    def generation_index(self, slots: Int64s) -> Int64s:
        """The places of slots in the file behind ``generations_fd``, in counters of 8 bytes."""
        return self._table.resolve(slots).places

    # -- regions --------------------------------------------------------------------------------

    @property
    def generations_fd(self) -> int:
        """The file of generations (uint64 each); clients can only map it read-only."""
        return self._generations.fd

    @property
    def generations_bytes(self) -> int:
        """Size of that file; sparse."""
        return self._generations.size_bytes

    @property
    def regions(self) -> MappingProxyType[int, RegionT]:
        """All assigned regions by id; raw and retired ones are not among them."""
        return MappingProxyType(self._book.regions)

    def region(self, region_id: int) -> RegionT:
        """One region. Raises IntegrityError when it is retired or was never made."""
        return self._book.region(region_id)

    def add_mapper(self, region_id: int, client: int) -> None:
        """A client is about to get the descriptor; its mapping counts until it is removed.

        Raises IntegrityError when the region isn't sealed and the client isn't its writer.
        """
        self._book.add_mapper(region_id, client)

    def remove_mapper(self, region_id: int, client: int) -> None:
        """A client says that it has unmapped a region. Does nothing for one long gone."""
        self._book.remove_mapper(region_id, client)

    def is_mapped_by(self, client: int) -> bool:
        """Whether a client may have regions mapped, retired ones included."""
        return self._book.is_mapped_by(client)

    def mapped_by(self, client: int) -> dict[int, int]:
        """The regions that a client may have mapped, retired ones included, each with its inode; 0 if not known."""
        return self._book.mapped_by(client)

    def pending_unmaps(self) -> dict[int, list[int]]:
        """For each client the retired regions that it still maps: it must be asked to unmap them."""
        return self._book.pending_unmaps()

    @property
    def retired_mapped_bytes(self) -> int:
        """Bytes of regions that are gone but for the clients that still map them."""
        return self._book.retired_bytes

    def retire_empty(self, keep_for: tuple[int, str, int], limit_bytes: int | None = None) -> list[int]:
        """Retire empty regions that an asker (writer, tenant, slot_bytes) can't use; returns their ids.

        Their bytes return to the budget at once, or when the last client has unmapped. Stops when
        ``limit_bytes`` are retired, if given.
        """
        return self._book.retire_empty(keep_for, limit_bytes)

    # -- allocation -----------------------------------------------------------------------------

    def _open_slots(self, writer: int, tenant: str, slot_bytes: int, n: int) -> Int64s:
        """Up to ``n`` free slots of the writer's regions: one run where it is near, else the lowest."""
        ids = self._book.usable_ids(writer, tenant, slot_bytes)
        free = self._table.counts[SlotState.FREE, self._table.rows(ids)]
        for region_id in ids[free >= n][:_RUN_REGIONS].tolist() if n > 1 else ():
            run = self._table.first_run(region_id, n)
            if len(run):
                return run
        return self._table.lowest_free(ids[free > 0], n)
