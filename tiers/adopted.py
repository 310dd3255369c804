"""What a tier takes over from an earlier daemon: sealed regions with their live slots, as far as they fit.

Nobody can map a sealed region writable again, so a new daemon only reads them. A writer that still has its
mapping goes on filling its own regions, once everybody who maps them has said that nothing of the earlier
epoch is in use; the others are stale: they serve, empty and go. Slots that were not live are nothing but
room: they become visible to nobody, and are used again under the same condition as those freed later.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from kvstore.tiers.book import RegionBook
from kvstore.tiers.directory import Labels
from kvstore.tiers.memfd import PAGE_BYTES
from kvstore.tiers.region import Region
from kvstore.tiers.slots import MOST_SLOTS, Int64s, SlotTable
from kvstore.types import SLOT_BITS


@dataclass(frozen=True, slots=True)
class FormerRegion:
    """A region of an earlier daemon. ``labels`` go with ``indexes``, its slots that were live, ascending.

    ``writer`` is None if that one is gone or has not mapped it. ``fd`` is sealed; -1 for a region that is
    nothing but memory which ``mappers`` still have.
    """

    id: int
    fd: int
    size_bytes: int
    slot_bytes: int
    tenant: str
    writer: int | None
    mappers: frozenset[int]
    indexes: Int64s
    labels: Labels
    inode: int = 0
    """Of its memory file, 0 if not known."""

    @property
    def serves(self) -> bool:
        """Whether there is anything to adopt it for."""
        fits = PAGE_BYTES <= self.slot_bytes <= self.size_bytes and self.slot_bytes % PAGE_BYTES == 0
        return self.fd >= 0 and fits and self.size_bytes // self.slot_bytes <= MOST_SLOTS and len(self.indexes) > 0


@dataclass(frozen=True, slots=True)
class Former:
    """All regions of an earlier daemon by ascending id, and the highest id that it gave."""

    regions: list[FormerRegion]
    last_id: int

    def close(self) -> None:
        """Close the descriptors. For a tier that was not made."""
        for region in self.regions:
            if region.fd >= 0:
                os.close(region.fd)


@dataclass(frozen=True, slots=True)
class FormerBlocks:
    """Blocks that were taken over: int64 ``[n]`` slots and their labels."""

    slots: Int64s
    labels: Labels

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class Plan:
    """What becomes of an earlier daemon's regions."""

    kept: list[FormerRegion] = field(default_factory=list)
    retired: list[FormerRegion] = field(default_factory=list)
    dropped: list[FormerRegion] = field(default_factory=list)
    last_id: int = 0

    @property
    def out_bytes(self) -> int:
        """What they take of the budget."""
        return sum(region.size_bytes for region in (*self.kept, *self.retired))


def plan_adoption(former: Former, capacity_bytes: int) -> Plan:
    """Keep what serves and fits, the most useful regions first; what clients still map counts in any case.

    First come those that can be written again, then those with most blocks that were to be evicted late. Where
    regions stay that nobody can write, room for moving the blocks of the largest one is left, as far as the
    clients that map others leave them.
    """
    use = _use(former.regions)
    plan = Plan(last_id=former.last_id)
    mapped_bytes = sum(region.size_bytes for region in former.regions if region.mappers)
    moving_bytes = max((r.size_bytes for r in former.regions if r.serves and r.writer is None), default=0)
    kept_bytes, free_bytes = 0, capacity_bytes - mapped_bytes
    for region in sorted(former.regions, key=lambda region: (region.writer is not None, use[region.id]), reverse=True):
        keep_bytes = moving_bytes if region.writer is None else 0
        fits = kept_bytes + region.size_bytes + keep_bytes <= capacity_bytes
        if region.mappers:
            (plan.kept if region.serves and fits else plan.retired).append(region)
        elif region.serves and fits and region.size_bytes + keep_bytes <= free_bytes:
            plan.kept.append(region)
            free_bytes -= region.size_bytes
        else:
            plan.dropped.append(region)
        if plan.kept and plan.kept[-1] is region:
            kept_bytes += region.size_bytes
    plan.kept.sort(key=lambda region: region.id)
    return plan


def _use(regions: list[FormerRegion]) -> dict[int, float]:
    """By region, the places of its blocks in the order of eviction, per byte of the region."""
    ranks = np.concatenate([np.empty(0), *(region.labels.ranks for region in regions)])
    places = np.empty(len(ranks))
    places[np.argsort(ranks, kind="stable")] = np.arange(1, len(ranks) + 1)
    ends = np.cumsum([len(region.labels) for region in regions], dtype=np.int64)
    parts = np.split(places, ends[:-1]) if regions else []
    return {
        region.id: float(part.sum()) * region.slot_bytes / region.size_bytes
        for region, part in zip(regions, parts, strict=True)
    }


def take_in(plan: Plan, book: RegionBook[Region], table: SlotTable) -> FormerBlocks:
    """Carry a plan out. A region that can't be mapped is nothing but memory from then on, as the dropped ones."""
    slots: list[Int64s] = []
    labels: list[Labels] = []
    unmappable: list[FormerRegion] = []
    for former in plan.kept:
        try:
            region = Region(former.size_bytes, adopted_fd=former.fd)
        except OSError:
            unmappable.append(former)
            continue
        book.adopt(region, former.id, former.writer, former.tenant, former.slot_bytes, former.mappers)
        slots.append(former.indexes + (former.id << SLOT_BITS))
        labels.append(former.labels)
    book.start_after(plan.last_id)
    for former in (*plan.retired, *unmappable):
        book.adopt_retired(former.id, former.size_bytes, former.mappers, former.inode)
    for former in (*plan.retired, *plan.dropped):
        if former.fd >= 0:
            os.close(former.fd)
    blocks = FormerBlocks(np.concatenate([np.empty(0, np.int64), *slots]), Labels.join(labels))
    table.hand_out(blocks.slots)
    table.commit(blocks.slots, np.arange(len(blocks), dtype=np.int64))
    if table.directory is not None:
        table.directory.publish(table.resolve(blocks.slots).places, blocks.labels)
    return blocks
