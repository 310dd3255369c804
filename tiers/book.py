"""Whose the regions are, who maps them, and which are gone but still mapped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.errors import IntegrityError
from kvstore.tiers.region import DAEMON_WRITER, Region
from kvstore.tiers.slots import Int64s, SlotState, SlotTable
from kvstore.tiers.source import RegionSource

_Class = tuple[int | None, str, int]


@dataclass(slots=True)
class _Retired:
    """A region that is gone but for the clients that still map it."""

    size_bytes: int
    mappers: set[int]


class RegionBook:
    """All regions by id and by class (writer, tenant, slot size), and the mappings of clients."""

    def __init__(self, table: SlotTable, source: RegionSource) -> None:
        self.regions: dict[int, Region] = {}
        self._table = table
        self._source = source
        self._classes: dict[_Class, list[int]] = {}
        self._retired: dict[int, _Retired] = {}
        self._last_id = 0

    def region(self, region_id: int) -> Region:
        """One region. Raises IntegrityError when it is retired or was never made."""
        region = self.regions.get(region_id)
        if region is None:
            raise IntegrityError(f"region {region_id} is not in the tier (retired, or never made)")
        return region

    def make(self, writer: int, tenant: str, slot_bytes: int, wanted_bytes: int, exact: bool) -> Region | None:
        """A new region of a class, all slots free; None when the budget has no room for a slot."""
        region = self._source.obtain(wanted_bytes, slot_bytes, exact)
        if region is None:
            return None
        self._last_id += 1
        region.assign(self._last_id, writer, tenant, slot_bytes)
        self._table.add_region(region.id, region.n_slots, slot_bytes)
        self.regions[region.id] = region
        self._add_to_class(region)
        return region

    def has_class(self, writer: int, tenant: str, slot_bytes: int) -> bool:
        """Whether the writer has a region of this class already."""
        return (writer, tenant, slot_bytes) in self._classes

    def usable_ids(self, writer: int, tenant: str, slot_bytes: int) -> Int64s:
        """Regions whose free slots a writer may fill, ascending. The daemon may fill orphans as well."""
        ids = self._classes.get((writer, tenant, slot_bytes), [])
        if writer == DAEMON_WRITER:
            ids = sorted(ids + self._classes.get((None, tenant, slot_bytes), []))
        return np.array([i for i in ids if not self.regions[i].draining], np.int64)

    def orphan_ids(self) -> frozenset[int]:
        """Regions without a living writer, the daemon's own included."""
        return frozenset(
            region_id
            for (writer, _, _), ids in self._classes.items()
            if writer in (None, DAEMON_WRITER)
            for region_id in ids
        )

    def add_mapper(self, region_id: int, client: int) -> None:
        """Raises IntegrityError when the region isn't sealed and the client isn't its writer."""
        region = self.region(region_id)
        if not region.sealed and client != region.writer:
            raise IntegrityError(f"region {region_id} is not sealed; only its writer may get the descriptor")
        region.mappers.add(client)

    def remove_mapper(self, region_id: int, client: int) -> None:
        """Forget one mapping; does nothing for a region or mapping that isn't known."""
        if region_id in self.regions:
            self.regions[region_id].mappers.discard(client)
        elif region_id in self._retired:
            self._unmapped(region_id, client)

    def drop_client(self, client: int) -> None:
        """Forget all mappings of a client."""
        for region in self.regions.values():
            region.mappers.discard(client)
        for region_id in list(self._retired):
            self._unmapped(region_id, client)

    def writer_gone(self, writer: int) -> None:
        """The writer's regions become orphans."""
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

    def retire(self, region: Region) -> None:
        """Close an empty region. Its bytes count until nobody maps it."""
        self._table.remove_region(region.id)
        del self.regions[region.id]
        key = (region.writer, region.tenant, region.slot_bytes)
        self._classes[key].remove(region.id)
        if not self._classes[key]:
            del self._classes[key]
        region.close()
        self._retired[region.id] = _Retired(region.size_bytes, region.mappers)
        self._settle(region.id)

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

    def check(self) -> None:
        """Raises IntegrityError that names what contradicts what."""
        facts = self._source.facts()
        out_bytes = sum(region.size_bytes for region in self.regions.values()) + self.retired_bytes
        if out_bytes != facts.out_bytes:
            raise IntegrityError(f"regions have {out_bytes} bytes but {facts.out_bytes} are counted")
        if out_bytes + facts.raw_bytes > self._source.capacity_bytes:
            raise IntegrityError(f"{out_bytes} + {facts.raw_bytes} raw bytes exceed {self._source.capacity_bytes}")
        if sorted(self.regions) != self._table.ids.tolist():
            raise IntegrityError("the slot table has other regions than the tier")
        listed = sorted(region_id for ids in self._classes.values() for region_id in ids)
        if listed != sorted(self.regions):
            raise IntegrityError("a region is in no class or in two")
        for region in self.regions.values():
            region.check()
            if region.id not in self._classes.get((region.writer, region.tenant, region.slot_bytes), ()):
                raise IntegrityError(f"region {region.id} is in the class of another writer, tenant or slot size")
        if any(not retired.mappers for retired in self._retired.values()):
            raise IntegrityError("a retired region that nobody maps still counts")

    def close(self) -> None:
        """Close all regions. Idempotent."""
        for region in self.regions.values():
            region.close()

    def _add_to_class(self, region: Region) -> None:
        ids = self._classes.setdefault((region.writer, region.tenant, region.slot_bytes), [])
        ids.append(region.id)
        ids.sort()

    def _unmapped(self, region_id: int, client: int) -> None:
        self._retired[region_id].mappers.discard(client)
        self._settle(region_id)

    def _settle(self, region_id: int) -> None:
        retired = self._retired[region_id]
        if not retired.mappers:
            del self._retired[region_id]
            self._source.give_back(retired.size_bytes)
