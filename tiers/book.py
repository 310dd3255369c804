"""Whose the regions are, who maps them, and which are gone but still mapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.tiers.any_region import DAEMON_WRITER, AnyRegion
from kvstore.tiers.ledger import Ledger, NoLedger
from kvstore.tiers.slots import Int64s, SlotState, SlotTable
from kvstore.tiers.source import SourceFacts

RegionT = TypeVar("RegionT", bound=AnyRegion)
RegionT_co = TypeVar("RegionT_co", bound=AnyRegion, covariant=True)

_Class = tuple[int | None, str, int]


@dataclass(slots=True)
class _Retired:
    """A region that is gone but for the clients that still map it."""

    size_bytes: int
    mappers: set[int]
    inode: int
    gone: Callable[[], None]


class Source(Protocol[RegionT_co]):
    """Where regions come from; ``RegionSource`` is one."""

    @property
    def available_bytes(self) -> int:
        """What ``obtain`` can still give."""
        ...

    @property
    def bound_bytes(self) -> int:
        """What is out and raw never exceeds this."""
        ...

    def facts(self) -> SourceFacts:
        """The bytes now."""
        ...

    def obtain(self, wanted_bytes: int, unit_bytes: int, exact: bool = False, keep_bytes: int = 0) -> RegionT_co | None:
        """A raw region, or None."""
        ...

    def give_back(self, size_bytes: int) -> None:
        """A region from ``obtain`` is gone for everybody: its bytes are free again."""
        ...


class RegionBook(Generic[RegionT]):
    """All regions by id and by class (writer, tenant, slot size), and the mappings of clients."""

    def __init__(
        self,
        table: SlotTable,
        source: Source[RegionT],
        ledger: Ledger | None = None,
        made: Callable[[RegionT, int], None] | None = None,
    ) -> None:
        """``made`` is told of each region with an id, and the place of its first slot, before anybody else."""
        self.regions: dict[int, RegionT] = {}
        self._made = made
        self._table = table
        self._source = source
        self._ledger: Ledger = ledger or NoLedger()
        self._classes: dict[_Class, list[int]] = {}
        self._usable: dict[tuple[int, str, int], Int64s] = {}
        """Answers of ``usable_ids`` until a region changes: a reservation asks again and again."""
        self._retired: dict[int, _Retired] = {}
        self._last_id = 0
        self._moving_bytes = 0

    def region(self, region_id: int) -> RegionT:
        """One region. Raises IntegrityError when it is retired or was never made."""
        region = self.regions.get(region_id)
        if region is None:
            raise IntegrityError(f"region {region_id} is not in the tier (retired, or never made)")
        return region

    def make(self, writer: int, tenant: str, slot_bytes: int, wanted_bytes: int, exact: bool) -> RegionT | None:
        """A new region of a class, all slots free; None when the budget has no room for a slot."""
        keep_bytes = 0 if exact else self.moving_bytes
        region = self._source.obtain(wanted_bytes, slot_bytes, exact, keep_bytes)
        if region is None:
            return None
        region.assign(self._last_id + 1, writer, tenant, slot_bytes)
        self._enter(region)
        return region

    def adopt(
        self, region: RegionT, region_id: int, writer: int | None, tenant: str, slot_bytes: int, mappers: frozenset[int]
    ) -> None:
        """A region of an earlier daemon, all slots free. Ids ascend. Its bytes are out already."""
        region.adopt(region_id, writer, tenant, slot_bytes, mappers)
        self._enter(region)
        for client in mappers:
            self._ledger.region_mapped(region_id, client)

    def adopt_retired(self, region_id: int, size_bytes: int, mappers: frozenset[int], inode: int) -> None:
        """A region that an earlier daemon, or this one at its start, gave up while clients map it."""
        self._ledger.region_retired(region_id, size_bytes, inode)
        for client in mappers:
            self._ledger.region_mapped(region_id, client)
        self._retired[region_id] = _Retired(size_bytes, set(mappers), inode, lambda: None)
        self._give_back_unmapped(region_id)

    def start_after(self, last_id: int) -> None:
        """Regions made from now on have higher ids."""
        self._last_id = max(self._last_id, last_id)

    def _enter(self, region: RegionT) -> None:
        self._table.add_region(region.id, region.n_slots, region.slot_bytes)
        self._last_id = region.id
        self.regions[region.id] = region
        self._add_to_class(region)
        if self._made is not None:
            self._made(region, self._table.base(region.id))

    def has_class(self, writer: int, tenant: str, slot_bytes: int) -> bool:
        """Whether the writer has a region of this class already."""
        return (writer, tenant, slot_bytes) in self._classes

    def usable_ids(self, writer: int, tenant: str, slot_bytes: int) -> Int64s:
        """Regions whose free slots a writer may fill, ascending; read-only. The daemon may fill orphans as well."""
        key = (writer, tenant, slot_bytes)
        found = self._usable.get(key)
        if found is None:
            found = self._usable[key] = self._find_usable(*key)
        return found

    def _find_usable(self, writer: int, tenant: str, slot_bytes: int) -> Int64s:
        ids = self._classes.get((writer, tenant, slot_bytes), [])
        if writer == DAEMON_WRITER:
            ids = sorted(ids + self._classes.get((None, tenant, slot_bytes), []))
        found = np.array([i for i in ids if self.regions[i].can_be_filled_by(writer)], np.int64)
        found.flags.writeable = False
        return found

    def drain(self, region: RegionT, draining: bool) -> None:
        """Whether a region takes no new blocks for now, as it is being emptied."""
        region.draining = draining
        self._usable.clear()

    def other_ids(self, writer: int, slot_bytes: int) -> frozenset[int]:
        """Regions of this writer that have slots of another size."""
        return frozenset(
            region_id
            for (by, _, size), ids in self._classes.items()
            if by == writer and size != slot_bytes
            for region_id in ids
        )

    def orphan_ids(self) -> frozenset[int]:
        """Regions without a living writer that the daemon can write, its own included."""
        return frozenset(
            region_id
            for (writer, _, _), ids in self._classes.items()
            if writer in (None, DAEMON_WRITER)
            for region_id in ids
            if not self.regions[region_id].read_only
        )

    @property
    def moving_bytes(self) -> int:
        """What of the budget is kept for moves: one region's blocks, while there are some that nobody can write.

        Only emptied and retired are those room again, and their free slots take no other's blocks.
        """
        return self._moving_bytes

    @property
    def available_bytes(self) -> int:
        """What is left of the budget for regions, but for moves."""
        return max(self._source.available_bytes - self._moving_bytes, 0)

    def add_mapper(self, region_id: int, client: int) -> None:
        """Raises IntegrityError when the region isn't sealed and the client isn't its writer."""
        region = self.region(region_id)
        if not region.sealed and client != region.writer:
            raise IntegrityError(f"region {region_id} is not sealed; only its writer may get the descriptor")
        if client not in region.mappers:
            region.mappers.add(client)
            self._ledger.region_mapped(region_id, client)

    def remove_mapper(self, region_id: int, client: int) -> None:
        """Forget one mapping; does nothing for a region or mapping that isn't known."""
        if region_id in self.regions:
            self._usable.clear()  # it may have been waited for
            if self.regions[region_id].unmapped_by(client):
                self._ledger.regions_unmapped((region_id,), client)
        elif region_id in self._retired and client in self._retired[region_id].mappers:
            self._ledger.regions_unmapped((region_id,), client)
            self._unmapped(region_id, client)

    def is_mapped_by(self, client: int) -> bool:
        """See ``DramTier.is_mapped_by``."""
        return bool(self.mapped_by(client))

    def mapped_by(self, client: int) -> dict[int, int]:
        """See ``DramTier.mapped_by``."""
        all_known: dict[int, RegionT | _Retired] = {**self.regions, **self._retired}
        return {region_id: each.inode for region_id, each in all_known.items() if client in each.mappers}

    def drop_client(self, client: int) -> None:
        """Forget all mappings of a client."""
        self._usable.clear()
        gone = [region.id for region in self.regions.values() if region.unmapped_by(client)]
        retired = [region_id for region_id, each in self._retired.items() if client in each.mappers]
        if gone or retired:
            self._ledger.regions_unmapped((*gone, *retired), client)
        for region_id in retired:
            self._unmapped(region_id, client)

    def settle(self, client: int) -> bool:
        """A client uses nothing any more that it was lent in an earlier epoch. Whether that was waited for."""
        self._usable.clear()
        waited = [region for region in self.regions.values() if client in region.unsettled]
        for region in waited:
            region.unsettled.discard(client)
        return bool(waited)

    def unsettled_bytes(self) -> int:
        """Bytes of regions whose free slots wait for clients to settle."""
        return sum(region.size_bytes for region in self.regions.values() if region.unsettled)

    def writer_gone(self, writer: int) -> None:
        """The writer's regions become orphans."""
        self._usable.clear()
        for key in [key for key in self._classes if key[0] == writer]:
            for region_id in self._classes.pop(key):
                self.regions[region_id].orphan()
                self._add_to_class(self.regions[region_id])

    def pending_unmaps(self) -> dict[int, list[int]]:
        """For each client the retired regions that it still maps."""
        asked: dict[int, list[int]] = {}
        for region_id, retired in self._retired.items():
            for client in retired.mappers:
                asked.setdefault(client, []).append(region_id)
        return asked

    def retire(self, region: RegionT) -> None:
        """Close an empty region. Its bytes count until nobody maps it."""
        self._usable.clear()
        self._table.remove_region(region.id)
        del self.regions[region.id]
        key = (region.writer, region.tenant, region.slot_bytes)
        self._classes[key].remove(region.id)
        if not self._classes[key]:
            del self._classes[key]
        if region.read_only:
            self._moving_bytes = max((each.size_bytes for each in self.regions.values() if each.is_stale), default=0)
        if region.mappers:
            self._ledger.region_retired(region.id, region.size_bytes, region.inode)
        region.close()
        self._retired[region.id] = _Retired(region.size_bytes, region.mappers, region.inode, region.gone)
        self._give_back_unmapped(region.id)

    def retire_empty(self, keep_for: tuple[int, str, int], limit_bytes: int | None) -> list[int]:
        """Retire empty regions that the asker can't use, lowest ids first, until ``limit_bytes`` are."""
        usable = set(self.usable_ids(*keep_for).tolist())
        empty = self._table.ids[self._table.counts[SlotState.FREE] == self._table.n_slots].tolist()
        gone: list[int] = []
        retired_bytes = 0
        for region_id in empty:
            region = self.regions[region_id]
            if limit_bytes is not None and retired_bytes >= limit_bytes:
                break
            if region_id not in usable and not region.draining:
                retired_bytes += region.size_bytes
                self.retire(region)
                gone.append(region_id)
        return gone

    @property
    def retired_bytes(self) -> int:
        """Bytes of retired regions that clients still map."""
        return sum(retired.size_bytes for retired in self._retired.values())

    def addresses(self, slots: Int64s) -> NDArray[np.uint64]:
        """Where slots lie for the daemon, uint64 ``[n]``. Raises IntegrityError for an unknown one."""
        table = self._table
        found = table.resolve(slots)
        rows, back = np.unique(found.rows, return_inverse=True)
        starts = np.array([self.regions[region_id].address for region_id in table.ids[rows].tolist()], np.uint64)
        offsets = (found.indexes * table.slot_bytes[found.rows]).astype(np.uint64)
        return starts[back] + offsets if len(slots) else offsets

    def check(self) -> None:
        """Raises IntegrityError that names what contradicts what."""
        facts = self._source.facts()
        out_bytes = sum(region.size_bytes for region in self.regions.values()) + self.retired_bytes
        if out_bytes != facts.out_bytes:
            raise IntegrityError(f"regions have {out_bytes} bytes but {facts.out_bytes} are counted")
        if out_bytes + facts.raw_bytes > self._source.bound_bytes:
            raise IntegrityError(f"{out_bytes} + {facts.raw_bytes} raw bytes exceed {self._source.bound_bytes}")
        if sorted(self.regions) != self._table.ids.tolist():
            raise IntegrityError("the slot table has other regions than the tier")
        listed = sorted(region_id for ids in self._classes.values() for region_id in ids)
        if listed != sorted(self.regions):
            raise IntegrityError("a region is in no class or in two")
        for region in self.regions.values():
            region.check()
            if region.id not in self._classes.get((region.writer, region.tenant, region.slot_bytes), ()):
                raise IntegrityError(f"region {region.id} is in the class of another writer, tenant or slot size")
        for key, ids in self._usable.items():
            if not np.array_equal(ids, self._find_usable(*key)):
                raise IntegrityError(f"regions {ids.tolist()} are remembered as usable for {key}; others are")
        if any(not retired.mappers for retired in self._retired.values()):
            raise IntegrityError("a retired region that nobody maps still counts")

    def close(self) -> None:
        """Close all regions. Idempotent."""
        for region in self.regions.values():
            region.close()

    def close_for_all(self) -> None:
        """As ``close``, also where clients still map them: for memory that would go with this process anyway."""
        self.close()
        for region in self.regions.values():
            region.gone()
        for retired in self._retired.values():
            retired.gone()

    def _add_to_class(self, region: RegionT) -> None:
        self._usable.clear()
        ids = self._classes.setdefault((region.writer, region.tenant, region.slot_bytes), [])
        ids.append(region.id)
        ids.sort()
        if region.is_stale:
            self._moving_bytes = max(self._moving_bytes, region.size_bytes)

    def _unmapped(self, region_id: int, client: int) -> None:
        self._retired[region_id].mappers.discard(client)
        self._give_back_unmapped(region_id)

    def _give_back_unmapped(self, region_id: int) -> None:
        retired = self._retired[region_id]
        if not retired.mappers:
            del self._retired[region_id]
            retired.gone()
            self._ledger.region_gone(region_id)
            self._source.give_back(retired.size_bytes)
